"""Triton kernels of the decode step, each beside its PyTorch reference and a numeric self-test.

Importing this package imports nothing else: the kernel modules need Triton, and `support.usable` says whether the
kernels of a module run, and compute the right numbers, on a device. Everything has a plain PyTorch path to fall back to.
"""
