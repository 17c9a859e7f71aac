"""What every comparison needs: the tolerance, the picture path of the engine, and one number for a difference."""

from __future__ import annotations

from typing import Sequence

import torch
from small_prompts import encoder_size, merged_grid

LIMIT = 2e-4  # largest absolute difference of float32 logits from the reference


def encode(engine, pictures: list[torch.Tensor]) -> list | None:
    """The engine's features of uint8 [H, W, 3] pictures, in order; None without pictures."""
    if not pictures:
        return None
    images = [image for p in pictures for image in engine.encode_image(p, size=encoder_size(p), fit="keep")]
    assert [tuple(image.grid) for image in images] == [merged_grid(p) for p in pictures]
    return images


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference; infinite when anything is not a number."""
    difference = (ours.double() - theirs.double()).abs()
    return float(difference.max()) if bool(torch.isfinite(difference).all()) else float("inf")


@torch.inference_mode()
def run_pieces(engine, ids: list[int], images: list | None, pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Logits of a prompt fed as separate calls on one sequence state.

    `pieces` are (tokens, chunk_size); together they make up the prompt, and no border cuts a picture (chunks may).
    """
    from a3b_engine.runtime.forward import forward_chunks

    state = engine._new_state()
    remaining = list(images or ())
    rows, start = [], 0
    for tokens, chunk_size in pieces:
        piece = ids[start : start + tokens]
        start += tokens
        pads = piece.count(engine.config.image_token_id)
        placed = []
        while pads:
            placed.append(remaining.pop(0))
            pads -= placed[-1].n_tokens
        rows += [engine._text.logits(hidden) for hidden in forward_chunks(
            engine._text, engine.config, state, piece, placed, chunk_size=chunk_size)]
    assert start == len(ids) == state.length and not remaining
    return torch.cat(rows)
