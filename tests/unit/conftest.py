"""Fixtures of the unit tests."""

import importlib.util

import pytest
import torch
from hypothesis import settings

# Tiny models gain nothing from a second thread and lose a lot where other processes use the core it waits for.
torch.set_num_threads(1)
# An example may wait for a core that other tests use; what has to be quick is measured in time of the processor.
settings.register_profile("beside others", deadline=None)
settings.load_profile("beside others")


@pytest.fixture(scope="session")
def random_checkpoint(repository, tmp_path_factory):
    """A small random checkpoint in the official FP8 layout, made once a session."""
    path = repository / "tools" / "demo_model" / "make_random.py"
    spec = importlib.util.spec_from_file_location("make_random", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("checkpoint") / "random"
    module.make_random_checkpoint(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["whole", "pieces"])
def pieces(request, monkeypatch):
    """Checkpoints once as they are, once with reads of 700 bytes, which split every tensor."""
    from a3b_engine.checkpoint import pipeline, reader

    if request.param:
        for module in (pipeline, reader):
            monkeypatch.setattr(module, "CHUNK_BYTES", 700)
        monkeypatch.setattr(pipeline, "_DIRECT_BYTES", 300)
        monkeypatch.setattr(pipeline, "_GAP_BYTES", 50)


@pytest.fixture(scope="session")
def engine(random_checkpoint):
    """The checkpoint loaded. A test that unloads it loads it again."""
    from a3b_engine import Engine

    engine = Engine.load(random_checkpoint, context=1024)
    yield engine
    engine.close()
