"""Feeding tokens and picture features through the model, in chunks of any size."""

from __future__ import annotations

from typing import Callable, Iterator, Sequence

import torch

from ..config import ModelConfig
from ..errors import PromptError
from ..image import ImageFeatures
from ..model.positions import ImagePlace, mrope_positions
from ..model.text import TextModel
from .cache import SequenceState

PREFILL_CHUNK = 2048  # tokens; bounds the activations of a long prompt


def locate_images(token_ids: Sequence[int], images: Sequence[ImageFeatures], image_token_id: int) -> list[ImagePlace]:
    """Match the image tokens of a sequence, in order, with pictures (one entry an occurrence).

    The tokens of one picture stand together; two pictures side by side are told apart by their sizes.
    A different number of tokens than features is a `PromptError`.
    """
    places: list[ImagePlace] = []
    at, total = 0, len(token_ids)
    for number, image in enumerate(images, start=1):
        while at < total and token_ids[at] != image_token_id:
            at += 1
        end = at + image.n_tokens
        if end > total or any(token != image_token_id for token in token_ids[at:end]):
            found = sum(token == image_token_id for token in token_ids)
            expected = sum(i.n_tokens for i in images)
            raise PromptError(f"Picture {number} needs {image.n_tokens} image tokens in a row; the sequence has {found} image tokens for {expected} features.")
        places.append(ImagePlace(at, *image.grid))
        at = end
    if any(token == image_token_id for token in token_ids[at:]):
        raise PromptError(f"The sequence has more image tokens than its {len(images)} pictures have features.")
    return places


def forward_chunks(
    model: TextModel,
    config: ModelConfig,
    state: SequenceState,
    token_ids: Sequence[int],
    images: Sequence[ImageFeatures] | None = None,
    *,
    chunk_size: int = PREFILL_CHUNK,
    before_chunk: Callable[[], None] = lambda: None,
) -> Iterator[torch.Tensor]:
    """Run a sequence from the current `state` on, yielding the hidden states [T, D] of each chunk in turn.

    `images` holds one entry an occurrence, in order, and their image tokens are checked; with None such a token is a
    token like any other, as when a model writes one by itself. `before_chunk` is called ahead of every chunk and may raise to stop.
    """
    device = model.embedding.device
    places = [] if images is None else locate_images(token_ids, images, config.image_token_id)
    positions, next_position = mrope_positions(len(token_ids), places)
    positions = (positions + state.next_position).to(device)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    for start in range(0, len(token_ids), chunk_size):
        before_chunk()
        stop = min(start + chunk_size, len(token_ids))
        x = model.embed(ids[start:stop])
        for place, image in zip(places, images or ()):
            first, last = max(place.start, start), min(place.start + place.length, stop)
            if first < last:
                x[first - start : last - start] = image.features[first - place.start : last - place.start].to(x)
        hidden = model.forward(x, positions[:, start:stop], state.layers)
        state.length += stop - start
        yield hidden
    state.next_position += next_position
