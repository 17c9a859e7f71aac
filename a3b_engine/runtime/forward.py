"""Feeding tokens and picture features through the model, in chunks of any size."""

from __future__ import annotations

from itertools import pairwise
from typing import Callable, Iterator, Protocol, Sequence

import torch

from ..config import ModelConfig
from ..errors import PromptError
from ..image import ImageFeatures
from ..model.attention import KeyValueStore
from ..model.deltanet import DeltaNetState
from ..model.positions import ImagePlace, mrope_positions
from .cache import SequenceState

PREFILL_CHUNK = 2048  # tokens; bounds the activations of a long prompt


class ForwardModel(Protocol):
    """What prefill needs of a model: `TextModel`, or a faster one with the same face."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T], on any device -> [T, D]."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, states: Sequence[KeyValueStore | DeltaNetState]) -> torch.Tensor:
        """x [T, D] at positions int64 [3, T] -> hidden [T, D] after the final norm; advances `states` by T tokens."""


def locate_images(token_ids: Sequence[int], images: Sequence[ImageFeatures], image_token_id: int) -> list[ImagePlace]:
    """Match the image tokens of a sequence, in order, with pictures (one entry an occurrence).

    The tokens of one picture stand together; two pictures side by side are told apart by their sizes.
    A different number of tokens than features is a `PromptError`.
    """
    places: list[ImagePlace] = []
    found = remaining = token_ids.count(image_token_id)
    at = 0
    for number, image in enumerate(images, start=1):
        if remaining:
            at = token_ids.index(image_token_id, at)
        end = at + image.n_tokens
        if token_ids[at:end].count(image_token_id) != image.n_tokens:
            expected = sum(i.n_tokens for i in images)
            raise PromptError(f"Picture {number} needs {image.n_tokens} image tokens in a row; the sequence has {found} image tokens for {expected} features.")
        places.append(ImagePlace(at, *image.grid))
        at, remaining = end, remaining - image.n_tokens
    if remaining:
        raise PromptError(f"The sequence has more image tokens than its {len(images)} pictures have features.")
    return places


def chunk_borders(total: int, cuts: Sequence[int], chunk_size: int) -> list[int]:
    """Where the chunks of `total` tokens begin and end, ascending from 0: at every cut, and every `chunk_size` after one."""
    edges = sorted({0, total, *(cut for cut in cuts if 0 < cut < total)})
    return [border for first, last in pairwise(edges) for border in range(first, last, chunk_size)] + [total]


def forward_chunks(
    model: ForwardModel,
    config: ModelConfig,
    state: SequenceState,
    token_ids: Sequence[int],
    images: Sequence[ImageFeatures] | None = None,
    *,
    start: int = 0,
    cuts: Sequence[int] | None = None,
    chunk_size: int = PREFILL_CHUNK,
    before_chunk: Callable[[], None] = lambda: None,
) -> Iterator[torch.Tensor]:
    """Run a sequence from the current `state` on, yielding the hidden states [T, D] of each chunk in turn.

    `images` holds one entry an occurrence, in order, and their image tokens are checked; with None such a token is a
    token like any other, as when a model writes one by itself. `before_chunk` is called ahead of every chunk and may raise to stop.

    `start`: so many of `token_ids` are in `state` already; it must be a border of chunks. No chunk goes over one of `cuts`. Where
    chunks begin decides the last bits of the result, so a sequence that shall go on bit by bit from a kept state has
    been cut, and settled in its buffers, at the same places: with `cuts`, even an empty list, that happens at each of
    them and at the end.
    """
    total, device = len(token_ids), state.device
    places = [] if images is None else locate_images(token_ids, images, config.image_token_id)
    borders = chunk_borders(total, cuts or (), chunk_size)
    if start not in borders or start > state.length:
        raise ValueError(f"start: found {start}, expected one of the borders of chunks, {borders}, up to the {state.length} tokens of the state.")
    settled = () if cuts is None else {*cuts, total}
    origin = state.next_position - _position_behind(start, places)
    positions, _ = mrope_positions(total, places)
    positions = (positions[:, start:] + origin).to(device)
    ids = torch.tensor(token_ids[start:], dtype=torch.int64)
    for first, stop in pairwise(borders[borders.index(start) :]):
        before_chunk()
        x = model.embed(ids[first - start : stop - start])
        for place, image in zip(places, images or ()):
            begin, end = max(place.start, first), min(place.start + place.length, stop)
            if begin < end:
                x[begin - first : end - first] = image.features[begin - place.start : end - place.start].to(x)
        hidden = model.forward(x, positions[:, first - start : stop - start], state.layers)
        state.length += stop - first
        state.next_position = origin + _position_behind(stop, places)
        if stop in settled:
            state.settle()
        yield hidden


def _position_behind(length: int, places: Sequence[ImagePlace]) -> int:
    """Position of the text that follows the first `length` tokens; inside a picture, of the text behind it."""
    position = length
    for place in places:
        if place.start < length:
            position += max(place.rows, place.columns) - min(place.length, length - place.start)
    return position
