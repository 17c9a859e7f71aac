"""Tokenizer on a small trained vocabulary: round trips, control literals, streaming, broken files."""

import json
import random
import unicodedata

import pytest
from fixtures_text import CONTROL, CONTROL_TEXTS, VARIED_TEXTS, small, small_folder  # noqa: F401 (fixtures)
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.errors import CheckpointError, UnsupportedFormatError
from a3b_engine.tokenizer import Tokenizer, without_surrogates

FRAGMENTS = st.sampled_from([*CONTROL, "<|", "|>", "<", ">", "im_", "think", "/", " ", "\n", "\u4e00", "\U0001f62d"])
HARD_TEXT = st.one_of(st.text(max_size=60), st.lists(FRAGMENTS, max_size=12).map("".join))
RELAXED = settings(max_examples=60, deadline=None, derandomize=True)


def nfc(text):
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("text", VARIED_TEXTS + CONTROL_TEXTS)
def test_plain_text_round_trips_without_control_ids(small, text):  # noqa: F811
    ids = small.encode_plain(text)
    assert small.control_ids.isdisjoint(ids)
    assert small.decode(ids, skip_special=False) == nfc(text)


@given(text=HARD_TEXT)
@RELAXED
def test_any_text_round_trips_without_control_ids(small, text):  # noqa: F811
    ids = small.encode_plain(text)
    assert small.control_ids.isdisjoint(ids)
    assert small.decode(ids) == nfc(text)


@given(text=HARD_TEXT)
@RELAXED
def test_template_text_equals_the_tokenizers_package(small, text):  # noqa: F811
    expected = small._backend.encode(text, add_special_tokens=False).ids
    assert small.encode(text) == expected


@given(data=st.data())
@RELAXED
def test_streamed_pieces_equal_decoding_everything(small, data):  # noqa: F811
    ids = data.draw(st.lists(st.integers(0, small.size + 5), max_size=40))
    for skip_special in (True, False):
        stream = small.stream(skip_special)
        pieces = [stream.push(number) for number in ids] + [stream.flush()]
        assert "".join(pieces) == small.decode(ids, skip_special)


@given(text=HARD_TEXT.map(lambda text: text.replace("\ufffd", "")))
@RELAXED
def test_N05_valid_text_streams_without_replacement_characters(small, text):  # noqa: F811
    stream = small.stream()
    pieces = [stream.push(number) for number in small.encode_plain(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""
    assert "".join(pieces) == nfc(text)


def test_N05_emoji_over_several_tokens_appears_once_it_is_whole(small):  # noqa: F811
    ids = small.encode_plain("\U0001f62d")
    assert len(ids) > 1
    stream = small.stream()
    pieces = [stream.push(number) for number in ids]
    assert pieces == [""] * (len(ids) - 1) + ["\U0001f62d"]


def test_unfinished_character_becomes_a_replacement_only_at_the_end(small):  # noqa: F811
    stream = small.stream()
    assert stream.push(small.encode_plain("\U0001f62d")[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_hidden_and_think_is_not(small):  # noqa: F811
    ids = small.encode("<|im_start|>a<think>b<|im_end|>")
    assert small.decode(ids) == "a<think>b"
    assert small.decode(ids, skip_special=False) == "<|im_start|>a<think>b<|im_end|>"
    assert small.control_literals == tuple(CONTROL)
    assert small.special_ids < small.control_ids


def test_ids_and_sizes(small):  # noqa: F811
    assert small.token_to_id("<|im_end|>") in small.special_ids
    assert small.token_to_id("</think>") == small.size - 1
    assert small.token_to_id("no such token") is None
    assert small.decode([small.size, small.size + 1000, -1]) == ""


def test_lone_surrogates_become_replacement_characters(small):  # noqa: F811
    assert without_surrogates("a\ud83d\ude2db\ud83d") == "a\U0001f62db\ufffd"
    assert small.decode(small.encode_plain("a\ud83d!")) == "a\ufffd!"


def test_literal_built_by_merges_is_taken_apart(small_folder, tmp_path):  # noqa: F811
    """A file may list a control literal in the BPE vocabulary itself; plain text must still not reach it."""
    data = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    literal, built = "<think>", "<"
    for char in literal[1:]:
        merges.append([built, char])
        built += char
        vocab.setdefault(built, len(vocab))
    kept = [token for token in data["added_tokens"] if token["content"] == literal]
    data["added_tokens"] = [{**kept[0], "id": vocab[literal]}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(literal) == [vocab[literal]]
    ids = tokenizer.encode_plain("a <think> b")
    assert vocab[literal] not in ids and tokenizer.decode(ids) == "a <think> b"


def test_added_tokens_named_only_by_the_config_count(small_folder, tmp_path):  # noqa: F811
    text = (small_folder / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    number = Tokenizer.from_folder(tmp_path).size + 3
    entries = {str(number): {"content": "<|audio|>", "special": True}, "5": {"content": "<|used id|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<|audio|>") == [number] and tokenizer.size == number + 1
    assert "<|used id|>" not in tokenizer.control_literals
    assert tokenizer.decode([number]) == "" and tokenizer.control_ids.isdisjoint(tokenizer.encode_plain("<|audio|>"))


def test_json_text_can_be_read_again(small, tmp_path):  # noqa: F811
    (tmp_path / "tokenizer.json").write_text(small.json_text(), encoding="utf-8")
    again = Tokenizer.from_folder(tmp_path)
    assert again.encode("a <think> b") == small.encode("a <think> b")


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["does not exist", "tokenizer.json"]),
        ("", ["cannot be read as a tokenizer"]),
        ('{"version": "1.0"', ["cannot be read as a tokenizer", "incomplete"]),
        ("version https://git-lfs.github.com/spec/v1", ["cannot be read as a tokenizer"]),
        ("[]", ["cannot be read as a tokenizer"]),
    ],
)
def test_broken_files_are_named(tmp_path, content, words):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(random.Random(0).randbytes(64) + b"\xff")
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_other_tokenizer_kinds_are_refused(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    (tmp_path / "tokenizer.json").write_text(Backend(models.WordLevel({"a": 0}, "a")).to_str(), encoding="utf-8")
    with pytest.raises(UnsupportedFormatError, match="WordLevel"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("config", ["[]", "{", '{"added_tokens_decoder": [1]}', '{"added_tokens_decoder": {"x": {}}}', '{"added_tokens_decoder": {"9999": {"content": "<\\ud800>"}}}'])
def test_broken_tokenizer_config_is_named(small_folder, tmp_path, config):  # noqa: F811
    text = (small_folder / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(CheckpointError, match="tokenizer_config.json"):
        Tokenizer.from_folder(tmp_path)
