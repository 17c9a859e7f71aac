"""Batches of lessons, made by worker processes and handed over through memory-mapped files. No torch here.

A batch travels as bytes in a slot, a file that both sides map; the queues carry only slot numbers and array headers. So
the training process copies nothing through a pipe, and neither side needs shared memory of the system's own.
"""

from __future__ import annotations

import queue
import random
import traceback
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from tools.demo_model.world import sample
from tools.demo_model.world.draw import draw
from tools.demo_model.world.scene import make_scene

from .batching import Batching
from .looks import LABELS, labels
from .tokens import Encoder, trait_weights

ALIGNMENT = 64


def slot_bytes(plan: Batching) -> int:
    """Room for the largest batch."""
    pictures = plan.batch_lessons * plan.side**2 * 3
    return pictures + 24 * plan.batch_tokens + (64 + 8 * LABELS) * plan.batch_lessons + 4096


def group_batches(plan: Batching, encoder: Encoder, weights: np.ndarray, group: int) -> Iterator[dict[str, np.ndarray]]:
    """The lessons of one group of seeds, sorted by length and cut into batches, in random order."""
    first = plan.seed * (1 << 32) + group * plan.group
    if not plan.kinds:
        for start in range(first, first + plan.group, plan.batch_lessons):
            scenes = [make_scene(seed) for seed in range(start, min(start + plan.batch_lessons, first + plan.group))]
            yield {"pictures": np.stack([draw(scene) for scene in scenes]), "labels": np.stack([labels(scene) for scene in scenes])}
        return
    lessons = [sample(seed, weights=plan.kinds) for seed in range(first, first + plan.group)]
    pairs = sorted(((encoder.encode(lesson), lesson) for lesson in lessons), key=lambda pair: len(pair[0]))
    batches: list[list] = []
    while pairs:
        longest = len(pairs[-1][0])
        alike = sum(len(encoded) > 0.5 * longest for encoded, _ in pairs)  # scripts and questions differ much more
        most = max(1, min(plan.batch_lessons, plan.batch_tokens // padded_length(longest)))
        count = -(-alike // -(-alike // most))  # as many as in each of the others, if all were as long
        batches.append(pairs[-count:])
        del pairs[-count:]
    random.Random(first).shuffle(batches)
    for batch in batches:
        yield make_batch([one[0] for one in batch], [one[1] for one in batch], weights, encoder.pad_id)


def padded_length(length: int) -> int:
    """Batches come in few lengths, so that the GPU's memory is used again as it is."""
    return -(-length // 64) * 64


def make_batch(encoded: list, lessons: list, weights: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
    """ids [B, L] and pictures [B, S, S, 3] with the image tokens from `starts` [B] on, `lengths` [B]; `where` [M] are the
    flat places whose next token is an answer's, `targets` [M] those tokens, `weights` [M] their weights in the loss;
    labels [B, LABELS] what is drawn."""
    length = padded_length(max(map(len, encoded)))
    ids = np.full((len(encoded), length), pad_id, dtype=np.int64)
    where, targets = [], []
    for row, one in enumerate(encoded):
        ids[row, : len(one)] = one.prompt + one.answer
        where.append(row * length + np.arange(len(one.prompt) - 1, len(one) - 1))
        targets.append(one.answer)
    joined = np.concatenate(targets).astype(np.int64)
    return {
        "ids": ids,
        "pictures": np.stack([lesson.picture for lesson in lessons]),
        "labels": np.stack([labels(lesson.scene) for lesson in lessons]),
        "starts": np.array([one.start for one in encoded], dtype=np.int64),
        "lengths": np.array([len(one) for one in encoded], dtype=np.int64),
        "where": np.concatenate(where),
        "targets": joined,
        "weights": weights[joined],
    }


def write_slot(path: Path, arrays: dict[str, np.ndarray]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Put arrays into a slot file; returns the headers `read_slot` needs."""
    memory = np.memmap(path, dtype=np.uint8, mode="r+")
    headers, offset = [], 0
    for name, array in arrays.items():
        memory[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        headers.append((name, array.dtype.str, array.shape, offset))
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return headers


def read_slot(memory: np.ndarray, headers: list[tuple[str, str, tuple[int, ...], int]]) -> dict[str, np.ndarray]:
    """Views into a mapped slot."""
    result = {}
    for name, code, shape, offset in headers:
        dtype = np.dtype(code)
        size = int(np.prod(shape)) * dtype.itemsize
        result[name] = memory[offset : offset + size].view(dtype).reshape(shape)
    return result


def work(number: int, workers: int, plan: Batching, slots: list[Path], free: Any, ready: Any, stop: Any) -> None:
    """Body of a worker process: groups `plan.first_group` + number, + workers, ... until `stop` is set."""
    ready.cancel_join_thread()  # what was not fetched when training ends is not missed
    try:
        encoder = Encoder(plan.tokenizer, plan.image_tokens)
        weights = trait_weights(encoder.tokenizer, plan.vocab_size, plan.trait_weight)
        group = plan.first_group + number
        while not stop.is_set():
            for arrays in group_batches(plan, encoder, weights, group):
                slot = None
                while slot is None:
                    if stop.is_set():
                        return
                    try:
                        slot = free.get(timeout=0.5)
                    except queue.Empty:
                        continue
                ready.put((slot, write_slot(slots[slot], arrays), group))
            group += workers
    except Exception:
        ready.put((None, traceback.format_exc(), number))
        stop.wait(30)  # until the message is through
