"""What `run.py` is made of, shared with the host and browser tests. Standard library only."""
