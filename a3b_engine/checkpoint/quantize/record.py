"""How the record of few bits calls itself in config.json and in the tensor names."""

from __future__ import annotations

METHOD, VERSION = "a3b", 1
# Of the way scales and codes are chosen: caches made in another way are made again.
ROUNDING = 1


def stored_names(name: str) -> tuple[str, str]:
    """Tensor names of the codes and scales of a stack "<prefix>layers.N.mlp.experts.gate.weight"."""
    base = name.removesuffix(".weight")
    return f"{base}.codes", f"{base}.scale"
