"""Tokenizer equal to the published one: an independent implementation from PyPI, and the reference files."""

import unicodedata

import pytest
from fixtures_text import (
    CONTROL_TEXTS,
    needs_reference,
    published_package,
    published_tokenizer,
    tokenizer_of_package,
    varied_texts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

RELAXED = settings(max_examples=150, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def package():
    return published_package()


@pytest.fixture(scope="module")
def ours(tmp_path_factory, package):
    return tokenizer_of_package(tmp_path_factory.mktemp("package_vocabulary"))


def test_ids_equal_the_package(ours, package):
    texts = varied_texts()
    assert len(texts) > 300
    for text in texts + CONTROL_TEXTS:
        assert ours.encode(text) == package.encode(text), text
        plain = package.encode(text, allowed_special=set(), disallowed_special=())
        assert ours.encode_plain(text) == plain, text
        assert ours.decode(plain) == package.decode(plain) == unicodedata.normalize("NFC", text)


@given(text=st.text(max_size=80))
@RELAXED
def test_ids_of_any_text_equal_the_package(ours, package, text):
    assert ours.encode(text) == package.encode(text)


def test_every_token_has_the_same_bytes(ours, package):
    assert ours.size == 248077
    for number, expected in package.decoder.items():
        expected = expected.encode("utf-8") if isinstance(expected, str) else expected
        assert ours.token_bytes(number, skip_special=False) == expected


def test_N05_crying_face_streams_whole(ours):
    ids = ours.encode_plain("so \U0001f62d sad")
    stream = ours.stream()
    pieces = [stream.push(number) for number in ids] + [stream.flush()]
    assert "\ufffd" not in "".join(pieces) and "".join(pieces) == "so \U0001f62d sad"


@needs_reference
def test_reference_files_hold_the_same_tokenizer(ours):
    reference = published_tokenizer()
    assert reference.control_literals == ours.control_literals and reference.size == ours.size
    assert all(reference.token_bytes(i, False) == ours.token_bytes(i, False) for i in range(reference.size))
    for text in varied_texts() + CONTROL_TEXTS:
        assert reference.encode(text) == ours.encode(text), text


@needs_reference
def test_reference_control_ids():
    reference = published_tokenizer()
    expected = {
        "<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<|vision_start|>": 248053,
        "<|vision_end|>": 248054, "<|image_pad|>": 248056, "<think>": 248068, "</think>": 248069,
    }  # fmt: skip
    assert {literal: reference.token_to_id(literal) for literal in expected} == expected
    assert 248068 not in reference.special_ids and 248046 in reference.special_ids
