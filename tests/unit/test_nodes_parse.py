"""JSON Parse Panels with its widgets, on whole, cut and refused answers."""

import json

import pytest
from node_runs import NODES, errors, parse

SCRIPT = {
    "title": "T",
    "dialogue": [{"panel": 2, "speaker": "Mina", "line": "Hello", "emotion_tag": "calm"}],
    "panels": [
        {"index": 1, "shot": "wide", "action": "lands", "visual_prompt": "a seaplane lands on a flooded street", "caption": "Morning."},
        {"index": 2, "shot": "close", "action": "waves", "visual_prompt": "a pilot waves"},
        {"index": 3, "shot": "medium", "action": "reads", "visual_prompt": "an old man reads a letter"},
    ],
}


def named(out):
    return dict(zip(NODES["A3BParsePanels"].RETURN_NAMES, out["result"]))


def test_lists_have_one_length_and_blanks_where_something_is_missing():
    """U09, U10, U12"""
    out = named(parse(text=json.dumps(SCRIPT), panel_count=3, style_suffix="ink"))
    lists = [out[name] for name in ("prompt", "negative", "caption", "dialogue", "seed", "width", "height", "index")]
    assert [len(items) for items in lists] == [3] * 8
    assert all(type(items) is list for items in lists)
    assert out["count"] == 3 and out["index"] == [1, 2, 3] and out["caption"] == ["Morning.", "", ""]
    assert "Hello" in out["dialogue"][1] and out["dialogue"][0] == ""
    assert all("ink" in prompt for prompt in out["prompt"]) and "seaplane" in out["prompt"][0]
    assert json.loads(out["script"])["title"] == "T"
    assert "seaplane" in out["joined"] and isinstance(out["report"], str)


def test_values_have_the_types_their_sockets_promise():
    node = NODES["A3BParsePanels"]
    expected = {"STRING": str, "INT": int}
    for kind, is_list, value in zip(node.RETURN_TYPES, node.OUTPUT_IS_LIST, parse(text=json.dumps(SCRIPT))["result"]):
        assert all(type(item) is expected[kind] for item in (value if is_list else [value]))


def test_a_refusal_stops_or_becomes_a_neutral_panel_never_a_prompt():
    refusal = "I am sorry, but I cannot help with that."
    with pytest.raises(errors.ScriptError, match="^text: "):
        parse(text=refusal)
    out = named(parse(text=refusal, on_error="placeholder"))
    assert not any("sorry" in prompt for prompt in out["prompt"]) and len(out["prompt"]) >= 1


def test_a_cut_answer_is_refused_kept_or_filled_up():
    whole = json.dumps(SCRIPT)
    cut = whole[: whole.index("an old man")]
    stats = json.dumps({"finish_reason": "length", "status": "token limit reached: raise it"})
    with pytest.raises(errors.ScriptError, match="^text: token limit reached: raise it"):
        parse(text=cut, stats=stats)
    kept = named(parse(text=cut, stats=stats, on_error="keep"))
    assert kept["index"] == [1, 2] and kept["report"].startswith("warning: answer: token limit reached")
    filled = named(parse(text=cut, stats=stats, on_error="placeholder", panel_count=5))
    assert filled["count"] == 5


def test_a_reason_is_only_added_when_the_answer_did_not_end_well():
    with pytest.raises(errors.ScriptError) as caught:
        parse(text="a walk in the rain", stats=json.dumps({"finish_reason": "stop", "status": "complete: 5 tokens."}))
    assert "complete" not in str(caught.value)
    for odd in ("not json", "[]", "null", "[" * 100_000, '{"finish_reason": "length", "status": 3}', '{"finish_reason": "length"}'):
        with pytest.raises(errors.ScriptError, match="no JSON"):
            parse(text="a walk in the rain", stats=odd)


def test_shown_text_is_for_people():
    assert "seaplane" in parse(text=json.dumps(SCRIPT))["ui"]["text"][0]
