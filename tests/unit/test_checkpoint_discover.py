"""Finding checkpoint folders below the model roots."""

import json
import os

import pytest

from a3b_engine.checkpoint.discover import find_checkpoint_folders


def make(folder, model_type="qwen3_5_moe", weights="model.safetensors", config=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / weights).write_bytes(b"x")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}) if config is None else config, encoding="utf-8")
    return folder


def link(target, at):
    at.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.symlink(target, at, target_is_directory=os.path.isdir(target))
    except OSError:
        pytest.skip("this system does not let the tests make symbolic links")


def test_folders_of_the_family_are_found_sorted(tmp_path):
    expected = [make(tmp_path / name) for name in ("b/model", "a", "c/d/e")]
    make(tmp_path / "text", "qwen3_5_moe_text")
    make(tmp_path / "other", "llama")
    make(tmp_path / "typeless", config="{}")
    (tmp_path / "weights-only").mkdir()
    (tmp_path / "weights-only" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "config-only").mkdir()
    (tmp_path / "config-only" / "config.json").write_text('{"model_type": "qwen3_5_moe"}', encoding="utf-8")
    assert find_checkpoint_folders(tmp_path) == sorted([*expected, tmp_path / "text"])


def test_the_root_itself_and_index_without_shards(tmp_path):
    make(tmp_path, weights="model.safetensors.index.json")
    assert find_checkpoint_folders(tmp_path) == [tmp_path]


@pytest.mark.parametrize("config", ["{broken", "", "[]", "[" * 100_000, "\udcff"])
def test_unreadable_config_is_listed_so_that_loading_can_say_why(tmp_path, config):
    folder = make(tmp_path / "model")
    (folder / "config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
    assert find_checkpoint_folders(tmp_path) == [folder]


def test_config_with_byte_order_mark(tmp_path):
    folder = make(tmp_path / "model")
    (folder / "config.json").write_bytes(b'\xef\xbb\xbf{"model_type": "qwen3_5_moe"}')
    (make(tmp_path / "other") / "config.json").write_bytes(b'\xef\xbb\xbf{"model_type": "llama"}')
    assert find_checkpoint_folders(tmp_path) == [folder]


def test_adapters_are_not_checkpoints(tmp_path):
    make(tmp_path / "lora", weights="adapter_model.safetensors")
    assert find_checkpoint_folders(tmp_path) == []


def test_depth_is_counted_from_the_root(tmp_path):
    folder = make(tmp_path / "1" / "2" / "3")
    assert find_checkpoint_folders(tmp_path, max_depth=3) == [folder]
    assert find_checkpoint_folders(tmp_path, max_depth=2) == []


def test_bookkeeping_folders_are_skipped(tmp_path):
    for name in (".git", ".cache", ".no_exist"):
        make(tmp_path / name / "x")
    assert find_checkpoint_folders(tmp_path) == []


def test_hub_snapshots_are_found(tmp_path):
    repo = tmp_path / "models--Qwen--Qwen3.5-35B-A3B-FP8"
    blobs = make(repo / "blobs")
    snapshot = repo / "snapshots" / "0123"
    link(blobs / "config.json", snapshot / "config.json")
    link(blobs / "model.safetensors", snapshot / "model.safetensors")
    assert find_checkpoint_folders(tmp_path) == [snapshot]


def test_links_are_followed_without_looping_and_each_folder_is_listed_once(tmp_path):
    real = make(tmp_path / "elsewhere" / "model")
    root = tmp_path / "root"
    link(real, root / "linked")
    link(root, root / "loop")
    link(real, root / "deep" / "again")
    link(tmp_path / "nowhere", root / "broken")
    assert find_checkpoint_folders(root) == [root / "linked"]


def test_never_an_error(tmp_path):
    assert find_checkpoint_folders(tmp_path / "absent") == []
    (tmp_path / "file").write_bytes(b"")
    assert find_checkpoint_folders(tmp_path / "file") == []
    make(tmp_path / "ok")
    locked = make(tmp_path / "locked" / "x").parent
    locked.chmod(0)
    try:
        assert tmp_path / "ok" in find_checkpoint_folders(tmp_path)
    finally:
        locked.chmod(0o755)
