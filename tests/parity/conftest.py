"""Shared by the conformance tests: small models built once a session, and the largest difference of every kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for entry in (Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))

from differences import (  # noqa: E402, F401
    differences,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)


@pytest.fixture(autouse=True)
def one_thread():
    """The models are so small that a second thread only waits for the first; the session's setting comes back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Models:
    """Oracles, checkpoint folders and engines by name, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._oracles: dict = {}
        self._folders: dict = {}
        self._engines: dict = {}

    def oracle(self, name: str):
        from oracle import Oracle

        if name not in self._oracles:
            self._oracles[name] = Oracle(name)
        return self._oracles[name]

    def folder(self, name: str, form: str = "fp32 fused") -> Path:
        """`form`: "<fp32|bf16|fp8> <fused|per_expert>" by the engine's writer, or "<fp32|bf16> transformers"."""
        from small_files import write_companions, write_folder

        key = (name, form)
        if key not in self._folders:
            folder = self.root / f"{name}-{form.replace(' ', '-')}"
            folder.mkdir()
            number_format, experts = form.split()
            if experts == "transformers":
                self.oracle(name).save(folder, number_format)
                write_companions(folder)
            else:
                write_folder(folder, name, format=number_format, experts=experts)
            self._folders[key] = folder
        return self._folders[key]

    def engine(self, name: str, form: str = "fp32 fused", dtype=None):
        """A loaded engine on the CPU; float32 unless `dtype` says otherwise."""
        import torch
        from a3b_engine import Engine

        dtype = dtype or torch.float32
        key = (name, form, dtype)
        if key not in self._engines:
            self._engines[key] = Engine.load(self.folder(name, form), device="cpu", dtype=dtype)
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    store = Models(tmp_path_factory.mktemp("small_models"))
    yield store
    store.close()
