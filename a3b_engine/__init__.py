"""The engine of the pack: Qwen3.5/3.6 mixture-of-experts checkpoints in plain PyTorch, usable without ComfyUI.

    from a3b_engine import Engine, Prompt, SamplingParams

Names are loaded on first use, so that the parts without a model (such as `python -m a3b_engine parse`) need no torch.
"""

from importlib import import_module

_HOMES = {
    "Answer": ".runtime.answer",
    "Engine": ".engine",
    "ImageFeatures": ".image",
    "ModelConfig": ".config",
    "Prompt": ".prompt",
    "SamplingParams": ".sampling",
    "TokenEvent": ".runtime.answer",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
