"""`python -m a3b_engine bench`: a model made up on the device, asked through the real engine and timed."""
