"""From the packings of 4-bit files to ours, bit by bit and without arithmetic on the weights.

Each function of PLACE takes a run of the file's rows of one matrix, on the device of the target, and writes it where it
belongs in that matrix's part of a `PackedWeight` (codes [N, K // 2], scale or zero [N, groups]).
"""

from __future__ import annotations

import torch

# A word of GPTQ, AWQ or compressed-tensors holds 8 codes of 4 bits. AWQ puts column 8j + ORDER[i] in bits 4i..4i+3 of
# word j (AutoAWQ, awq/modules/linear/gemm.py: order_map): these columns are the low and the high halves of its bytes.
_AWQ_LOW, _AWQ_HIGH = [0, 4, 1, 5], [2, 6, 3, 7]
_ONES = 0x11111111


def _gptq_codes(words: torch.Tensor, target: torch.Tensor, first: int) -> None:
    """int32 [R, N], each 8 codes down K, the first in the lowest bits (AutoGPTQ): a transposition of words."""
    target.view(torch.int32)[:, first : first + words.shape[0]] = words.t()


def _awq_codes(words: torch.Tensor, target: torch.Tensor, first: int) -> None:
    """int32 [R, N // 8], each 8 codes along N in AWQ's order, a row for each of R columns of the weight (R and first even)."""
    codes = _awq_unpacked(words)
    target[:, first // 2 : (first + words.shape[0]) // 2] = (codes[0::2] | (codes[1::2] << 4)).t()


def _transposed(values: torch.Tensor, target: torch.Tensor, first: int) -> None:
    target[:, first : first + values.shape[0]] = values.t()


def _ct_zeros(words: torch.Tensor, target: torch.Tensor, first: int) -> None:
    """int32 [R, groups], each 8 zeros down N, raised by 8 as the codes are (compressed-tensors, pack_quantized)."""
    nibbles = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    zeros = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).transpose(1, 2).reshape(-1, words.shape[1])
    start = 8 * first
    stop = min(start + zeros.shape[0], target.shape[0])  # the last word of a ragged N is padded
    target[start:stop] = zeros[: stop - start]


def _gptq_zeros(words: torch.Tensor, target: torch.Tensor, first: int) -> None:
    """int32 [R, N // 8], each 8 zeros along N: GPTQ's second version."""
    nibbles = words.contiguous().view(torch.uint8)
    target[:, first : first + words.shape[0]] = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).t()


def _gptq_zeros_v1(words: torch.Tensor, target: torch.Tensor, first: int) -> None:
    """The first version stores every zero lowered by one; whole words are raised, so that borrowed bits come back."""
    _gptq_zeros(words + _ONES, target, first)


def _awq_zeros(words: torch.Tensor, target: torch.Tensor, first: int) -> None:
    target[:, first : first + words.shape[0]] = _awq_unpacked(words).t()


def _awq_unpacked(words: torch.Tensor) -> torch.Tensor:
    """uint8 [R, N] of int32 [R, N // 8]."""
    halves = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    codes = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    codes[..., _AWQ_LOW] = halves & 15
    codes[..., _AWQ_HIGH] = halves >> 4
    return codes.flatten(-2)


PLACE = {
    "gptq_codes": _gptq_codes,
    "awq_codes": _awq_codes,
    "transposed": _transposed,
    "ct_zeros": _ct_zeros,
    "gptq_zeros": _gptq_zeros,
    "gptq_zeros_v1": _gptq_zeros_v1,
    "awq_zeros": _awq_zeros,
}
