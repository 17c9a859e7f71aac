"""Scripts as YAML outlines, Markdown tables and labelled prose: read where their meaning is certain, else not at all."""

import pytest
from script_checks import check_everything

from a3b_engine.script.parse import parse_script

YAML = """title: Rain
characters:
  - id: rin
    name: Rin
    look: red hair, blue coat
dialogue:
  - {panel: 1, speaker: rin, line: "Hi, you"}
  - panel: 2
    speaker: rin
    line: 'It''s late'
panels:
  - index: 1
    shot: wide   # framing
    characters: [rin]
    action: Rin runs
      through the rain
    props:
    - cup
    - sign #3
    visual_prompt: >
      wide shot, a girl
      in the rain
  - index: 2
    shot: close
    characters: []
    action: |
      Rin looks up.

      She smiles.
    caption: ~
"""
TABLES = """## Characters
| Name | Look |
|---|---|
| Rin | red hair |

## Panels
| # | Shot | Action | Props | Dialogue |
|:-:|---|---|---|---|
| 1 | Wide shot | Rin runs | cup, rope | Rin: hi<br>Mio: yo |
| 2 | Close-up | **Rin looks up \\| smiles** | - | |

Enjoy!"""


def read(text, **options):
    result = parse_script(text, **options)
    check_everything(result, text)
    return result, [(panel.shot, panel.action) for panel in result.script.panels] if result.script else None


@pytest.mark.parametrize("text", [YAML, f"Sure:\n\n```yaml\n{YAML}```\nHope this helps: ask!", f"<think>plan: x\n</think>\n{YAML}", YAML.replace("\n", "\r\n"), YAML.expandtabs()])
def test_an_outline_is_a_script(text):
    result, panels = read(text)
    assert panels == [("wide", "Rin runs through the rain"), ("close", "Rin looks up.\n\nShe smiles.")] and result.status == "repaired"
    first, second = result.script.panels
    assert (first.characters, first.props, first.visual_prompt) == (["rin"], ["cup", "sign #3"], "wide shot, a girl in the rain")
    assert second.caption == "" and second.characters == [] and result.script.characters[0].look == "red hair, blue coat"
    assert [(row.panel, row.speaker, row.line) for row in result.script.dialogue] == [(1, "rin", "Hi, you"), (2, "rin", "It's late")]
    assert any("outline (YAML)" in line for line in result.report)


@pytest.mark.parametrize(
    "text",
    [
        "- shot: wide\n  action: a door\n- shot: close\n  action: a face\n",
        "panels:\n-\n  shot: wide\n  action: a door\n-\n  shot: close\n  action: a face",
        "Panel 1:\n  shot: wide\n  action: a door\nPanel 2:\n  shot: close\n  action: a face",
        "panels:\n  panel_1:\n    shot: wide\n    action: a door\n  panel_2:\n    shot: close\n    action: a face",
        "panels:\n  - - shot: wide\n    - action: a door\n  - - shot: close\n    - action: a face",
        "\u5206\u955c\uff1a\n  - \u666f\u522b\uff1a\u8fdc\u666f\n    \u52a8\u4f5c\uff1aa door\n  - \u666f\u522b\uff1a\u7279\u5199\n    \u52a8\u4f5c\uff1aa face\n",
        "panels:\n\t- shot: wide\n\t  action: a door\n\t- shot: close\n\t  action: a face\n",
        "panels:\n  - {shot: wide, action: a door}\n  - {shot: close, action: a face}\n",
        "| Panel | Shot | Action |\n|---|---|---|\n| 1 | wide | a door |\n| 2 | close | a face |",
        "Panel | Shot | Action\n--- | --- | ---\n1 | wide | a door\n2 | close | a face",
        "| \u5e8f\u53f7 | \u666f\u522b | \u52a8\u4f5c |\n|:--|:-:|--:|\n| 2 | \u7279\u5199 | a face |\n| 1 | \u8fdc\u666f | a door |",
        "| Field | Panel 1 | Panel 2 |\n|---|---|---|\n| Shot | wide | close |\n| Action | a door | a face |",
        "1. Shot: wide. Action: a door\n2. Shot: close. Action: a face",
        "1. **Shot**: wide\n   **Action**: a door\n2. **Shot**: close\n   **Action**: a face\n\nTell me what you think!",
        "\u3010\u5206\u955c1\u3011\n\u666f\u522b\uff1a\u8fdc\u666f\n\u52a8\u4f5c\uff1aa door\n\u3010\u5206\u955c2\u3011\n\u666f\u522b\uff1a\u7279\u5199\n\u52a8\u4f5c\uff1aa face",
        "**Panel 1**\n- **Shot:** wide\n- **Action:** a door\n\n**Panel 2**\n- **Shot:** close\n- **Action:** a face",
        "[Panel 1] Shot: wide\nAction: a door\n[Panel 2] Shot: close\nAction: a face",
    ],
)
def test_other_forms_of_a_list(text):
    result, panels = read(text)
    assert panels == [("wide", "a door"), ("close", "a face")] and result.status == "repaired"


def test_tables_are_a_script():
    result, panels = read(TABLES)
    assert panels == [("wide", "Rin runs"), ("close", "Rin looks up | smiles")]
    assert result.script.panels[0].props == ["cup", "rope"] and result.script.panels[1].props == []
    assert [(row.panel, row.speaker, row.line) for row in result.script.dialogue] == [(1, "Rin", "hi"), (1, "Mio", "yo")]
    assert [person.name for person in result.script.characters] == ["Rin"]


@pytest.mark.parametrize("text", ["| Pros | Cons |\n|---|---|\n| fast | dear |", "name: x\nversion: 2\nlist:\n  - a\n  - b", "To do:\n- buy milk\n- call Rin", "title: Rain\nstyle: ink", "1. Buy milk.\n2. Call Rin."])
def test_other_lists_are_no_script(text):
    assert read(text)[0].status == "failed"


@pytest.mark.parametrize("text", ["a: &x [1]\npanels:\n- shot: wide\n  action: *x\n", "panels:\n- !!python/object:os.system\n  shot: wide\n", "panels:\n- <<: *base\n  shot: wide\n", "panels:\n" + "".join(" " * n + "- a:\n" for n in range(2, 60))])
def test_what_is_not_plain_in_an_outline_is_not_read(text):
    assert read(text)[0].status == "failed"


def test_json_in_the_text_wins_over_a_table_and_an_outline():
    outline = "panels:\n  - shot: wide\n    action: a door\n"
    text = f'{TABLES}\n```yaml\n{outline}```\n```json\n{{"panels":[{{"shot":"pov","action":"the answer"}}]}}\n```'
    result, panels = read(text)
    assert panels == [("pov", "the answer")] and result.status == "ok"


@pytest.mark.parametrize(
    "end, panels",
    [("She smi", [("wide", "Rin runs through the rain"), ("close", "")]), ("shot: clo", [("wide", "Rin runs through the rain")])],
)
def test_an_outline_that_is_cut_keeps_what_is_whole(end, panels):
    text = f"```yaml\n{YAML}"
    result, found = read(text[: text.index(end) + len(end)])
    assert result.status == "truncated" and found == panels and "max_new_tokens" in result.cause


def test_a_table_that_is_cut_keeps_what_is_whole():
    result, panels = read("| Panel | Shot | Action |\n|---|---|---|\n| 1 | wide | a door |\n| 2 | close | a fa")
    assert panels == [("wide", "a door"), ("close", "")] and result.status == "truncated" and result.partial == (2,)


def test_an_outline_that_ends_early_says_where():
    report = read("panels:\n  - shot: wide\n    action: a door\n   oops\n")[0].report
    assert any('does not fit: "oops"' in line for line in report)


def test_a_row_with_too_many_cells_is_reported():
    result, panels = read("| Panel | Shot | Action |\n|---|---|---|\n| 1 | wide | a | b |")
    assert panels == [("wide", "a")] and any("more cells" in line for line in result.report)


def test_prose_with_speech_and_a_closing_remark():
    result, panels = read('Panel 1: Rin walks.\nRin: "Where?"\nMio: "Here."\nPanel 2: Mio waits.\n\nI hope you enjoy this script!')
    assert panels == [("medium", "Rin walks."), ("medium", "Mio waits.")]
    assert [(row.panel, row.speaker, row.line) for row in result.script.dialogue] == [(1, "Rin", "Where?"), (1, "Mio", "Here.")]


def test_paragraphs_that_every_panel_has_are_kept():
    _, panels = read("Panel 1: rain.\n\nIt pours.\nPanel 2: door.\n\nIt opens.")
    assert [action for _, action in panels] == ["rain.\n\nIt pours.", "door.\n\nIt opens."]


@pytest.mark.parametrize(
    "spoken",
    ['Dialogue:\nRin: "Run."\nKai: "No!"', 'Dialogue:\n- Rin: "Run."\n- Kai: No!', 'Dialogue: Rin: "Run."\nKai: "No!"', '> **Rin:** "Run."\n> **Kai:** "No!"', "Dialogue:\n\n**Rin**: \"Run.\"\n\n**Kai**: \"No!\""],
)
def test_no_line_of_dialogue_under_a_label_is_lost(spoken):
    result, panels = read(f"Panel 1\nAction: The city burns.\n{spoken}\n\nPanel 2\nAction: A face.\n")
    assert [action for _, action in panels] == ["The city burns.", "A face."]
    assert [(row.panel, row.speaker, row.line.strip('"')) for row in result.script.dialogue] == [(1, "Rin", "Run."), (1, "Kai", "No!")]


@pytest.mark.parametrize("caption", ["", "Caption: Later.\n"])
def test_labels_that_are_no_field_are_kept_apart_and_reported(caption):
    result, panels = read(f"Panel 1\nAction: x\n{caption}Mood: tense\nCamera angle: low\n\nA remark.")
    panel = result.script.panels[0]
    assert panels == [("medium", "x")] and panel.caption == ("Later." if caption else "")
    assert panel.model_extra == {"mood": "tense", "camera_angle": "low", "note": "A remark."}
    assert all(any(f"panels[0].{key}: not a field of a script; kept" in line for line in result.report) for key in panel.model_extra)


def test_a_value_may_go_on_in_the_next_line():
    assert read("Panel 1\nAction: The city burns.\nSmoke rises.\nPanel 2\nAction: A face.")[1][0] == ("medium", "The city burns.\nSmoke rises.")


@pytest.mark.parametrize(
    "text",
    [
        "\u7b2c\u4e00\u683c\uff08\u8fdc\u666f\uff09\uff1aa door\n\u7b2c\u4e8c\u683c\uff08\u7279\u5199\uff09\uff1aa face",
        "\u955c\u59341\uff08\u8fdc\u666f\uff09\uff1a\na door\n\u955c\u59342\uff08\u7279\u5199\uff09\uff1a\na face",
        "\u5206\u955c1\uff08\u8fdc\u666f\uff09\uff1aa door\n\u5206\u955c2\uff08\u7279\u5199\uff09\uff1aa face",
        "\u7b2c1\u683c\u3010\u8fdc\u666f\u3011a door\n\u7b2c2\u683c\u3010\u7279\u5199\u3011a face",
        "Panel 1 (Wide shot): a door\nPanel 2 (Close-up): a face",
        "Panel 1 [Wide]: a door\nPanel 2 [Close]: a face",
        "### Panel 1 (wide)\na door\n\n### Panel 2 (close)\na face",
        "**Panel 1 (Wide shot):** a door\n**Panel 2 (Close-up):** a face",
        "Panel 1 - WIDE SHOT a door\nPanel 2 - CLOSE-UP a face",
        "PANEL ONE\nWide shot of a door\nPANEL TWO\nClose-up of a face",
    ],
)
def test_heads_with_the_shot_in_them(text):
    assert read(text)[1] == [("wide", "a door"), ("close", "a face")]


def test_what_a_head_says_in_brackets_is_kept():
    result, panels = read("Panel 1 (Rin's house): rain. Panel 2: door.")
    assert [action for _, action in panels] == ["rain.", "door."] and result.script.panels[0].model_extra == {"heading": "Rin's house"}


def test_a_list_on_one_line_may_have_quoted_words():
    result, _ = read("panels:\n- shot: wide\n  action: a door\n  props: [cup, \"red hat\", 'it''s, here', 3]\n- shot: close\n  action: a face\n  props: ('cup', 'hat',)\n")
    assert [panel.props for panel in result.script.panels] == [["cup", "red hat", "it's, here", "3"], ["cup", "hat"]]
