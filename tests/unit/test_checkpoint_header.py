"""The header of one safetensors file: what is read, and that nothing hostile gets through or crashes."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.checkpoint.header import MAX_JSON_BYTES, read_header
from a3b_engine.checkpoint.write import write_safetensors
from a3b_engine.errors import CheckpointError


def file_with(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_offsets_are_absolute_and_metadata_is_kept(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.arange(3.0), "y": torch.tensor(7, dtype=torch.uint8)}, {"format": "pt"})
    tensors, metadata = read_header(path)
    found = {info.name: info for info in tensors}
    raw = path.read_bytes()
    x = found["x"]
    assert metadata == {"format": "pt"}
    assert (x.dtype, x.shape, x.nbytes) == ("F32", (3,), 12)
    assert torch.frombuffer(bytearray(raw[x.offset : x.offset + x.nbytes]), dtype=torch.float32).tolist() == [0, 1, 2]
    assert (found["y"].shape, raw[found["y"].offset]) == ((), 7)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480])
def test_a_header_length_that_looks_like_a_pickle_is_still_a_header(tmp_path, length):
    """Lengths whose low bytes are 80 02 to 80 04 spell the start of a pickle; a real shard was refused for it."""
    raw = json.dumps({"x": entry()}).encode().ljust(length)
    (info,), _ = read_header(file_with(tmp_path / "a.safetensors", raw, b"\0" * 8))
    assert info.name == "x"


def test_files_of_the_safetensors_library_are_read(tmp_path):
    from safetensors.torch import save_file

    tensors = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.ones(4, dtype=torch.float8_e4m3fn), "empty": torch.ones(0, 5)}
    save_file(tensors, tmp_path / "a.safetensors")
    found = {info.name: (info.dtype, info.shape) for info in read_header(tmp_path / "a.safetensors")[0]}
    assert found == {"b": ("BF16", (2, 3)), "a": ("F8_E4M3", (4,)), "empty": ("F32", (0, 5))}


HOSTILE = {
    "header length beyond the cap": (dict(header=b"{}", length=2**63), "claims 9223372036854775808 bytes"),
    "header length beyond the file": (dict(header=b"{}", length=MAX_JSON_BYTES), "its header alone needs"),
    "nested JSON bomb": (dict(header=b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "nested object bomb": (dict(header=b'{"a":' * 200_000), "JSON"),
    "not JSON": (dict(header=b"weights!"), "not valid JSON"),
    "not UTF-8": (dict(header=b'{"\xff": 1}'), "not valid JSON"),
    "not an object": (dict(header=b"[1, 2, 3]"), "expected a JSON object, found list"),
    "name twice": (dict(header=b'{"x": 1, "x": 2}'), "stands twice"),
    "number too long for an integer": (dict(header=b'{"x":' + b"9" * 6000 + b"}"), "not valid JSON"),
    "not a number": (dict(header=b'{"x": NaN}'), "NaN"),
    "metadata not text": (dict(header={"__metadata__": {"a": 1}}), "__metadata__"),
    "entry not an object": (dict(header={"x": 5}), "not an object"),
    "unknown dtype": (dict(header={"x": entry(dtype="F12")}, data=bytes(8)), "unknown dtype F12"),
    "dtype not text": (dict(header={"x": entry(dtype=["F32"])}, data=bytes(8)), "unknown dtype"),
    "negative dimension": (dict(header={"x": entry(shape=(-2,))}, data=bytes(8)), "bad shape"),
    "true as dimension": (dict(header={"x": entry(shape=(True, 2))}, data=bytes(8)), "bad shape"),
    "fraction as dimension": (dict(header={"x": entry(shape=(2.0,))}, data=bytes(8)), "bad shape"),
    "rank 9": (dict(header={"x": entry(shape=[1] * 9, offsets=(0, 4))}, data=bytes(4)), "bad shape"),
    "enormous shape": (dict(header={"x": entry(shape=(2**40, 2**40))}, data=bytes(8)), "data_offsets"),
    "negative offset": (dict(header={"x": entry(offsets=(-8, 0))}, data=bytes(8)), "bad data_offsets"),
    "offsets backwards": (dict(header={"x": entry(offsets=(8, 0))}, data=bytes(8)), "needs 8 bytes, data_offsets [8, 0] hold -8"),
    "three offsets": (dict(header={"x": entry(offsets=(0, 4, 8))}, data=bytes(8)), "bad data_offsets"),
    "size differs from dtype": (dict(header={"x": entry(dtype="F16")}, data=bytes(8)), "F16 [2] needs 4 bytes"),
    "half a byte": (dict(header={"x": entry(dtype="F4", shape=(3,), offsets=(0, 2))}, data=bytes(2)), "needs 1.5 bytes"),
    "overlap": (dict(header={"x": entry(), "y": entry(offsets=(4, 12))}, data=bytes(12)), "overlaps"),
    "same range twice": (dict(header={"x": entry(), "y": entry()}, data=bytes(8)), "overlaps"),
    "hole": (dict(header={"x": entry(offsets=(8, 16))}, data=bytes(16)), "8 unclaimed bytes"),
    "past the end": (dict(header={"x": entry(offsets=(0, 8))}, data=bytes(4)), "Incomplete download?"),
    "left over": (dict(header={"x": entry()}, data=bytes(9)), "1 more than its header says"),
    "endless name": (dict(header={"x" * 600: entry()}, data=bytes(8)), "600 characters"),
    "empty name": (dict(header={"": entry()}, data=bytes(8)), "0 characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused_by_name(tmp_path, name):
    parts, expected = HOSTILE[name]
    path = file_with(tmp_path / "model.safetensors", **parts)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert expected in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "file is 0 bytes"),
        (b"12345", "file is 5 bytes"),
        (b"<!DOCTYPE html><html>log in", "web page of 27 bytes"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (b"PK\x03\x04" + bytes(100), "pickle"),
        (b"\x80\x02}q\x00." + bytes(100), "pickle"),
    ],
)
def test_impostors_are_named(tmp_path, content, expected):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        read_header(path)


def test_control_characters_of_a_name_do_not_reach_the_message(tmp_path):
    path = file_with(tmp_path / "a.safetensors", {"a\x1b[31m\nb\u4e00": entry(dtype="??")}, bytes(8))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(caught.value).isascii() and "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "a.safetensors")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F8_E4M3", "F4"]) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON_VALUES,
        "data_offsets": st.tuples(st.integers(-4, 40), st.integers(-4, 40)).map(list) | JSON_VALUES,
    }
)


@settings(max_examples=120, deadline=None)
@given(header=st.dictionaries(st.text(max_size=5), ENTRIES, max_size=3) | JSON_VALUES, size=st.integers(0, 64))
def test_any_json_header_is_read_soundly_or_refused(tmp_path_factory, header, size):
    path = file_with(tmp_path_factory.getbasetemp() / "fuzz.safetensors", header, bytes(size))
    total = path.stat().st_size
    try:
        tensors, _ = read_header(path)
    except CheckpointError:
        return
    covered = sorted((info.offset, info.offset + info.nbytes) for info in tensors)
    assert all(begin >= 0 and end <= total for begin, end in covered)
    assert all(first[1] <= second[0] for first, second in zip(covered, covered[1:]))


@settings(max_examples=120, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except CheckpointError as error:
        assert "bytes.safetensors" in str(error)
