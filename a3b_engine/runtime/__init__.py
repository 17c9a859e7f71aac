"""Running the model: caches of one sequence, prefill in chunks, the decode loop."""
