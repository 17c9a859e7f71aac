"""The kernels that read weights: numbers under Triton's interpreter, code for every architecture, and who may use them.

Triton runs in processes of its own: TRITON_INTERPRET must be set before it is imported.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from a3b_engine.kernels import configs, support

HERE = Path(__file__).resolve().parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed; there are no wheels of it for this platform"
)


def process(*arguments, seconds=300, **environment):
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=settings | environment, cwd=HERE.parents[1], timeout=seconds,
        capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip


@needs_triton
def test_numbers_under_the_interpreter():
    files = [HERE / "interpreted_weight_kernels.py", HERE / "interpreted_matrix_units.py"]
    done = process("-m", "pytest", "-c", HERE.parent / "pytest.ini", *files, "-q", "-x", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="only Triton's Linux wheel brings the assembler")
def test_code_for_every_architecture():
    """The launches of the 35B model compile from Ampere to Blackwell, FP8 as bytes below sm_89; weights are read 16 bytes
    at a time, without spilling, and from sm_90 on before the wait wherever they do not depend on the router and a program has no more than one
    tile. The matrix units convert FP8 themselves from sm_89 on."""
    done = process(HERE / "compiled_ahead.py", 80, 86, 89, 90, 120)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert sorted(report) == ["120", "80", "86", "89", "90"]
    for architecture, launches in report.items():
        assert len(launches) == (9 if int(architecture) < 89 else 14)
        for name, facts in launches.items():
            where = f"{name} on sm_{architecture}"
            if name == "choice":  # reads no weights
                assert facts["stack"] == 0, where
                continue
            assert "v4.b32" in facts["weights"] and set(facts["weights"]) <= {"v4.b32", "v2.b32"}, where
            assert facts["stack"] <= 16, where
            one_tile = (name, architecture) != ("qkv z b a", "90")
            assert facts["early"] == (int(architecture) >= 90 and not name.endswith(" up") and one_tile), where


def test_importing_the_pack_leaves_triton_alone():
    code = "import sys, a3b_engine, a3b_engine.kernels.support; print(sorted(m for m in sys.modules if m.startswith('triton')))"
    done = process("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("triton", ["absent", "broken"])
def test_without_triton_the_engine_and_the_commands_are_there(triton, tmp_path):
    """No wheel of it exists for macOS, and on Windows it is a package of its own."""
    cause = "ModuleNotFoundError('no triton', name='triton')" if triton == "absent" else "RuntimeError('wrong glibc')"
    (tmp_path / "triton.py").write_text(f"raise {cause}\n", encoding="utf-8")
    modules = "a3b_engine.engine, a3b_engine.runtime.runner, a3b_engine.runtime.vision_graph, a3b_engine.bench.bench, a3b_engine.cli.generate"
    done = process("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}")
    assert done.returncode == 0, done.stderr


def test_a_cpu_takes_the_plain_path(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(support, "_targets", {})
    monkeypatch.setattr(support, "_verdicts", {})
    assert support.target("cpu") is None
    assert not support.usable("fp8_gemv", "cpu")
    assert support.target("meta") is None


def test_products_elsewhere_are_products():
    """Of every kind that references use, in the one thread."""
    a = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    triangle = torch.tril(a) + 4 * torch.eye(4, dtype=torch.float64)

    def products():
        yield from (a[0] @ a[1], a @ a, a[0] @ a[0, 0], a[0, 0] @ a[0, 1], torch.nn.functional.linear(a[0], a[1], a[0, 0]))
        yield from (torch.einsum("hkv,hk->hv", a, a[:, 0]), torch.linalg.solve_triangular(triangle, a, upper=False))
        yield torch.nn.functional.scaled_dot_product_attention(a[None], a[None], a[None])

    class Counting(ThreadPoolExecutor):
        submitted = 0

        def submit(self, *arguments):
            self.submitted += 1
            return super().submit(*arguments)

    expected = list(products())
    with Counting(1) as executor, support.ProductsElsewhere(executor):
        found = list(products())
        count = executor.submitted
    assert count >= 7 and all(torch.allclose(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


class TestSelfTests:
    CPU = torch.device("cpu")

    @pytest.fixture
    def add(self, monkeypatch):
        """Register a kernel named by the caller, with this check, on a CPU that counts as a device with kernels."""
        here = support.Target(self.CPU, (9, 0), 4, True, False)
        for name, value in (("_targets", {self.CPU: here}), ("_verdicts", {}), ("_tests", {})):
            monkeypatch.setattr(support, name, value)

        def register(name, check, limit=1e-5):
            monkeypatch.setitem(sys.modules, f"{support.__package__}.{name}", types.ModuleType(name))
            support.self_test(name, limit)(check)

        return register

    def test_runs_once_a_device(self, add):
        seen = []
        add("right", lambda where: seen.append(where.device) or 1e-6)
        assert support.usable("right", "cpu") and support.usable("right", "cpu")
        assert seen == [self.CPU]

    @pytest.mark.parametrize("error, words", [(1e-3, "off by 1.00e-03 where 1e-05 is allowed"), (float("nan"), "off by nan")])
    def test_wrong_numbers_disable_it_with_one_line(self, add, caplog, error, words):
        add("wrong", lambda where: error)
        with caplog.at_level(logging.WARNING):
            assert not support.usable("wrong", "cpu") and not support.usable("wrong", "cpu")
        (record,) = caplog.records
        assert "kernel wrong is not used on cpu" in record.getMessage() and words in record.getMessage()

    @pytest.mark.parametrize(
        "problem",
        [
            torch.cuda.OutOfMemoryError("none left"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            RuntimeError("CUDA error: out of memory"), RuntimeError("Triton Error [CUDA]: out of memory"),
        ],
    )  # fmt: skip
    def test_want_of_memory_is_no_verdict(self, add, caplog, problem):
        tries = iter([problem, 1e-6])

        def check(where):
            found = next(tries)
            if isinstance(found, Exception):
                raise found
            return found

        add("squeezed", check)
        with caplog.at_level(logging.WARNING):
            assert not support.usable("squeezed", "cpu") and support.usable("squeezed", "cpu")
        (record,) = caplog.records
        assert "before the next load" in record.getMessage()

    def test_a_thread_that_finds_no_memory_at_its_beginning_goes_on(self, add, monkeypatch):
        def full(*arguments, **options):
            raise torch.cuda.OutOfMemoryError("none left")

        add("product", lambda where: float((torch.eye(2) @ torch.eye(2)).sum() - 2))
        monkeypatch.setattr(support.torch, "zeros", full)
        assert support.all_usable(["product"], "cpu")

    def test_several_at_once_and_those_without_memory_again_alone(self, add, caplog):
        """Two wait for each other, which only two threads can do; of a third the first try finds no memory."""
        both, tries = threading.Barrier(2, timeout=30), iter([torch.cuda.OutOfMemoryError("none left"), 1e-6])

        def squeezed(where):
            found = next(tries)
            if isinstance(found, Exception):
                raise found
            return found

        add("left", lambda where: both.wait() * 0.0 + float((torch.eye(2) @ torch.eye(2)).sum() - 2))
        add("right", lambda where: both.wait() * 0.0)
        add("squeezed", squeezed)
        with caplog.at_level(logging.WARNING):
            assert support.all_usable(["left", "right", "squeezed"], "cpu")
        assert not caplog.records

    def test_what_a_compiler_raises_disables_it(self, add, caplog):
        def check(where):
            raise RuntimeError("no compiler \u4e2d found\nsecond line")

        add("raising", check)
        with caplog.at_level(logging.WARNING):
            assert not support.usable("raising", "cpu")
        (record,) = caplog.records
        assert record.getMessage().isascii() and "RuntimeError: no compiler ? found; the plain path" in record.getMessage()

    def test_a_kernel_that_does_not_exist(self, add, caplog):
        assert not support.usable("no_such_kernel", "cpu")
        assert "ModuleNotFoundError" in caplog.text

    def test_a_failing_kernel_leaves_the_others(self, add):
        add("wrong", lambda where: 1.0)
        add("right", lambda where: 0.0)
        assert not support.usable("wrong", "cpu") and support.usable("right", "cpu")

    def test_relative_error(self):
        one = torch.ones(4)
        assert support.relative_error(one * 1.01, one) == pytest.approx(0.01, rel=1e-4)
        assert not support.relative_error(one * torch.nan, one) <= 1e9


class TestConfigurations:
    @staticmethod
    def device(capability, multiprocessors=132):
        return support.Target(torch.device("cpu"), capability, multiprocessors, True, False)

    def test_every_entry_is_a_power_of_two(self):
        for entries in configs.TABLE.values():
            assert (8, 0) in entries  # the oldest card kernels run on
            for config in entries.values():
                for value in (config.rows, config.columns, config.warps):
                    assert value == configs.next_power_of_two(value)

    def test_the_nearest_older_card_counts(self, monkeypatch):
        old, new = configs.TileConfig(8, 256, 4), configs.TileConfig(4, 512, 8)
        monkeypatch.setitem(configs.TABLE, "sample", {(8, 0): old, (9, 0): new})
        found = [configs.configuration("sample", self.device(capability)) for capability in ((8, 0), (8, 9), (9, 0), (12, 0))]
        assert found == [old, old, new, new]

    def test_small_matrices_still_give_every_multiprocessor_two_programs(self):
        config = configs.TileConfig(8, 2048, 4)
        assert configs.fitted(config, 12288, 2048, self.device((9, 0))) == config
        assert configs.fitted(config, 1024, 2048, self.device((9, 0))).rows == 2
        assert configs.fitted(config, 64, 100, self.device((9, 0))) == configs.TileConfig(1, 128, 4)
