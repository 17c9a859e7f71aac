"""Launching a kernel whose constants are settled, with little work on the host.

Triton's own launch looks at every argument to choose among the specialisations it has compiled: 10 to 20 us for a
kernel of many arguments, as much as the kernel itself runs when the prompt is short.
"""

from __future__ import annotations

import re

import torch
import triton
import triton.language as tl

from .support import Target

TRITON_TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.float8e4nv,
}  # fmt: skip
# The entry below is not a public one; where it has not been read in the source, Triton's launch is used.
_DIRECT = re.match(r"3\.6\.", triton.__version__) is not None


class Launcher:
    """One kernel with its constants, on one device.

    Calls must be alike but for values: tensors of the same types that begin at multiples of 16 bytes, whole numbers that
    the kernel names in `do_not_specialize`. The kernel takes its constants behind all other arguments, PDL the last, and
    begins with let_next_start and wait_for_inputs.
    """

    def __init__(self, kernel, target: Target, **constants: object) -> None:
        # Every kernel of the chain waits for the one ahead of it first (rows.wait_for_inputs), so that all may start early.
        constants["PDL"] = target.pdl
        self._kernel, self._constants = kernel, {**constants, "launch_pdl": True} if target.pdl else constants
        self._values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._device = target.device.index
        self._direct = _DIRECT and not target.interpreted
        self._run: tuple | None = None

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        if self._run is not None:
            run, function, metadata, stream = self._run
            run(*grid, stream(self._device), function, metadata, None, None, None, *args, *self._values)
            return
        compiled = self._kernel[grid](*args, **self._constants)
        if self._direct:
            self._run = compiled.run, compiled.function, compiled.packed_metadata, triton.runtime.driver.active.get_current_stream


class Launchers:
    """The launchers of one model: layers of the same sizes share them. A plan asks once and remembers the answer, as the
    question takes longer than the launch."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._made: dict[tuple, Launcher] = {}

    def get(self, kernel, **constants: object) -> Launcher:
        """The launcher of `kernel` with these constants (num_warps and num_stages among them)."""
        key = (kernel, *constants.items())
        if key not in self._made:
            self._made[key] = Launcher(kernel, self.target, **constants)
        return self._made[key]
