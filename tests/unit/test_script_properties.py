"""Any valid script survives printing and every kind of damage, or the loss is reported; nothing is ever invented."""

import json
import random
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import parse_script
from a3b_engine.script.schema import SHOTS, ComicScript
from a3b_engine.script.strings import decode

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
TRICKY = ['"', "'", "\\", "\n", ",", ":", "{", "}", "[", "]", "\u201c", "\u201d", "\uff0c", "`", "//", "#", "<think>", "None", "\U0001f62d"]
texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.lists(st.one_of(st.sampled_from(TRICKY), st.text("ab \u62ac\u5934", max_size=3)), max_size=6).map("".join),
)
plain = st.text("abc xyz\u62ac\u5934.!?", min_size=1, max_size=16)
SPACES = re.compile(r"\s+")


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


def check_sources(result, text):
    """Every string of the result stands in the text, but for the documented defaults."""
    if result.script is None:
        return
    haystack = SPACES.sub(" ", text + "\n" + decode(text) + "\n" + decode(decode(text)))
    waiting = [result.script.model_dump()]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            item = {key: value for key, value in item.items() if key not in ("shot", "reading_direction")}
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str):
            # pieces of a list are joined by commas, lines of prose around a labelled line by a line break
            whole = SPACES.sub(" ", item).strip()
            pieces = re.split(r"[,\n]", item)
            assert whole in haystack or all(SPACES.sub(" ", piece).strip() in haystack for piece in pieces), item


def check_lists(result):
    lists = panel_lists(result, on_error="placeholder")
    names = ("prompt", "negative", "caption", "dialogue", "seed", "width", "height", "index")
    assert {len(getattr(lists, name)) for name in names} == {lists.count} and lists.count >= 1
    assert all(0 <= seed < 2**64 for seed in lists.seed)


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


def without_end(text):
    return text[:-2]


def without_line_end_commas(text):
    return re.sub(r'",\n', '"\n', text)


DAMAGES = [
    with_trailing_commas, with_comments, with_python_quotes, with_curly_quotes, with_full_width, with_bare_keys,
    without_end, without_line_end_commas,
]


@QUICK
@given(scripts(plain), st.sampled_from(DAMAGES), st.sampled_from([None, 2]))
def test_damage_around_plain_values_changes_none(script, damage, indent):
    text = json.dumps(script, indent=indent, ensure_ascii=False)
    damaged = damage(text)
    result = parse_script(damaged)
    assert result.script == wanted(script), result.report
    assert result.status == ("ok" if damaged == text else "truncated" if damage is without_end else "repaired")


@QUICK
@given(scripts(), st.sampled_from(DAMAGES), st.sampled_from([None, 2]))
def test_damage_around_tricky_values_is_read_or_reported(script, damage, indent):
    text = damage(json.dumps(script, indent=indent, ensure_ascii=False))
    result = parse_script(text)
    assert result.script == wanted(script) or result.status != "ok"
    check_sources(result, text)
    check_lists(result)


@QUICK
@given(scripts(), st.floats(0, 1))
def test_a_cut_text_keeps_what_is_whole(script, share):
    text = json.dumps(script, ensure_ascii=False)
    result = parse_script(text[: int(len(text) * share)])
    assert result.status in ("truncated", "failed") or share == 1
    check_sources(result, text)
    check_lists(result)
    whole = [p for p in result.script.panels if p.index not in result.partial] if result.script else []
    assert whole == wanted(script).panels[: len(whole)]


def test_fuzz_of_mutated_answers():
    """No crash, no invented text, no unequal lists (the long run of this is `fuzz` with more rounds)."""
    rng = random.Random(20261129)
    seeds = [
        '{"title":"T","characters":[{"id":"rin","name":"Rin","look":"red hair"}],"dialogue":[{"panel":1,"speaker":"rin","line":"Hi, you","emotion_tag":"glad"}],"panels":[{"index":1,"shot":"close","action":"smiles","props":["cup"]},{"index":2,"shot":"wide","action":"runs"}]}',
        "```json\n{'shots': [{'shot': 'close-up', 'action': 'it\\'s late', 'light': None}]}\n```",
        "{\u201c\u5206\u955c\u201d\uff1a[{\u201c\u666f\u522b\u201d\uff1a\u201c\u7279\u5199\u201d\uff0c\u201c\u52a8\u4f5c\u201d\uff1a\u201c\u62ac\u5934\u201d}]}",
        '<think>a {"panels":[]} b</think>[{"shot":"wide"},{"shot":"pov","dialogue":"Rin: no"}]',
        "Panel 1: rain.\nShot: close\nPanel 2: door.",
    ]
    pieces = list('{}[]",:\\\'\n ') + ["\u201c", "\u201d", "\uff0c", "//", "/*", "```", "<think>", "</think>", "None", "\\u", "\\ud800", "...", "1e999", "\ud800", "\x00", "Panel 3: "]
    for _ in range(3000):
        text = rng.choice(seeds)
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(text) + 1)
            action = rng.random()
            if action < 0.4:
                text = text[:at] + rng.choice(pieces) + text[at:]
            elif action < 0.7:
                text = text[:at] + text[at + rng.randint(1, 4) :]
            elif action < 0.85:
                other = rng.randrange(len(text) + 1)
                text = text[: min(at, other)] + text[max(at, other) :] if rng.random() < 0.5 else text + text[at:other]
            else:
                text = text[:at]
        result = parse_script(text)
        assert result.status in ("ok", "repaired", "truncated", "failed")
        assert (result.script is None) == (result.status == "failed")
        check_sources(result, text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
        check_lists(result)
        "\n".join([result.cause, *result.report]).encode("utf-8")


@QUICK
@given(st.text(max_size=200))
def test_no_text_raises(text):
    result = parse_script(text)
    check_sources(result, text)
    check_lists(result)
