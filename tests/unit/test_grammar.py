"""Grammar-constrained decoding: whatever allowed tokens are drawn, the text fits the schema or pattern."""

import json
import random
import re

import pytest
import torch
from fixtures_text import needs_reference, published_tokenizer, small, small_folder  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.errors import GrammarError
from a3b_engine.grammar import GrammarCompiler, apply_bitmask

VOCAB = 512  # padded beyond the small tokenizer on purpose
PANEL = {
    "type": "object",
    "properties": {
        "index": {"const": 1},
        "shot": {"enum": ["close", "medium", "wide"]},
        "action": {"type": "string", "maxLength": 12},
        "props": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 4}, "maxItems": 2},
        "flashback": {"type": "boolean"},
    },
    "required": ["index", "shot", "action", "props", "flashback"],
    "additionalProperties": False,
}
SCRIPT = {
    "type": "object",
    "properties": {"panels": {"type": "array", "items": PANEL, "minItems": 2, "maxItems": 2}},
    "required": ["panels"],
    "additionalProperties": False,
}
PATTERNS = [r"(yes|no)", r"[0-9]{2,4}-[a-c]+x", r"\p{Han}{1,3}\u3002?", r"a?b?c?", r"\{\"n\": (0|[1-9][0-9]{0,3})\}"]


@pytest.fixture(scope="module")
def eos(small):  # noqa: F811
    return small.token_to_id("<|im_end|>"), small.token_to_id("<|endoftext|>")


@pytest.fixture(scope="module")
def compiler(small, eos):  # noqa: F811
    return GrammarCompiler(small, VOCAB, eos)


def allowed(matcher):
    mask = matcher.bitmask()
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.reshape(-1).nonzero().flatten().tolist()


def walk(matcher, tokenizer, eos, seed, limit=2000, forced=True, choose=random.Random.choice):
    """Draw allowed tokens until an end token; checks mask, forced tokens and end tokens at every step."""
    draw, ids = random.Random(seed), []
    while len(ids) < limit:
        for number in matcher.forced_tokens() if forced else ():
            assert number in allowed(matcher) and number not in tokenizer.control_ids
            matcher.accept(number)
            ids.append(number)
        options = allowed(matcher)
        assert (eos[0] in options) == (eos[1] in options) == matcher.is_accepting()
        assert not set(options) & (tokenizer.control_ids - set(eos)) and max(options) < tokenizer.size
        number = choose(draw, options)
        matcher.accept(number)
        if number in eos:
            assert matcher.is_accepting() and matcher.is_stopped()
            return tokenizer.decode(ids, skip_special=False)
        ids.append(number)
    raise AssertionError(f"no end after {limit} tokens: {tokenizer.decode(ids)!r}")


def check_script(text):
    script = json.loads(text)
    assert list(script) == ["panels"] and len(script["panels"]) == 2
    for panel in script["panels"]:
        assert list(panel) == list(PANEL["properties"])
        assert panel["index"] == 1 and panel["shot"] in ("close", "medium", "wide")
        assert isinstance(panel["action"], str) and len(panel["action"]) <= 12
        assert len(panel["props"]) <= 2 and all(1 <= len(prop) <= 4 for prop in panel["props"])
        assert isinstance(panel["flashback"], bool)


@pytest.mark.parametrize("seed", range(12))
def test_any_walk_under_a_schema_is_valid_json(compiler, small, eos, seed):  # noqa: F811
    check_script(walk(compiler.json_schema(SCRIPT), small, eos, seed, forced=seed % 2 == 0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_walk_under_a_pattern_matches_it(compiler, small, eos, pattern, seed):  # noqa: F811
    text = walk(compiler.regex(pattern), small, eos, seed)
    assert re.fullmatch(pattern.replace(r"\p{Han}", "[\u2e80-\U0003ffff]"), text)


def test_schema_text_and_object_give_the_same(compiler):
    assert allowed(compiler.json_schema(json.dumps(SCRIPT))) == allowed(compiler.json_schema(SCRIPT))


def test_separators_are_fixed_and_forced(compiler, small, eos):  # noqa: F811
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [2, 3]}}, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    matcher = compiler.json_schema(schema)
    forced = matcher.forced_tokens()
    assert small.decode(forced) == '{"a": 1, "b": [2, 3]}'[: len(small.decode(forced))] and len(forced) > 5
    assert walk(matcher, small, eos, 0) == '{"a": 1, "b": [2, 3]}'


@pytest.mark.parametrize("text", ["x<think>y", "<|im_end|>", "</think><|image_pad|>", "<tool_response>"])
def test_forced_control_literals_are_spelled_as_text(compiler, small, eos, text):  # noqa: F811
    """Also tokens that files do not mark special, such as <think>."""
    schema = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(walk(compiler.json_schema(schema), small, eos, 0)) == {"a": text}
    assert walk(compiler.regex(re.escape(text)), small, eos, 0) == text


def test_control_tokens_are_never_allowed_inside_strings(compiler, small, eos):  # noqa: F811
    matcher = compiler.json_schema({"type": "string"})
    matcher.accept(small.encode_plain('"')[0])
    options = allowed(matcher)
    assert len(options) > 200 and not small.control_ids & set(options)
    with pytest.raises(GrammarError, match="does not fit the JSON schema"):
        matcher.accept(small.token_to_id("<think>"))


def test_end_tokens_only_where_the_answer_is_complete(compiler, small, eos):  # noqa: F811
    matcher = compiler.regex("ab?")
    assert not matcher.is_accepting()
    with pytest.raises(GrammarError, match="not complete"):
        matcher.accept(eos[0])
    matcher.accept(small.encode_plain("a")[0])
    assert matcher.is_accepting() and not matcher.is_stopped() and set(eos) < set(allowed(matcher))
    matcher.accept(small.encode_plain("b")[0])
    assert matcher.is_stopped() and allowed(matcher) == sorted(eos) and matcher.forced_tokens() == []
    matcher.accept(eos[1])
    with pytest.raises(GrammarError, match="has ended"):
        matcher.accept(eos[1])


def test_empty_pattern_allows_only_the_end(compiler, eos):
    matcher = compiler.regex("")
    assert matcher.is_accepting() and allowed(matcher) == sorted(eos)


def test_wrong_tokens_are_refused_and_matchers_are_independent(compiler, small):  # noqa: F811
    first, second = compiler.regex("ab"), compiler.regex("ab")
    with pytest.raises(GrammarError, match="does not fit the regular expression"):
        first.accept(small.encode_plain("b")[0])
    for number in small.encode_plain("ab"):
        second.accept(number)
    assert second.is_accepting()


@pytest.mark.parametrize(
    "schema, words",
    [
        ("{", "not valid JSON.*line 1, column 2"),
        ("", "not valid JSON"),
        ("[1]", "must be an object"),
        (True, "must be an object"),
        (None, "must be an object"),
        ({"type": "nope"}, "nope"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "object", "required": ["q"], "additionalProperties": False}, "unsatisfiable"),
        ({"$ref": "http://x.test/a"}, "does not fetch"),
        ({"$ref": "#"}, "leads nowhere|cannot be used"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"const": "\ud800"}, "surrogate|cannot be used"),
        ({"a": object()}, "cannot be written as JSON"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "cannot be"),
        ({"description": "x" * 1024**2}, "at most"),
    ],
)
def test_bad_schemas_are_refused_in_plain_words(compiler, schema, words):
    with pytest.raises(GrammarError, match=words) as caught:
        compiler.json_schema(schema)
    assert "<state>" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern, words",
    [
        ("(", "unclosed group"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences"),
        ("a" * 70000, "at most"),
        (None, "must be a text"),
        ("a\ud800", "not valid Unicode"),
    ],
)
def test_bad_patterns_are_refused_in_plain_words(compiler, pattern, words):
    with pytest.raises(GrammarError, match=words):
        compiler.regex(pattern)


def test_explosive_patterns_end_soon(compiler, small, eos):  # noqa: F811
    try:
        matcher = compiler.regex("(((a{1,100}){1,100}){1,100}){1,100}b")
        for _ in range(20):
            matcher.accept(small.encode_plain("a")[0])
            matcher.bitmask()
    except GrammarError as error:
        assert "regular expression" in str(error)


def test_missing_end_tokens_are_named(small):  # noqa: F811
    for eos_ids in ((), (VOCAB,), (small.size,)):
        with pytest.raises(GrammarError, match="eos_token_id"):
            GrammarCompiler(small, VOCAB, eos_ids).regex("a")


@given(bits=st.lists(st.booleans(), min_size=1, max_size=100), extra=st.integers(0, 40))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_apply_bitmask_leaves_exactly_the_allowed_logits(bits, extra):
    words = [sum(bit << i for i, bit in enumerate(bits[at : at + 32])) for at in range(0, len(bits), 32)]
    mask = torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)
    logits = torch.arange(len(bits) + extra, dtype=torch.float32)
    apply_bitmask(logits, mask)
    for index, value in enumerate(logits.tolist()):
        assert value == (index if index < len(bits) and bits[index] else -float("inf"))


def test_N05_walk_over_partial_characters_stays_valid(compiler, small, eos):  # noqa: F811
    """Byte tokens allowed one by one must always add up to whole characters."""
    text = walk(compiler.regex("[\U0001f600-\U0001f64f]{3}"), small, eos, 5)
    assert len(text) == 3 and "\ufffd" not in text


@needs_reference
def test_published_tokenizer_under_a_schema():
    tokenizer, eos = published_tokenizer(), (248046, 248044)
    compiler = GrammarCompiler(tokenizer, 248320, eos)
    for seed in range(2):
        check_script(walk(compiler.json_schema(SCRIPT), tokenizer, eos, seed))
    schema = {"type": "object", "properties": {"a": {"const": "x<think>y<|im_end|>"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    matcher = compiler.json_schema(schema)
    assert json.loads(walk(matcher, tokenizer, eos, 0)) == {"a": "x<think>y<|im_end|>"}
    inside = compiler.json_schema({"type": "string"})
    inside.accept(tokenizer.token_to_id('"'))
    options = allowed(inside)
    assert len(options) > 200_000 and max(options) < 248044
