"""Stands in for torchvision in the 2024 ComfyUI that the demo and the tests start.

That ComfyUI imports torchvision at the top of its Stable Cascade code and uses it only when such a model is
built, which this pack never does. A real torchvision must match its torch build exactly (a CPU build of one
does not import beside a CUDA build of the other), so it is left out and this module takes the import.
"""


def __getattr__(name):
    raise AttributeError(f"torchvision.{name}: torchvision is not part of the demo's ComfyUI")
