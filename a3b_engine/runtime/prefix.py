"""Going on from what an earlier prompt left behind, where the new one begins with the same tokens and pictures.

In ComfyUI the same system text and pictures come again and again, and only the last text or the seed changes. So a
copy of the state is kept at two points of a prompt: behind the part that is likely to come again, and at the end. A
sequence that starts from a copy has bit by bit the states that computing it again would give, because a prompt is cut
into the same chunks in either case.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence
from weakref import WeakKeyDictionary

import torch

from ..config import ModelConfig
from ..image import ImageFeatures
from ..model.positions import ImagePlace
from .cache import SequenceState, Snapshot
from .forward import PREFILL_CHUNK, ForwardModel, forward_chunks, locate_images

MIN_SHARED = 64  # tokens; a shorter first part saves less than one more chunk costs


def end_of_first_turn(token_ids: Sequence[int], end_token_ids: Sequence[int]) -> int:
    """How many tokens the first turn of a conversation has, its end token included; 0 where it is the last one that ends.

    That is the system turn if there is one; a lone user turn gives 0. end_token_ids: `ModelConfig.eos_token_ids`.
    """
    ends = [at for at, token in enumerate(token_ids, start=1) if token in end_token_ids]
    return ends[0] if len(ends) > 1 else 0


def cut_points(token_ids: Sequence[int], places: Sequence[ImagePlace], system_end: int, vision_end_token_id: int) -> list[int]:
    """Where a prompt is cut behind the part that comes again: behind its last picture, else at `system_end`.

    Text ahead of the last picture belongs to that part. At most one point; none where the part would be shorter than
    `MIN_SHARED` or the whole prompt.
    """
    cut = system_end
    if places:
        cut = max(place.start + place.length for place in places)
        cut += cut < len(token_ids) and token_ids[cut] == vision_end_token_id
    return [cut] if MIN_SHARED <= cut < len(token_ids) else []


@dataclass(frozen=True)
class PromptKey:
    """What tells a prompt from others, at each point where its state may be kept.

    points: lengths, ascending, the last one that of the whole prompt. digests: of everything that the state at each
    point depends on but the model: tokens, features of pictures, their grids (which decide positions), chunks.
    """

    points: tuple[int, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """A state and the hidden row [1, D] of its last token, from which the next token can be drawn. Not to be written to."""

    snapshot: Snapshot
    hidden: torch.Tensor

    @property
    def length(self) -> int:
        return self.snapshot.length

    @property
    def nbytes(self) -> int:
        return self.snapshot.nbytes + self.hidden.nbytes


class PrefixStore:
    """States of earlier prompts, least recently used first out, in at most `limit_bytes` on the device they came from.

    Holds for one model: its owner calls `clear` when weights, adapters or the dtype change. Any thread may call any
    method; what `find` returned stays whole after it was dropped here.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[bytes, KeptPrefix] = OrderedDict()  # least recently used first
        self._features: WeakKeyDictionary[ImageFeatures, bytes] = WeakKeyDictionary()
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(kept.nbytes for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def key(
        self, token_ids: Sequence[int], images: Sequence[ImageFeatures], places: Sequence[ImagePlace],
        cuts: Sequence[int], chunk_size: int = PREFILL_CHUNK,
    ) -> PromptKey:  # fmt: skip
        """The key of a prompt that is run in chunks of `chunk_size` between `cuts`; images and places one entry an occurrence."""
        points = sorted({len(token_ids), *(cut for cut in cuts if 0 < cut < len(token_ids))})
        running = hashlib.blake2b(struct.pack("<q", chunk_size), digest_size=32)
        digests, first = [], 0
        for point in points:
            # Each part begins with its end, so no two ways of cutting give the same bytes.
            running.update(struct.pack("<q", point))
            running.update(array("q", token_ids[first:point]).tobytes())
            for image, place in zip(images, places, strict=True):
                if first <= place.start < point:
                    running.update(struct.pack("<qqq", place.start, place.rows, place.columns))
                    running.update(self._digest_of(image))
            digests.append(running.digest())
            first = point
        return PromptKey(tuple(points), tuple(digests))

    def find(self, key: PromptKey) -> KeptPrefix | None:
        """The longest kept state that this prompt goes through."""
        with self._lock:
            self._touch(key)
            return next((self._kept[digest] for digest in reversed(key.digests) if digest in self._kept), None)

    def keep(self, key: PromptKey, state: SequenceState, hidden: torch.Tensor) -> bool:
        """Copy `state`, which stands at one of the points of `key`, and hidden [1, D]; False where there is no room.

        Room is made before anything is copied. Other points of the same prompt are not given up for it: the longer
        of two that do not fit together is not kept.
        """
        digest = key.digests[key.points.index(state.length)]
        with self._lock:
            if digest not in self._kept:
                needed = state.snapshot_nbytes + hidden.nbytes
                own = sum(self._kept[d].nbytes for d in key.digests if d in self._kept)
                if own + needed > self.limit_bytes:
                    return False
                self._touch(key)
                self.drop(self.nbytes + needed - self.limit_bytes)
                try:
                    self._kept[digest] = KeptPrefix(state.snapshot(), hidden.clone())
                except torch.cuda.OutOfMemoryError:
                    self._kept.clear()  # what is kept is a convenience: it goes first when memory is short
                    return False
            self._touch(key)
            return True

    def drop(self, bytes_wanted: int) -> int:
        """Give up states, least recently used first, until `bytes_wanted` are free or none is left; returns the bytes freed."""
        freed = 0
        with self._lock:
            while freed < bytes_wanted and self._kept:
                freed += self._kept.popitem(last=False)[1].nbytes
        return freed

    def clear(self) -> None:
        """Give up everything."""
        with self._lock:
            self._kept.clear()

    def _touch(self, key: PromptKey) -> None:
        """Mark the points of a prompt as used, the shortest as the last one: more prompts go through it."""
        for digest in reversed(key.digests):
            if digest in self._kept:
                self._kept.move_to_end(digest)

    def _digest_of(self, image: ImageFeatures) -> bytes:
        """Of the bytes that enter the model. Hashed once an object."""
        with self._lock:
            digest = self._features.get(image)
            if digest is None:
                features = image.features.detach().cpu().contiguous()
                head = f"{features.dtype} {tuple(features.shape)} ".encode()
                content = hashlib.blake2b(head, digest_size=32)
                content.update(features.view(torch.uint8).numpy())
                digest = self._features[image] = content.digest()
            return digest


class Prefilled(NamedTuple):
    """hidden: [1, D] of the last token of the prompt. reused: tokens that were not computed again."""

    hidden: torch.Tensor
    reused: int


def prefill(
    model: ForwardModel,
    config: ModelConfig,
    state: SequenceState,
    store: PrefixStore,
    token_ids: Sequence[int],
    images: Sequence[ImageFeatures],
    *,
    system_end: int = 0,
    chunk_size: int = PREFILL_CHUNK,
    before_chunk: Callable[[], None] = lambda: None,
) -> Prefilled:
    """Bring `state`, whatever it holds, to the end of a prompt of at least one token, over the longest kept part of it.

    `images`, `chunk_size` and `before_chunk` as in `forward_chunks`; `system_end` as in `cut_points`. After any
    exception `state` has to be reset, which the next call does, and `store` holds whole parts only.
    """
    places = locate_images(token_ids, images, config.image_token_id)
    cuts = cut_points(token_ids, places, system_end, config.vision_end_token_id)
    key = store.key(token_ids, images, places, cuts, chunk_size)
    kept = store.find(key)
    if kept is None:
        state.reset()
        start = 0
    else:
        state.restore(kept.snapshot)
        start, hidden = kept.length, kept.hidden.clone()
    for hidden in forward_chunks(
        model, config, state, token_ids, images, start=start, cuts=cuts, chunk_size=chunk_size, before_chunk=before_chunk
    ):
        if state.length in key.points:
            store.keep(key, state, hidden[-1:])
    return Prefilled(hidden[-1:], start)
