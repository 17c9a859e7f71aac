"""Tools for developing and trying the pack; nothing here is imported by ComfyUI."""
