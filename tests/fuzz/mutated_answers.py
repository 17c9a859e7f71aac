"""Answers as models give them, and ways in which they come out broken. `case(number)` is the same text on any machine."""

import html
import json
import random

SEED = 20261129
CUT_LONGER = 6000  # characters of a case, so that the run tests many cases and not long ones

_PAGE = {
    "title": "Rain",
    "style": "ink",
    "reading_direction": "rtl",
    "characters": [{"id": "rin", "name": "Rin", "look": "red hair, blue coat"}, {"id": "mio", "name": "Mio", "look": "grey coat"}],
    "dialogue": [
        {"panel": 1, "speaker": "rin", "line": "Hi, you", "emotion_tag": "glad"},
        {"panel": 2, "speaker": "mio", "line": 'He said "go", then {left}.', "emotion_tag": "cold"},
    ],
    "panels": [
        {"index": 1, "shot": "close", "characters": ["rin"], "action": "smiles: it's late", "props": ["cup", "rope"], "light": "lamp"},
        {"index": 2, "shot": "wide", "characters": ["rin", "mio"], "action": "runs // away", "props": [], "visual_prompt": "two girls, rain"},
        {"index": 3, "shot": "pov", "characters": [], "action": "the sea\nat dusk", "caption": "Later...", "negative": "text"},
    ],
}
_INNER = {"shots": [{"shot_number": n, "shot_type": kind, "description": f"act {n}", "dialogue": [{"character": "Rin", "text": f"line {n}"}]} for n, kind in ((1, "CU"), (2, "long shot"))]}
_CHINESE = {
    "\u6807\u9898": "\u96e8\u591c",
    "\u5206\u955c": [
        {"\u5e8f\u53f7": "\u4e00", "\u666f\u522b": "\u7279\u5199", "\u52a8\u4f5c": "\u62ac\u5934\uff0c\u5fae\u7b11", "\u53f0\u8bcd": "\u5c0f\u6797\uff1a\u4f60\u597d"},
        {"\u5e8f\u53f7": "\u4e8c", "\u666f\u522b": "\u8fdc\u666f", "\u52a8\u4f5c": "\u8d70\u5f00", "\u53f0\u8bcd": "\u65e0"},
    ],
}
_PLAIN = json.dumps(_PAGE, ensure_ascii=False)
_PRETTY = json.dumps(_PAGE, ensure_ascii=False, indent=2)
_SHORT = '{"panels":[{"index":1,"shot":"wide","action":"a door"},{"index":2,"shot":"close","action":"a face"}]}'
_YAML = """title: Rain
characters:
  - id: rin
    look: red hair
dialogue:
  - {panel: 1, speaker: rin, line: "Hi, you"}
panels:
  - index: 1
    shot: close
    characters: [rin]
    action: looks up
      at the sky
  - index: 2
    shot: wide
    action: |
      runs
      away
    props:
      - cup
"""
_TABLE = """Here is the page:

| Panel | Shot | Action | Dialogue |
|:-----:|------|--------|----------|
| 1 | Close-up | Rin smiles | Rin: hi<br>Mio: yo |
| 2 | Wide | **Mio runs** | - |

Enjoy!"""
_PROSE = "### Panel 1\n**Shot:** close\n**Action:** Rin smiles\nRin: \"Hi\"\n\n### Panel 2\n- Shot: wide\n- Action: Mio runs"
_SCHEMA = '{"type":"object","properties":{"panels":{"type":"array","items":{"type":"object","properties":{"shot":{"type":"string"}}}}}}'
_SAMPLE = '{"panels":[{"index":1,"shot":"close|medium|wide","action":"..."}]}'


def _curly(text: str) -> str:
    parts = text.split('"')
    return "".join(part + ("\u201c" if n % 2 == 0 else "\u201d") for n, part in enumerate(parts[:-1])) + parts[-1]


ANSWERS = [
    _PLAIN,
    _PRETTY,
    json.dumps(_PAGE),
    _SHORT,
    f"```json\n{_PRETTY}\n```",
    f"Sure! Here is {{the}} script:\n```\n{_SHORT}\n```\nHope this helps!",
    f"<think>maybe {_SAMPLE} first\n</think>\n\n{_SHORT}",
    f"I think.\n</think>\n{_PLAIN}",
    f"{_SCHEMA}\n{_SHORT}",
    f"Format: {_SAMPLE}\n\nAnswer: {_SHORT}",
    f'{_SHORT}\nWait, I made a mistake:\n{_SHORT.replace("a door", "a gate")}',
    json.dumps(_CHINESE, ensure_ascii=False),
    _curly(json.dumps(_CHINESE, ensure_ascii=False)).replace(": ", "\uff1a").replace(", ", "\uff0c"),
    str(_PAGE),
    _SHORT.replace('"', "'"),
    "{panels: [{shot: wide, action: a door}, // first\n {shot: 'close', action: \"a face\",},],}",
    json.dumps({"panels": json.dumps(_PAGE["panels"])}),
    json.dumps(_PLAIN),
    html.escape(_SHORT),
    json.dumps(_INNER),
    json.dumps({f"panel_{panel['index']}": panel for panel in _PAGE["panels"]}, ensure_ascii=False),
    json.dumps(_PAGE["panels"], ensure_ascii=False),
    "\n".join(json.dumps(panel) for panel in _PAGE["panels"]),
    '{"panels":[{"visual":{"shot":"wide","action":"a door"},"characters":[{"name":"Rin","expression":"calm"}]}]}',
    f'<tool_call>\n{{"name": "comic", "arguments": {_SHORT}}}\n</tool_call>',
    f"<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>final<|message|>{_SHORT}",
    _YAML,
    f"```yaml\n{_YAML}```",
    _TABLE,
    _PROSE,
    '**Panel 1 (Wide shot):**\nAction: the city burns\nMood: tense\nDialogue:\n- **Rin:** "Run."\n- Mio: no\n\n**Panel 2 [Close-up]**\nAction: a face\nsmoke rises',
    'Character:\n{"name":"Rin","look":"red hair"}\nScript:\n{"meta":{"style":"ink"},"scenes":[{"panels":[{"shot":"wide","action":"Rin runs","dialogue":[["Rin","go"],["Mio","no"]],"light":"N/A"},{}]}]}',
    "1. Shot: wide. Action: a door\n2. Shot: close. Action: a face",
    "\u3010\u5206\u955c1\u3011\n\u666f\u522b\uff1a\u8fdc\u666f\n\u52a8\u4f5c\uff1a\u96e8\n\u3010\u5206\u955c2\u3011\n\u666f\u522b\uff1a\u7279\u5199",
    "I'm sorry, but I can't help with that request.",
]
PIECES = [
    *'{}[]",:\\\'\n \t`|-#',
    '"}', '"]', '",', '": "', "},{", "]}", '{"', '[{"', "\\n", '\\"', "\\u", "\\ud800", "\ud800", "\x00", "\u200b", "\ufeff", "\u00a0",
    "\u201c", "\u201d", "\u2018", "\uff0c", "\uff1a", "\uff5b", "\u300c", "\u300d", "//", "/*", "*/", "<!--", "```", "```json\n", "~~~",
    "<think>", "</think>", "None", "True", "NaN", "null", "...", "\u060c", "('a', 'b')", "[a, \"b\"]", "\u2026", "1e999", "-", "+ ", "&quot;", "<br>", "Panel 3: ", "\n- ", "\n  ",
    '"panels"', '"shot"', '"dialogue":[', '"line":', "panels:\n", "| a |", "|---|\n", "shot = ",
]


def _insert(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(PIECES) + text[at:]


def _delete(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.choice((1, 1, 1, 2, 3, 8, 40)) :]


def _double(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    size = rng.choice((1, 1, 1, 2, 5, 30, 200))
    return text[: at + size] + text[at : at + size] + text[at + size :]


def _structure(rng: random.Random, text: str) -> str:
    """One mark of the structure, and no letter, goes missing or comes twice."""
    places = [n for n, char in enumerate(text) if char in '{}[]",:']
    if not places:
        return text
    at = rng.choice(places)
    return text[:at] + (text[at] * 2 if rng.random() < 0.4 else "") + text[at + 1 :]


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _behead(rng: random.Random, text: str) -> str:
    return text[rng.randrange(min(len(text), 60) + 1) :]


def _lines(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    action = rng.randrange(4)
    if action == 0:
        del lines[at]
    elif action == 1:
        lines.insert(at, lines[at])
    elif action == 2:
        lines[at] = rng.choice(("  ", "\t", "> ", "1  ")) + lines[at]
    else:
        lines[at] += rng.choice((" // remark", " # remark", ",", ";", " \\", "\r"))
    return "\n".join(lines)


def _splice(rng: random.Random, text: str) -> str:
    other = rng.choice(ANSWERS)
    return text[: rng.randrange(len(text) + 1)] + other[rng.randrange(len(other) + 1) :]


def _append(rng: random.Random, text: str) -> str:
    return text + rng.choice(("\n", "\n\n", " ", "\nCorrected:\n")) + rng.choice(ANSWERS)


def _restyle(rng: random.Random, text: str) -> str:
    return rng.choice(
        (
            _curly,
            lambda t: t.replace('"', "'"),
            lambda t: t.replace('"', ""),
            lambda t: t.replace(",", "\uff0c"),
            lambda t: t.replace(": ", "\uff1a"),
            lambda t: t.replace("\n", "\r\n"),
            lambda t: t.replace("\n", "\\n"),
            lambda t: t.replace('"', '\\"'),
            lambda t: t.replace(" ", "\u00a0"),
            lambda t: t.replace("null", "None").replace("[]", "None"),
            lambda t: t.replace("\\", ""),
            lambda t: t.upper(),
            html.escape,
            json.dumps,
            repr,
        )
    )(text)


def _wrap(rng: random.Random, text: str) -> str:
    return rng.choice(("```json\n%s\n```", "```\n%s", "<think>%s", "<think>x</think>%s", "%s</think>", "Here:\n%s\nNote: {x}", "\ufeff%s", "<answer>%s</answer>", '{"content": %s}', "[%s]", "**%s**")).replace("%s", text)


DAMAGES = [_insert, _insert, _delete, _double, _structure, _structure, _structure, _cut, _behead, _lines, _splice, _append, _restyle, _wrap]


def case(number: int) -> str:
    """The text of one case: an answer with one to five kinds of damage; each of the first cases is an answer as it is."""
    if number < len(ANSWERS):
        return ANSWERS[number]
    rng = random.Random(SEED * 1_000_003 + number)
    text = rng.choice(ANSWERS)
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5))):
        text = rng.choice(DAMAGES)(rng, text)[:CUT_LONGER]
    return text
