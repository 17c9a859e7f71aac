"""The readable form: Fountain syntax that no text of a script can break out of."""

import json

import pytest
from hypothesis import given
from script_strategies import QUICK, scripts

from a3b_engine.script.fountain import fountain_text
from a3b_engine.script.parse import parse_script
from a3b_engine.script.schema import ComicScript

SCRIPT = {
    "title": "The Last Lamp",
    "style": "ink",
    "reading_direction": "rtl",
    "characters": [{"id": "rin", "name": "Rin", "look": "girl, red hair"}],
    "dialogue": [
        {"panel": 1, "speaker": "rin", "line": "Is *anyone* there?", "emotion_tag": "afraid"},
        {"panel": 2, "speaker": "", "line": ""},
    ],
    "panels": [
        {"index": 1, "shot": "wide", "background": "harbour", "action": "Rin looks up", "caption": "Night.", "visual_prompt": "a harbour", "props": ["lamp", "key"]},
        {"index": 2, "shot": "close", "action": ".hidden", "light": "blue dusk", "sfx": "CRACK"},
    ],
}


def written(script):
    return fountain_text(ComicScript.model_validate(script))


def test_a_page():
    assert written(SCRIPT) == (
        "Title: The Last Lamp\n"
        "Format: Comic script, 2 panels, read right to left\n"
        "Style: ink\n\n"
        "# Characters\n\n= Rin: girl, red hair\n\n# Panels\n\n"
        ".PANEL 1 - WIDE SHOT - harbour\n\n"
        "Rin looks up\n\nProps: lamp, key\n\n"
        "@CAPTION\nNight.\n\n"
        "@Rin\n(afraid)\nIs \\*anyone\\* there?\n\n"
        "[[Image prompt: a harbour]]\n\n"
        ".PANEL 2 - CLOSE-UP\n\n"
        "!.hidden\n\nLight: blue dusk\n\n"
        "@VOICE\n...\n\n"
        "@SFX\nCRACK\n"
    )


@pytest.mark.parametrize(
    "line", ["INT. HOUSE", "ext house", "CUT TO:", ".x", "@x", "!x", "> x <", "~x", "# x", "= x", "===", "(x)"]
)
def test_action_stays_action(line):
    text = written({"panels": [{"action": line}]})
    assert any(block.startswith("!") for block in text.split("\n\n"))


def elements(text):
    """Blocks of a Fountain text by what a reader takes them for."""
    page, *blocks = text.rstrip("\n").split("\n\n")
    found = {"heading": [], "cue": [], "note": [], "section": [], "synopsis": [], "other": []}
    signs = {".": "heading", "@": "cue", "[[": "note", "#": "section", "=": "synopsis"}
    for block in blocks:
        found[next((name for sign, name in signs.items() if block.startswith(sign)), "other")].append(block)
    return page, found


@QUICK
@given(scripts())
def test_no_text_breaks_out_of_its_element(value):
    script = parse_script(json.dumps(value)).script
    text = fountain_text(script)
    page, found = elements(text)
    assert all(": " in line for line in page.split("\n")) and text.endswith("\n") and "\n\n\n" not in text
    assert len(found["heading"]) == len(script.panels) and all(".PANEL " == block[:7] for block in found["heading"])
    assert len(found["cue"]) == len(script.dialogue) + sum(bool(p.caption.strip()) + bool(p.sfx.strip()) for p in script.panels)
    assert len(found["note"]) == sum(bool(p.visual_prompt.strip()) + bool(p.negative.strip()) for p in script.panels)
    assert "/*" not in text and "*/" not in text
    for note in found["note"]:
        assert note.startswith("[[") and note.endswith("]]") and note.count("[[") == note.count("]]") == 1 and "\n" not in note
    assert not any(line.startswith((".", "@", ">", "~", "=", "#")) for block in found["other"] for line in block.split("\n"))
    text.encode("utf-8")
