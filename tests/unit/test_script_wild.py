"""Answers as they are found in the wild: one page of two panels in every form a model gives it."""

import html
import json

import pytest
from script_checks import check_everything

from a3b_engine.script.parse import parse_script

PANELS = [{"index": 1, "shot": "wide", "action": "a door"}, {"index": 2, "shot": "close", "action": "a face"}]
PAGE = json.dumps({"panels": PANELS})
PRETTY = json.dumps({"panels": PANELS}, indent=2)
READ = [("wide", "a door"), ("close", "a face")]
OLD = PAGE.replace("a door", "old one").replace("a face", "old two")
SCHEMA = '{"type":"object","properties":{"panels":{"type":"array","items":{"type":"object","properties":{"shot":{"type":"string","enum":["close","wide"]}}}}}}'
SAMPLE = '{"panels":[{"index":1,"shot":"close|medium|wide","action":"..."}]}'
TWO = '{"panels":[%s,%s]}'
ROWS = [{"speaker": "Rin", "line": "x"}, {"speaker": "Mio", "line": "y"}]
FIRST, SECOND = (json.dumps(panel) for panel in PANELS)


def read(text, **options):
    result = parse_script(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False), **options)
    return result, [(panel.shot, panel.action) for panel in result.script.panels] if result.script else None


UNCHANGED = {
    "byte order mark": "\ufeff" + PAGE,
    "windows lines": f"```json\r\n{PRETTY}\r\n```\r\n".replace("\n", "\r\n").replace("\r\r", "\r"),
    "answer tags": f"<answer>{PAGE}</answer>",
    "output tags, fence, end token": f"<output>\n```json\n{PAGE}\n```\n</output><eos>",
    "end token": PAGE + "<|im_end|>",
    "next turn": PAGE + "<|endoftext|>\n<|im_start|>user\nthanks",
    "llama header": f"<|start_header_id|>assistant<|end_header_id|>\n\n{PAGE}<|eot_id|>",
    "gemma turn": f"<start_of_turn>model\n{PAGE}<end_of_turn>",
    "final channel": f'<|channel|>analysis<|message|>draft {{"panels":[]}}<|end|><|start|>assistant<|channel|>final<|message|>{PAGE}',
    "thinking, opened in the prompt": f'Thinking Process:\n1. **Analyze** {{"panels": []}}\n</think>\n\n{PAGE}',
    "thinking with a draft": f"<think>Let me write\n{OLD}\n</think>\n\n{PAGE}",
    "details": f"<details><summary>Reasoning</summary>stuff</details>\n{PAGE}",
    "javascript": f"const comic = {PAGE};\nexport default comic;",
    "label": f"JSON: {PAGE} Done.",
    "inline code": f"`{PAGE}`",
    "heading in brackets": f"[Comic script]\n{PAGE}\n[Note: {{rough}}]",
    "schema first": f"```json\n{SCHEMA}\n```\n```json\n{PAGE}\n```",
    "sample first": f"Format: {SAMPLE}\n\n{PAGE}",
    "colours of a terminal": f"\x1b[32m{PAGE}\x1b[0m",
    "plan first": '{"summary":"s","shots_planned":2}\n' + PAGE,
}

CHANGED = {
    "escaped marks": PAGE.replace('"', '\\"'),
    "escaped marks and lines": PRETTY.replace('"', '\\"').replace("\n", "\\n"),
    "escaped lines": PRETTY.replace("\n", "\\n"),
    "one escaped line": PAGE.replace(', "action"', ',\\n "action"'),
    "written as a string": json.dumps(PAGE),
    "three times a string": json.dumps(json.dumps(json.dumps(PAGE))),
    "list in a string": '{"panels": "' + str(PANELS) + '"}',
    "fence in a string": json.dumps({"response": f"```json\n{PAGE}\n```"}),
    "tool call": f'<tool_call>\n{{"name": "make_comic", "arguments": {PAGE}}}\n</tool_call>',
    "tool call with a string": f'<tool_call>\n{{"name": "make_comic", "arguments": {json.dumps(PAGE)}}}\n</tool_call>',
    "chat answer": json.dumps({"choices": [{"message": {"role": "assistant", "content": PAGE}}]}),
    "HTML": html.escape(PAGE),
    "HTML numbers": PAGE.replace('"', "&#34;"),
    "zero width": PAGE.replace('"panels"', '\u200b"panels"\u200b'),
    "zero width in a key": PAGE.replace('"shot"', '"\u200bshot"'),
    "no-break spaces": PRETTY.replace("  ", "\u00a0\u00a0"),
    "ideographic spaces": PRETTY.replace("  ", "\u3000"),
    "mixed quotes": PAGE.replace('"shot"', "\u201cshot\u201d").replace('"a door"', "\u2018a door\u2019"),
    "corner brackets": PAGE.replace('"panels"', "\u300cpanels\u300d").replace('"wide"', "\u300cwide\u300d"),
    "numerals": PAGE.replace('"index": 1', '"index": \u4e00').replace('"index": 2', '"index": \u4e8c'),
    "circled numerals": PAGE.replace('"index": 1', '"No.": "\u2460"').replace('"index": 2', '"No.": "\u2461"'),
    "JSON5": "// comic\n{\n panels: [\n  {index: 1, shot: 'wide', action: 'a door',},\n  {index: +2, shot: 'close', action: \"a face\"},\n ],\n}",
    "equals signs": PAGE.replace(": ", "="),
    "Python": f"comic = {json.loads(PAGE)}\nprint(comic)",
    "Python tuple": str({"panels": tuple(PANELS)}),
    "Lua": "{panels = {{shot = 'wide', action = 'a door'}, {shot = 'close', action = 'a face'}}}",
    "bare words": "{panels: [{shot: wide, action: a door}, {shot: close, action: a face}]}",
    "quoted lines": "\n".join("> " + line for line in PRETTY.splitlines()),
    "numbered lines": "\n".join(f"{number}  {line}" for number, line in enumerate(PRETTY.splitlines(), 1)),
    "Markdown escapes": "\\[" + FIRST + "," + SECOND + "\\]",
    "LaTeX box": "\\boxed{" + PAGE + "}",
    "not a number": '{"panels":[{"shot":"wide","action":"a door","light":NaN},{"shot":"close","action":"a face"}]}',
    "key twice": TWO % ('{"shot":"close","shot":"wide","action":"a door"}', SECOND),
    "ellipsis": TWO % (FIRST, "..., " + SECOND),
    "ellipsis in quotes": TWO % (FIRST, '"...", ' + SECOND),
    "ellipsis object": TWO % (FIRST, SECOND + ', {"...": "..."}'),
    "placeholder panel": TWO % (FIRST, SECOND + ', {"index":3,"shot":"<shot>","action":"<text>"}'),
    "lines of JSON": f"{FIRST}\n{SECOND}",
    "a fence a panel": f"Panel 1\n```json\n{FIRST}\n```\nPanel 2\n```json\n{SECOND}\n```",
    "second half apart": json.dumps({"panels": PANELS[:1]}) + "\n" + json.dumps({"panels": PANELS[1:]}),
    "list alone": f'"panels": {json.dumps(PANELS)}',
    "no outer bracket": PAGE[1:],
    "doubled brackets": PAGE.replace("{", "{{").replace("}", "}}"),
    "doubled marks": PAGE.replace('"action"', '""action"').replace('"wide"', '"wide""'),
    "by number": {"1": {"shot": "wide", "action": "a door"}, "2": {"shot": "close", "action": "a face"}},
    "by name": {"title": "x", "panel_1": PANELS[0], "panel_2": PANELS[1]},
    "pages": {"pages": {"1": {"panels": PANELS[:1]}, "2": {"panels": PANELS[1:]}}},
    "Chinese list": {"\u5206\u683c": [{"\u666f\u522b": "\u8fdc\u666f", "\u753b\u9762": "a door"}, {"\u666f\u522b": "\u7279\u5199", "\u753b\u9762": "a face"}]},
    "Chinese numbers": {"\u5206\u955c\u4e00": {"\u666f\u522b": "\u8fdc\u666f", "\u52a8\u4f5c": "a door"}, "\u5206\u955c\u4e8c": {"\u666f\u522b": "\u7279\u5199", "\u52a8\u4f5c": "a face"}},
    "fields in an object": [{"panel": n, "visual": {"shot": p["shot"], "action": p["action"]}} for n, p in enumerate(PANELS, 1)],
    "fields in two objects": {"panels": [{"camera": {"shot_type": p["shot"], "angle": "low"}, "details": {"action": p["action"], "light": "dim"}} for p in PANELS]},
    "action of the character": {"panels": [{"shot": p["shot"], "characters": [{"name": "Rin", "action": p["action"]}]} for p in PANELS]},
    "empty list beside": {"panels": [], "storyboard": PANELS},
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_stands_around_valid_json_changes_nothing(name):
    result, panels = read(UNCHANGED[name])
    assert panels == READ and result.status == "ok"


@pytest.mark.parametrize("name", CHANGED)
def test_every_form_is_read_whole_and_reported(name):
    text = CHANGED[name] if isinstance(CHANGED[name], str) else json.dumps(CHANGED[name], ensure_ascii=False)
    result, panels = read(text)
    assert panels == READ and result.status == "repaired"
    check_everything(result, text)


@pytest.mark.parametrize(
    "text",
    [
        f"{OLD}\n\nWait, I made a mistake. Corrected version:\n\n{PAGE}",
        f'{PAGE.replace("[{", "[" + FIRST + ",{")}\nActually, you asked for two panels:\n{PAGE}',
        f"{OLD}\n\u4fee\u6b63\u540e\uff1a\n{PAGE}",
        '{"panels":[{"index":1,"shot":"wide","action":"old","light":"\n\nLet me restart:\n' + PAGE,
        '{"panels":[{"index":1,"shot":"wide","action":"old"},{"index":2,"shot\n```\n```json\n' + PAGE + "\n```",
    ],
)
def test_a_correction_wins_and_what_it_replaces_is_reported(text):
    result, panels = read(text)
    assert panels == READ and result.status == "repaired"
    assert any("not used" in line or "not whole" in line or "cannot be read as a whole" in line for line in result.report)


def test_without_a_correction_the_longest_or_the_expected_wins():
    text = f"{PAGE}\nPanel 1 alone:\n" + json.dumps({"panels": [{"index": 1, "shot": "pov", "action": "x"}]})
    assert read(text)[1] == READ and read(text, expected_panels=1)[1] == [("pov", "x")]


@pytest.mark.parametrize(
    "text, word",
    [
        ('{"type":"json_schema","json_schema":{"name":"comic","schema":%s}}' % SCHEMA, "schema"),
        ('{"type":"function","function":{"name":"comic","parameters":%s}}' % SCHEMA, "schema"),
        (SCHEMA[:-20], "schema"),
        ('{"panels":[{"shot":{"type":"string"},"action":{"type":"string"}}]}', "schema"),
        ('{"panels":[{"shot":"close/medium/wide","action":"character action","light":"lighting"}]}', "placeholders"),
        ('{"panels":[{"shot":"close, medium or wide","action":"what the character does"}]}', "placeholders"),
        ('{"\u5206\u955c":[{"\u666f\u522b":"\u7279\u5199/\u4e2d\u666f/\u8fdc\u666f","\u52a8\u4f5c":"\u4eba\u7269\u52a8\u4f5c"}]}', "placeholders"),
        ('{"panels":["..."]}', "placeholders"),
        ("panels:\n  - shot: close|medium|wide\n    action: string\n", "placeholders"),
    ],
)
def test_descriptions_of_the_format_are_no_data(text, word):
    result, panels = read(text)
    assert panels is None and result.status == "failed" and word in result.cause


def test_field_words_are_data_when_the_shot_is_one():
    assert read('{"panels":[{"shot":"close","action":"character action"}]}')[1] == [("close", "character action")]


def test_rows_of_panels_that_are_cut_off_keep_their_number():
    page = {"dialogue": [{"panel": n, "speaker": "Rin", "line": str(n)} for n in (1, 2, 3)], "panels": [*PANELS, {"index": 3, "shot": "pov"}]}
    text = json.dumps(page)
    result, panels = read(text[: text.index('{"index": 2')])
    assert panels == READ[:1] and result.status == "truncated"
    assert [(row.panel, row.line) for row in result.script.dialogue] == [(1, "1"), (2, "2"), (3, "3")]


@pytest.mark.parametrize("said", ["\u65e0", "None", "N/A", "\u306a\u3057"])
def test_words_for_no_dialogue_are_no_balloon(said):
    result, _ = read({"panels": [{**PANELS[0], "dialogue": said}, {**PANELS[1], "dialogue": "Rin: hi"}]})
    assert [(row.panel, row.line) for row in result.script.dialogue] == [(2, "hi")]
    assert any("says that there is none" in line for line in result.report)


@pytest.mark.parametrize("said", ["\u51db\u300c\u5f85\u3063\u3066\u300d", '\u51db\uff1a"\u5f85\u3063\u3066"', "\u51db\uff1a\u5f85\u3063\u3066"])
def test_speakers_in_sentences(said):
    (row,) = read({"panels": [{**PANELS[0], "dialogue": said}]})[0].script.dialogue
    assert (row.speaker, row.line) == ("\u51db", "\u5f85\u3063\u3066")


def test_what_characters_say_and_show_in_a_panel_is_kept():
    people = [{"name": "Rin", "action": "runs", "expression": "afraid", "line": "Go!"}, {"name": "Mio", "action": "hides"}]
    script = read({"panels": [{"shot": "wide", "characters": people}]})[0].script
    assert (script.panels[0].action, script.panels[0].micro_expression, script.panels[0].characters) == ("runs, hides", "afraid", ["Rin", "Mio"])
    assert [(row.speaker, row.line) for row in script.dialogue] == [("Rin", "Go!")]


def test_a_panel_of_its_own_is_never_overwritten_by_an_inner_object():
    panel = {"shot": "wide", "action": "runs", "visual": {"shot": "close", "action": "sits"}}
    assert read({"panels": [panel]})[1] == [("wide", "runs")]


def test_setting_with_its_own_parts():
    panel = read({"panels": [{**PANELS[0], "setting": {"description": "dock", "time": "night", "lighting": "moon"}}]})[0].script.panels[0]
    assert (panel.background, panel.light, panel.action) == ("dock, night", "moon", "a door")
