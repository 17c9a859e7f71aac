"""Where weights are: expert slots on the device, pinned RAM, files, and how a budget is divided."""
