"""The schema compiles in llguidance, and whatever it lets through is read as a whole script."""

import json
import random
import re

import pytest
from byte_tokenizer import END, byte_tokenizer

from a3b_engine.errors import GrammarError
from a3b_engine.script.grammar import comic_json_schema
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import parse_script

llguidance = pytest.importorskip("llguidance")
QUOTE = ord('"')


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def matcher(schema, tokenizer):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    assert llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer) == (False, [])
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0)


def walk(schema, tokenizer, rng, quote_share):
    """A random answer: any allowed byte, with a lean to end the strings."""
    state, answer = matcher(schema, tokenizer), bytearray()
    while not state.is_stopped():
        bias = state.compute_logit_bias()
        allowed = [token for token, allow in enumerate(bias) if allow]
        token = QUOTE if QUOTE in allowed and rng.random() < quote_share else rng.choice(allowed)
        if token == END:
            break
        assert state.consume_token(token), state.get_error()
        answer.append(token)
        assert len(answer) < 100_000
    return answer.decode("utf-8")


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_answers_are_ok(brief, seed, tokenizer):
    rng = random.Random(seed)
    panels, rounds = rng.randint(1, 5), rng.randint(0, 4)
    text = walk(comic_json_schema(panels, rounds, brief=brief), tokenizer, rng, rng.choice([0.01, 0.1, 0.4]))
    result = parse_script(text, expected_panels=panels)
    assert result.status == "ok", result.report
    assert [panel.index for panel in result.script.panels] == list(range(1, panels + 1))
    assert len(result.script.dialogue) == rounds
    assert all(1 <= row.panel <= panels for row in result.script.dialogue)
    assert panel_lists(result).count == panels


def strings_and_lists(schema):
    if isinstance(schema, dict):
        if schema.get("type") in ("string", "array", "object"):
            yield schema
        for value in schema.values():
            yield from strings_and_lists(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from strings_and_lists(value)


@pytest.mark.parametrize("brief", [False, True])
def test_everything_is_bounded(brief):
    for part in strings_and_lists(comic_json_schema(4, 3, brief=brief)):
        if part["type"] == "string":
            assert int(re.search(r"\{\d+,(\d+)\}\$$", part["pattern"])[1]) <= 500
            assert "maxLength" not in part and "minLength" not in part  # beside a pattern they make masks 70 times slower
        elif part["type"] == "array":
            assert part["maxItems"] <= 6
        else:
            assert part["additionalProperties"] is False and part["required"] == list(part["properties"])


def test_too_many_panels_are_not_in_the_grammar(tokenizer):
    state = matcher(comic_json_schema(1, 0, brief=True), tokenizer)
    good = '{"title": "", "dialogue": [], "panels": [{"index": 1, "shot": "wide", "action": "a", "micro_expression": "", "background": "b", "light": "", "props": []}'
    assert state.consume_tokens(list(good.encode()))
    assert state.validate_tokens(list(b", {")) == 0
    assert state.consume_tokens(list(b"]}")) and state.is_accepting()


@pytest.mark.parametrize("panels, rounds", [(0, 3), (65, 3), (3, -1), (3, 129), (True, 3), ("3", 3)])
def test_counts_out_of_range(panels, rounds):
    with pytest.raises(GrammarError, match="out of range"):
        comic_json_schema(panels, rounds)


def test_largest_schema_compiles(tokenizer):
    assert not matcher(comic_json_schema(64, 128), tokenizer).is_error()
