"""Tests of Triton kernels without a GPU: their cases run under Triton's interpreter, in a process of their own, because
the interpreter has to be chosen before Triton is imported and then holds for the whole process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent.parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; there are no wheels of it for this platform"
)


def run_cases(file: str) -> None:
    """Run the tests of tests/unit/<file> under the interpreter; their report is shown where one fails."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-c", str(TESTS / "pytest.ini"), "-q", str(TESTS / "unit" / file)]
    done = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=300)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def mend_interpreter() -> None:
    """Repairs for Triton 3.6, to be made before kernels are launched.

    It keeps scalars as arrays of one element, which NumPy 2.4 no longer takes for the bound of a loop. And most of the
    time of a test goes into replacing the whole of triton.language anew at every launch and every call of a device function,
    and into doing every whole-number operation twice to see whether it overflows. Here the language is replaced once: in this
    process nothing needs the other one.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"language": tl, "core": tl.core}))
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()  # of no changes
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
