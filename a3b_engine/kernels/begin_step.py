"""The first launch of a decode step: the embedding of the token in hand, and the counters moved on by one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .support import Target, relative_error, self_test

_WIDTH = 1024  # columns a program copies


@triton.jit
def _begin_step(token, embedding, stream, length, position, columns, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    live = at < columns
    row = tl.load(token).to(tl.int64)
    tl.store(stream + at, tl.load(embedding + row * columns + at, mask=live, other=0.0).to(tl.float32), mask=live)
    if tl.program_id(0) == 0:
        tl.store(length, tl.load(length) + 1)
        tl.store(position, tl.load(position) + 1)


def begin_step(token: torch.Tensor, embedding: torch.Tensor, stream: torch.Tensor, length: torch.Tensor, position: torch.Tensor) -> None:
    """stream [D] float32 = embedding [vocab, D] at token int64 [1]; length and position int64 [1] each grow by one.

    Kernels that read the counters ahead of their wait need the launch behind this one to be an ordinary one, without an
    early start.
    """
    columns = stream.shape[0]
    _begin_step[(triton.cdiv(columns, _WIDTH),)](token, embedding, stream, length, position, columns, WIDTH=_WIDTH, num_warps=4)


@self_test("begin_step", limit=0.0)
def _check(where: Target) -> float:
    """A ragged row; counters that do not grow by exactly one make the error infinite."""
    generator = torch.Generator().manual_seed(6)
    embedding = torch.randn((5, 1100), generator=generator).to(where.device, torch.bfloat16)
    token, length, position = (torch.tensor([number], device=where.device) for number in (3, 40, 17))
    stream = torch.full((1100,), torch.nan, device=where.device)
    begin_step(token, embedding, stream, length, position)
    if (int(length), int(position)) != (41, 18):
        return float("inf")
    return relative_error(stream, embedding[3].float())
