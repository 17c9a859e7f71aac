"""Any valid script survives printing and every kind of damage, or the loss is reported; nothing is ever invented."""

import html
import json
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from script_checks import check_everything

from a3b_engine.script.parse import parse_script
from a3b_engine.script.schema import SHOTS, ComicScript

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
TRICKY = ['"', "'", "\\", "\n", ",", ":", "{", "}", "[", "]", "\u201c", "\u201d", "\uff0c", "`", "//", "#", "<think>", "None", "\U0001f62d"]
texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.lists(st.one_of(st.sampled_from(TRICKY), st.text("ab \u62ac\u5934", max_size=3)), max_size=6).map("".join),
)
plain = st.text("abc xyz\u62ac\u5934.!?", min_size=1, max_size=16)


@st.composite
def scripts(draw, words=texts):
    count = draw(st.integers(1, 3))
    panels = [
        {
            "index": n,
            "shot": draw(st.sampled_from(SHOTS)),
            "characters": draw(st.lists(words.filter(str.strip), max_size=2)),
            "action": "act " + draw(words),
            "background": draw(words),
            "props": draw(st.lists(words.filter(str.strip), max_size=2)),
            "visual_prompt": draw(words),
        }
        for n in range(1, count + 1)
    ]
    rows = [
        {"panel": draw(st.integers(1, count)), "speaker": draw(words), "line": "say " + draw(words), "emotion_tag": draw(words)}
        for _ in range(draw(st.integers(0, 3)))
    ]
    return {"title": draw(words), "dialogue": rows, "panels": panels}


def wanted(script):
    return ComicScript.model_validate(script)


@QUICK
@given(scripts(), st.sampled_from([None, 1, 4]), st.booleans())
def test_valid_json_is_never_edited(script, indent, escaped):
    result = parse_script(json.dumps(script, indent=indent, ensure_ascii=escaped))
    assert result.status == "ok", result.report
    assert result.script == wanted(script)


WRAPPERS = [
    "```json\n%s\n```",
    "```\n%s\n```\nHope this helps!",
    "<think>plan {\"panels\": []}</think>\n%s",
    "thinking aloud\n</think>\n\n%s",
    "Here is {the} script:\n%s",
    "\ufeff  %s \n",
    "%s\nNote: under {100} words.",
]


@QUICK
@given(scripts(), st.sampled_from(WRAPPERS))
def test_wrapped_json_is_never_edited(script, wrapper):
    result = parse_script(wrapper.replace("%s", json.dumps(script, ensure_ascii=False)))
    assert result.status == "ok", result.report
    assert result.script == wanted(script)


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def with_trailing_commas(text):
    return re.sub(r"(?<=[\"\]}])(?=\s*[\]}])", ",", text)


def with_comments(text):
    return text.replace(", ", ", // remark\n", 2).replace("{", "{ /* here */", 1)


def with_python_quotes(text):
    return text.replace('"', "'")


def with_curly_quotes(text):
    opening = True
    out = []
    for char in text:
        out.append(char if char != '"' else "\u201c" if opening else "\u201d")
        opening = opening != (char == '"')
    return "".join(out)


def with_full_width(text):
    return with_curly_quotes(text).replace('": ', "\uff1a").replace("\u201d: ", "\u201d\uff1a").replace("\u201d, ", "\u201d\uff0c")


def with_bare_keys(text):
    return re.sub(r'"(\w+)":', r"\1:", text)


def with_single_marks_in_keys(text):
    return re.sub(r'"(\w+)":', r"'\1':", text)


def with_equals_signs(text):
    return text.replace('": ', '"=')


def with_semicolons(text):
    return re.sub(r'(?<=["\]}\d]), (?=")', "; ", text)


def with_surplus_commas(text):
    return re.sub(r'(?<=["\]}\d]),(?=\s*["{])', ",,", text)


def with_marks_doubled_before_keys(text):
    return re.sub(r'"(?=(?:shot|action|speaker|line)":)', '""', text)


def with_zero_width(text):
    return text.replace('"panels":', '\u200b"panels"\u200b:')


def with_windows_lines(text):
    return text.replace("\n", "\r\n") + "\r\n"


def with_other_names(text):
    return text.replace('"panels":', '"storyboard":').replace('"shot":', '"Shot Type":').replace('"action":', '"Action":')


def in_html(text):
    return html.escape(text)


def in_a_string(text):
    return json.dumps(text)


def with_escaped_lines(text):
    return text.replace("\n", "\\n").replace('"', '\\"')


def in_a_tool_call(text):
    return '<tool_call>{"name": "comic", "arguments": %s}</tool_call>' % text


def without_first_brace(text):
    return text.replace("{", "", 1)


def without_dialogue_bracket(text):
    return re.sub(r'("dialogue": )\[(?=\s*\{)', r"\1", text)


def without_panels_bracket(text):
    return re.sub(r'("panels": )\[(?=\s*\{)', r"\1", text)


def without_first_list_end(text):
    return text.replace('],', ',', 1)


def with_brackets_doubled(text):
    return text.replace("{", "{{").replace("}", "}}")


def without_end(text):
    return text[:-2]


def without_line_end_commas(text):
    return re.sub(r'",\n', '"\n', text)


DAMAGES = [
    with_trailing_commas, with_comments, with_python_quotes, with_curly_quotes, with_full_width, with_bare_keys,
    with_single_marks_in_keys, with_equals_signs, with_semicolons, with_surplus_commas, with_marks_doubled_before_keys,
    with_zero_width, with_windows_lines, with_other_names, in_html, in_a_string, with_escaped_lines, in_a_tool_call,
    without_first_brace, without_dialogue_bracket, without_panels_bracket, without_first_list_end, with_brackets_doubled,
    without_end, without_line_end_commas,
]
STILL_JSON = (with_windows_lines,)  # nothing is to mend


FEW = settings(QUICK, max_examples=20)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@FEW
@given(scripts(plain), st.sampled_from([None, 2]))
def test_damage_around_plain_values_changes_none(damage, script, indent):
    text = json.dumps(script, indent=indent, ensure_ascii=False)
    damaged = damage(text)
    result = parse_script(damaged)
    assert result.script == wanted(script), result.report
    same = damaged == text or damage in STILL_JSON
    assert result.status == ("ok" if same else "truncated" if damage is without_end else "repaired")
    check_everything(result, damaged)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@FEW
@given(scripts(), st.sampled_from([None, 2]))
def test_damage_around_tricky_values_is_read_or_reported(damage, script, indent):
    text = json.dumps(script, indent=indent, ensure_ascii=False)
    # Marks escaped once more than backslashes: whether the b behind three backslashes is a letter, the text no longer says.
    assume(damage is not with_escaped_lines or "\\\\\\" not in text)
    text = damage(text)
    result = parse_script(text)
    assert result.script == wanted(script) or result.status != "ok" or is_json(text)  # a `],` inside a text is not missed
    check_everything(result, text)


@FEW
@given(scripts(plain), st.sampled_from(DAMAGES), st.sampled_from(DAMAGES))
def test_two_kinds_of_damage_are_read_or_reported(script, first, second):
    text = second(first(json.dumps(script, indent=2, ensure_ascii=False)))
    result = parse_script(text)
    assert result.script == wanted(script) or result.status != "ok"
    check_everything(result, text)


def as_outline(value, indent=""):
    """The block form of YAML with every text in JSON's marks."""
    if isinstance(value, dict) and value:
        return "".join(f"{indent}{key}:{_below(inner, indent)}" for key, inner in value.items())
    return "".join(f"{indent}-{_below(inner, indent)}" for inner in value)


def _below(value, indent):
    if isinstance(value, (dict, list)) and value:
        return "\n" + as_outline(value, indent + "  ")
    return f" {json.dumps(value, ensure_ascii=False)}\n"


@QUICK
@given(scripts())
def test_an_outline_is_read_unchanged(script):
    text = as_outline(script)
    result = parse_script(f"Here it is:\n\n```yaml\n{text}```\nEnjoy!")
    assert result.script == wanted(script) and result.status == "repaired"
    check_everything(result, text)


@QUICK
@given(scripts(plain))
def test_tables_are_read_unchanged(script):
    heads = ["index", "shot", "action", "background", "visual_prompt"]
    rows = [heads, ["---"] * len(heads), *([str(panel[head]) for head in heads] for panel in script["panels"])]
    result = parse_script("\n".join("| " + " | ".join(row) + " |" for row in rows))
    panels = [{head: panel[head].strip() if isinstance(panel[head], str) else panel[head] for head in heads} for panel in script["panels"]]
    assert result.script.panels == wanted({"panels": panels}).panels and result.status == "repaired"


@QUICK
@given(scripts(), st.floats(0, 1))
def test_a_cut_text_keeps_what_is_whole(script, share):
    text = json.dumps(script, ensure_ascii=False)
    result = parse_script(text[: int(len(text) * share)])
    assert result.status in ("truncated", "failed") or share == 1
    check_everything(result, text)
    whole = [p for p in result.script.panels if p.index not in result.partial] if result.script else []
    assert whole == wanted(script).panels[: len(whole)]


@QUICK
@given(scripts(), st.floats(0, 1), st.sampled_from(["\n", "\r\n", " \n\n"]), st.sampled_from([None, 1]))
def test_a_line_end_behind_a_text_changes_nothing(script, share, end, indent):
    """Whoever prints or saves a cut answer ends its last line, in the middle of a key or of a text."""
    text = json.dumps(script, ensure_ascii=False, indent=indent)
    text = text[: int(len(text) * share)]
    assert parse_script(text + end) == parse_script(text)


@QUICK
@given(st.text(max_size=200))
def test_no_text_raises(text):
    result = parse_script(text)
    check_everything(result, text)
