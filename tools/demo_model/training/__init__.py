"""Training the small demonstration model: the architecture of the engine, batched and differentiable."""
