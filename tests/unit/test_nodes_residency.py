"""nodes/residency.py against a fake ComfyUI; tests/host drives the real memory managers."""

import logging
import os
import sys

import pytest
import torch
from fake_comfy import comfy, engine_class, part  # noqa: F401

residency = part("nodes.residency")
sockets = part("nodes.sockets")


@pytest.fixture
def handle(comfy):
    folder = comfy.add_checkpoint(comfy.models_dir / "LLM", "q")
    return sockets.ModelHandle(path=str(folder), device="cpu", vram_gb=20.5, context=4096)


def test_options_reach_the_engine(comfy, engine_class, handle):
    engine = residency.open_engine(handle)
    assert engine.options == {
        "device": "cpu",
        "dtype": None,
        "expert_format": "stored",
        "vram_budget": 20_500_000_000,
        "context": 4096,
        "park": False,
        "cache_experts": False,
    }
    unlimited = sockets.ModelHandle(path=handle.path, device="cpu")
    assert residency.open_engine(unlimited).options["vram_budget"] is None


def test_one_engine_per_option_set(comfy, engine_class, handle):
    same = sockets.ModelHandle(path=handle.path, device="cpu", vram_gb=20.5, context=4096)
    assert residency.open_engine(handle) is residency.open_engine(same)
    other = sockets.ModelHandle(path=handle.path, device="cpu", vram_gb=20.5, context=8192)
    assert residency.open_engine(handle) is not residency.open_engine(other)


def test_working_memory_is_asked_for_on_every_use(comfy, engine_class, handle):
    for need in (111, 222, 9_000_000):
        with residency.loaded(handle, need) as engine:
            assert engine.is_loaded
    # The first time for an answer of the usual length too: a picture comes first, and experts shall not leave again for the answer.
    assert comfy.memory_requests == [4096 * 1000, 222, 9_000_000] and engine.loads == 1


def test_each_load_is_told_in_the_log(comfy, engine_class, handle, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            residency.ensure_loaded(handle, 1)
    assert [line for line in caplog.messages if line.startswith("Loaded q on cpu: 5.00 GB")] != []
    assert sum("Loaded" in line for line in caplog.messages) == 1  # V14


def test_a_model_that_stays_unloaded_is_an_error(comfy, engine_class, handle):
    sys.modules["comfy.model_management"].load_models_gpu = lambda models, **options: None
    with pytest.raises(part("a3b_engine.errors").NotLoadedError, match="q: ComfyUI's memory manager did not load"):
        residency.ensure_loaded(handle, 1)


def test_disabled_smart_memory_is_warned_about_once(comfy, engine_class, handle, caplog):
    residency._warn_no_smart_memory.cache_clear()
    sys.modules["comfy.model_management"].DISABLE_SMART_MEMORY = True
    with caplog.at_level(logging.WARNING):
        residency.ensure_loaded(handle, 1)
        residency.ensure_loaded(handle, 1)
    assert caplog.text.count("--disable-smart-memory") == 1


def test_the_fingerprint_sees_changes_and_survives_broken_links(comfy, tmp_path):
    folder = comfy.add_checkpoint(tmp_path, "q")
    first = residency.checkpoint_fingerprint(folder)
    (folder / "notes.txt").write_text("not read by the engine", encoding="utf-8")
    assert residency.checkpoint_fingerprint(folder) == first
    os.utime(folder / "config.json", ns=(1, 1))
    second = residency.checkpoint_fingerprint(folder)
    assert second != first
    (folder / "model.safetensors").write_bytes(b"x")
    assert residency.checkpoint_fingerprint(folder) not in (first, second)
    try:
        (folder / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    except OSError:
        pytest.skip("this system does not allow symbolic links")
    assert "gone" not in residency.checkpoint_fingerprint(folder)


def test_patcher_matches_the_device_of_the_handle(comfy, engine_class, handle):
    elsewhere = sockets.ModelHandle(path=handle.path, device="cuda:1")
    residency.open_engine(elsewhere)
    assert residency._residents[elsewhere].patcher.load_device == torch.device("cuda", 1)
