"""Commands of `python -m a3b_engine`, one module a command."""
