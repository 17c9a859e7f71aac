"""Weights of few bits, made here from weights of 8 or 16 bits."""

from .matrix import quantize_matrix

__all__ = ["quantize_matrix"]
