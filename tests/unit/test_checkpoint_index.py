"""Folders of weights: whole ones in every layout open, broken ones say which file and why."""

import json
import logging
import os
import shutil

import pytest
import torch
from checkpoint_samples import load, official_weights, tiny_config, write_raw, write_sample

from a3b_engine.checkpoint.index import INDEX_NAME, CheckpointIndex
from a3b_engine.checkpoint.write import write_safetensors
from a3b_engine.errors import CheckpointError, UnsupportedFormatError

SHARD = 40_000


@pytest.fixture
def sharded(tmp_path):
    folder = write_sample(tmp_path / "model", max_shard_bytes=SHARD)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def edit_index(folder, change):
    path = folder / INDEX_NAME
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(folder)
    assert str(caught.value).isascii()
    return str(caught.value)


def test_sharded_folder_opens(sharded):
    index = CheckpointIndex.open(sharded)
    assert set(index.tensors) == set(official_weights(tiny_config()))
    assert index.total_bytes == sum(2 * tensor.numel() for tensor in official_weights(tiny_config()).values())
    assert [path.name for path in index.files] == sorted(path.name for path in sharded.glob("*.safetensors"))
    assert index.metadata == {"format": "pt"}


@pytest.mark.parametrize("max_shard_bytes", [SHARD, 10**9])
def test_without_an_index_all_files_are_taken(tmp_path, max_shard_bytes):
    folder = write_sample(tmp_path / "model", max_shard_bytes=max_shard_bytes, with_index=False)
    assert not (folder / INDEX_NAME).exists()
    assert set(CheckpointIndex.open(folder).tensors) == set(official_weights(tiny_config()))


def test_f11_shard_of_the_index_is_absent(sharded):
    edit_index(sharded, lambda content: content["weight_map"].update({"lm_head.weight": "model-00002-of-00009.safetensors"}))
    text = refusal(sharded)
    assert "model-00002-of-00009.safetensors" in text and "Incomplete download?" in text


def test_f11_without_an_index_the_shard_numbers_tell(sharded):
    (sharded / INDEX_NAME).unlink()
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    (sharded / names[1]).unlink()
    text = refusal(sharded)
    assert names[1] in text and f"1 of {len(names)} weight files missing" in text and "Incomplete download?" in text


def test_f14_lfs_pointer_in_place_of_a_shard(sharded):
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[0]
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 5368709120\n"
    (sharded / name).write_bytes(pointer.encode())
    text = refusal(sharded)
    assert name in text and f"Git LFS pointer of {len(pointer)} bytes" in text and "Incomplete download?" in text


def test_f14_lfs_pointer_in_place_of_the_index(sharded):
    (sharded / INDEX_NAME).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 7\n", encoding="utf-8")
    assert INDEX_NAME in refusal(sharded) and "Git LFS pointer" in refusal(sharded)


def test_f16_unfinished_parts_are_not_opened_and_the_absent_shard_is_named(sharded):
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[-1]
    (sharded / name).unlink()
    parts = sharded / ".cache" / "huggingface" / "download"
    parts.mkdir(parents=True)
    # Opening this part would fail differently: it is a folder.
    (parts / "Ab3.0123.incomplete").mkdir()
    text = refusal(sharded)
    assert name in text and "Ab3.0123.incomplete" in text and "Incomplete download?" in text


def test_f16_leftover_parts_of_a_whole_download_only_warn(sharded, caplog):
    parts = sharded / ".cache" / "huggingface" / "download"
    parts.mkdir(parents=True)
    (parts / "Ab3.0123.incomplete").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        CheckpointIndex.open(sharded)
    assert "Ab3.0123.incomplete" in caplog.text


def test_only_parts_and_no_weights(tmp_path):
    (tmp_path / "model.safetensors.crdownload").write_bytes(b"half")
    assert "model.safetensors.crdownload" in refusal(tmp_path) and "Incomplete download?" in refusal(tmp_path)


@pytest.mark.parametrize("suffix", [".aria2", ".part", ".incomplete"])
def test_a_download_marker_beside_a_full_size_shard(sharded, suffix):
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[1]
    (sharded / (name + suffix)).write_bytes(b"")
    assert name + suffix in refusal(sharded) and "has not finished" in refusal(sharded)


def test_truncated_shard_names_both_sizes(sharded):
    path = sorted(sharded.glob("*.safetensors"))[1]
    size = path.stat().st_size
    with open(path, "r+b") as stream:
        stream.truncate(size - 100)
    text = refusal(sharded)
    assert path.name in text and f"file is {size - 100} bytes, its header says {size}" in text and "Incomplete download?" in text


def test_tensor_of_the_index_that_is_not_in_its_file(sharded):
    name = sorted(path.name for path in sharded.glob("*.safetensors"))[0]
    edit_index(sharded, lambda content: content["weight_map"].update({"model.ghost.weight": name}))
    text = refusal(sharded)
    assert "model.ghost.weight" in text and name in text and "1 tensor(s)" in text


@pytest.mark.parametrize(
    "evil",
    ["../outside.safetensors", "../../etc/passwd", "/etc/passwd", "/tmp/x.safetensors", "sub/x.safetensors", "..\\x.safetensors",
     "C:\\x.safetensors", "C:x.safetensors", "x\0.safetensors", "model.bin", "", ".", "a\n.safetensors", 7, None, ["x.safetensors"]],
)  # fmt: skip
def test_index_cannot_name_files_elsewhere(sharded, evil):
    write_safetensors(sharded.parent / "outside.safetensors", {"secret": torch.ones(2)})
    edit_index(sharded, lambda content: content["weight_map"].update({"secret": evil}))
    text = refusal(sharded)
    assert "secret is mapped to" in text and "plain *.safetensors file names" in text


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "nonsense", '{"weight_map":' + "[" * 100_000])
def test_broken_index_file(sharded, content):
    (sharded / INDEX_NAME).write_text(content, encoding="utf-8")
    assert INDEX_NAME in refusal(sharded)


def hub_snapshot(tmp_path, source):
    """The hub cache: files of a snapshot are links to blobs named by hash."""
    repo = tmp_path / "hub" / "models--Qwen--Qwen3.5-35B-A3B-FP8"
    snapshot = repo / "snapshots" / "0123abcd"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        blob = repo / "blobs" / f"{number:064x}"
        shutil.copy(path, blob)
        try:
            os.symlink(os.path.join("..", "..", "blobs", blob.name), snapshot / path.name)
        except OSError:
            pytest.skip("this system does not let the tests make symbolic links")
    return snapshot


def test_hub_snapshot_of_links_opens_and_loads(tmp_path, sharded):
    snapshot = hub_snapshot(tmp_path, sharded)
    assert load(snapshot).keys() == load(sharded).keys()


def test_hub_snapshot_with_a_lost_blob(tmp_path, sharded):
    snapshot = hub_snapshot(tmp_path, sharded)
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    blob = shard.resolve()
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    text = refusal(snapshot)
    assert shard.name in text and "link whose target is gone" in text and blob.name + ".incomplete" in text


def test_same_tensor_in_two_files_without_an_index(tmp_path):
    folder = write_raw(tmp_path, {"a.weight": torch.ones(1)})
    write_safetensors(folder / "other.safetensors", {"a.weight": torch.ones(1)})
    text = refusal(folder)
    assert "a.weight" in text and "model.safetensors" in text and "other.safetensors" in text


def test_index_decides_which_copy_counts(tmp_path):
    folder = write_raw(tmp_path, {"a.weight": torch.ones(1), "b.weight": torch.ones(1)})
    write_safetensors(folder / "other.safetensors", {"a.weight": torch.ones(1)})
    weight_map = {"a.weight": "other.safetensors", "b.weight": "model.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    index = CheckpointIndex.open(folder)
    assert {name: info.file.name for name, info in index.tensors.items()} == weight_map


def test_files_outside_the_index_are_not_opened(sharded):
    (sharded / "adapter_model.safetensors").write_bytes(b"broken")
    (sharded / "notes.safetensors").write_bytes(b"broken")
    assert len(CheckpointIndex.open(sharded).files) == len(list(sharded.glob("model-*.safetensors")))


@pytest.mark.parametrize(
    "name, expected",
    [("model-Q4_K_M.gguf", "GGUF"), ("pytorch_model.bin", "pickle"), ("openvino_model.xml", "OpenVINO"), ("weights.npz", "MLX")],
)
def test_other_kinds_of_model_files_are_refused_by_name(tmp_path, name, expected):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnsupportedFormatError, match=expected) as caught:
        CheckpointIndex.open(tmp_path)
    assert name in str(caught.value) and "official FP8 or BF16" in str(caught.value)


def test_adapter_folder_and_empty_folder_and_no_folder(tmp_path):
    assert "no *.safetensors file" in refusal(tmp_path)
    assert "cannot be read as a folder" in refusal(tmp_path / "absent")
    write_safetensors(tmp_path / "adapter_model.safetensors", {"a": torch.ones(1)})
    assert "only a LoRA adapter" in refusal(tmp_path)


def test_several_index_files(sharded):
    (sharded / INDEX_NAME).rename(sharded / "a.safetensors.index.json")
    CheckpointIndex.open(sharded)
    shutil.copy(sharded / "a.safetensors.index.json", sharded / "b.safetensors.index.json")
    assert "several index files" in refusal(sharded)


def test_an_index_saved_with_a_byte_order_mark_opens(sharded):
    path = sharded / INDEX_NAME
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert CheckpointIndex.open(sharded).tensors
