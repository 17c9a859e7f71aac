"""Greedy answers for a batch of prompts, with caches."""

from __future__ import annotations

from typing import Sequence

import numpy as np
import torch

from .network import Network, batch_positions
from .tokens import Encoded

_ASK_EVERY = 16  # steps between looks at whether all answers have ended: each look waits for the device


@torch.no_grad()
def greedy(
    network: Network, prompts: Sequence[Encoded], pictures: Sequence[np.ndarray], *, end_id: int, allowed: int, most: int
) -> list[list[int]]:
    """Answers (without the end token) of at most `most` tokens; ids from `allowed` on are never written."""
    device, batch = network.device, len(prompts)
    length = max(len(one.prompt) for one in prompts)
    grid = network.grid(pictures[0].shape[0])
    ids = torch.zeros(batch, length, dtype=torch.int64)
    keep = torch.zeros(batch, length, dtype=torch.bool)
    positions = torch.zeros(3, batch, length, dtype=torch.int64)
    own = batch_positions([one.start for one in prompts], length, grid)
    for row, one in enumerate(prompts):  # padding stands before the prompt
        count = len(one.prompt)
        ids[row, length - count :] = torch.tensor(one.prompt)
        keep[row, length - count :] = True
        positions[:, row, length - count :] = own[:, row, :count]
    starts = torch.tensor([length - len(one.prompt) + one.start for one in prompts], device=device)
    ids, keep, positions = ids.to(device), keep.to(device), positions.to(device)
    stack = torch.from_numpy(np.stack(pictures)).to(device)
    state = network.text.new_state(keep, length + most)
    hidden = network.text.forward_batch(network.embed(ids, stack, starts, keep), positions, state=state)[:, -1:]
    position = positions[:, :, -1:]
    written = torch.full((batch, most), end_id, dtype=torch.int64, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    for step in range(most):
        token = network.text.logits(hidden)[:, 0, :allowed].argmax(-1)
        token = torch.where(ended, end_id, token)
        written[:, step] = token
        ended |= token == end_id
        if step == most - 1 or (step % _ASK_EVERY == 0 and bool(ended.all())):
            break
        position = position + 1
        hidden = network.text.forward_batch(network.text.embed(token[:, None]), position, state=state)
    answers = []
    for row in written.tolist():
        answers.append(row[: row.index(end_id)] if end_id in row else row)
    return answers
