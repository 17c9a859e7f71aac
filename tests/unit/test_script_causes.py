"""The message of a text without a script: the likely cause, what to do, and the start of the raw text."""

import json

import pytest

from a3b_engine.errors import ScriptError
from a3b_engine.script.drawable import blank_panels
from a3b_engine.script.panels import NEUTRAL_PROMPT, panel_lists
from a3b_engine.script.parse import parse_script

CAUSES = {
    "is empty": ["", " \n\t\u3000", "\ufeff"],
    "spent thinking": ["<think>", "<think>\nOkay, the user wants", '<think>draft {"panels":[{"shot":"wide"}]}', "<thinking>\u597d\u7684"],
    "no answer follows it": ["<think>x</think>", "<think>x</think>\n\n", "Let me think.\n</think>\n"],
    "cut off before": ['{"panels":[{"sho', '{"panels":[', "{", '```json\n{"title":"x', '{"title":"Rain","style":"ink"', "[", '{"panels":[{"index":1'],
    "ends before the JSON begins": ["Sure! Here is your comic script:", "Here is the JSON:\n```json\n", "\u597d\u7684\uff0c\u811a\u672c\u5982\u4e0b\uff1a"],
    "is empty: it holds no panels": ['{"panels":[]}', "[]", "{}", "null", '```json\n{"panels": []}\n```', '{"panels":[{}]}'],
    "is a schema": ['{"type":"object","properties":{}}', '{"$defs":{"Panel":{}}}'],
    "placeholders": ['{"panels":[{"shot":"close|medium","action":"..."}]}'],
    "error message of a server": ['{"error":{"message":"rate limit"}}', "Error: connection refused", "<html><body>502 Bad Gateway</body></html>", "Traceback (most recent call last):\n  File x"],
    "asks back": ["What style do you want?", "\u60a8\u60f3\u8981\u4ec0\u4e48\u98ce\u683c\uff1f"],
    "written in tags": ["<panels><panel><shot>wide</shot></panel></panels>"],
    "repeats itself": ["the the the the the the the the the the the the the the", "<think>" + "so, " * 200, "!" * 50],
    "There is JSON in the text": ['{"images":[1,2,3]}', '{"foo":{"bar":"baz"}}', '{"title":"Rain"}'],
    "There is no JSON": ["OK.", "Once upon a time there was a cat who loved rain.", "42", '"hello"', "Rin is sorry she came; she cannot sleep. Rain falls.", "\u4ed6\u65e0\u6cd5\u5165\u7761\u3002"],
}
REFUSALS = [
    "I'm sorry, but I can't help with that.", "I\u2019m unable to create that content.", "I cannot assist with this request.", "I must decline this request.",
    "As a language model, I am not able to do this.", "This request violates our content policy.", "Sorry, I can't do that.", "I won't be able to help with it.",
    "\u62b1\u6b49\uff0c\u6211\u4e0d\u80fd\u534f\u52a9\u3002", "\u5f88\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u751f\u6210\u3002", "\u4f5c\u4e3a\u4e00\u4e2aAI\u52a9\u624b\uff0c\u6211\u4e0d\u80fd", "\u8be5\u8bf7\u6c42\u8fdd\u53cd\u4e86\u653f\u7b56", "\u5c0d\u4e0d\u8d77\uff0c\u6211\u7121\u6cd5\u63d0\u4f9b",
    "\u7533\u3057\u8a33\u3042\u308a\u307e\u305b\u3093\u304c\u3001\u5bfe\u5fdc\u3067\u304d\u307e\u305b\u3093", "\uc8c4\uc1a1\ud558\uc9c0\ub9cc \ub3c4\uc640\ub4dc\ub9b4 \uc218 \uc5c6\uc2b5\ub2c8\ub2e4", "D\u00e9sol\u00e9, je ne peux pas vous aider.", "Lo siento, pero no puedo.",
    "Es tut mir leid, aber ich kann nicht.", "\u0418\u0437\u0432\u0438\u043d\u0438\u0442\u0435, \u044f \u043d\u0435 \u043c\u043e\u0433\u0443", "Desculpe, n\u00e3o posso.", "Mi dispiace, non posso.", "Przepraszam, nie mog\u0119.", "Het spijt me.",
    "Maaf, saya tidak dapat membantu.", "Xin l\u1ed7i, t\u00f4i kh\u00f4ng th\u1ec3.", "\u00dczg\u00fcn\u00fcm, yard\u0131mc\u0131 olamam.", "\u0639\u0630\u0631\u064b\u0627\u060c \u0644\u0627 \u0623\u0633\u062a\u0637\u064a\u0639", "\u0e02\u0e2d\u0e42\u0e17\u0e29\u0e04\u0e23\u0e31\u0e1a",
    '{"refusal":"I will not"}', '{"response":"I\'m sorry, I can\'t help with that."}', "<think>no</think>I'm sorry, I can't continue.",
]


@pytest.mark.parametrize("words, text", [(words, text) for words, texts in CAUSES.items() for text in texts])
def test_the_cause_is_named(words, text):
    result = parse_script(text)
    assert result.status == "failed" and result.script is None
    assert words in result.cause
    start = " ".join(text.replace("\ufeff", "").split())[:60]
    assert start in result.cause or not start.strip()
    assert result.cause in result.report[-1]


@pytest.mark.parametrize("text", REFUSALS)
def test_j36_a_refusal_in_any_language(text):
    result = parse_script(text)
    assert result.status == "failed" and "refused" in result.cause and text[:20] in result.cause
    for choice in ("stop", "keep"):
        with pytest.raises(ScriptError) as caught:
            panel_lists(result, on_error=choice)
        assert text[:20] in str(caught.value) and "refused" in str(caught.value)
    assert panel_lists(result, on_error="placeholder").prompt == [NEUTRAL_PROMPT]


@pytest.mark.parametrize("text, whole, cut", [('{"panels":[{"shot":"wide","action":"runs"},{"shot":"close","action":"her ey', 1, 1), ('{"panels":[{"shot":"wide","action":"runs"},', 1, 0)])
def test_j13_the_cause_of_a_cut_counts_what_is_left(text, whole, cut):
    result = parse_script(text)
    assert result.status == "truncated" and f"{whole} panels are whole, {cut} cut off" in result.cause and text[:20] in result.cause


def test_the_start_of_a_long_text_is_one_short_line():
    cause = parse_script("word\n\n" * 10_000 + "end").cause
    assert len(cause) < 600 and "\n" not in cause


STORY = [
    "As an airplane lands, a crowd helps an old man", "As an airship drifts overhead, Rin draws her sword", "Against my window a girl draws a heart",
    "I will not give up, she writes on the wall", "I can't help you, says the ghost", "I can't help but smile", "I cannot draw this sword, Rin thinks",
    "\u65e0\u6cd5\u56de\u7b54\u7684\u5c11\u5973\u4f4e\u4e0b\u5934", "\u65e0\u6cd5\u7ee7\u7eed\u524d\u8fdb\u7684\u5c11\u5e74\u8dea\u5728\u96ea\u5730\u91cc", "\u4e0d\u80fd\u63d0\u4f9b\u5e2e\u52a9\u7684\u8001\u4eba\u4f4e\u5934",
    "\u8fdd\u53cd\u89c4\u5b9a\u7684\u5b66\u751f\u88ab\u8001\u5e08\u8981\u6c42\u7ad9\u5728\u8d70\u5eca", "\u4e0d\u597d\u610f\u601d\u7684\u5c11\u5e74\u6320\u5934\uff0c\u9012\u4e0a\u753b\u597d\u7684\u4fe1", "\u3059\u307f\u307e\u305b\u3093\u3068\u66f8\u3044\u305f\u7d19\u3092\u6301\u3064\u5c11\u5973\u3001\u4f5c\u6210\u4e2d\u306e",
    "\u6211\u4e0d\u80fd\u7ee7\u7eed\u8d70\u4e0b\u53bb", "\u6211\u65e0\u6cd5\u5b8c\u6210\u8fd9\u5e45\u6f2b\u753b\uff0c\u6797\u4f4e\u5934\u53f9\u6c14", "I cannot complete this script, the writer sighs", "\u6211\u65e0\u6cd5\u56de\u7b54\u4ed6\u7684\u8bf7\u6c42",
    '"I cannot do that," Rin says', "I'm sorry, but I can't assist with that request. The knight kneels in the snow.",
]
REFUSED = [
    "I'm sorry, but I can't assist with that request.", "I cannot create this content.", "I\u2019m unable to create that image. Please try another story.",
    "As an AI language model, I cannot generate this scene.", "I must decline this request.", "\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u7ee7\u7eed\u751f\u6210\u3002", "\u4f5c\u4e3a\u4e00\u4e2aAI\u52a9\u624b\uff0c\u6211\u65e0\u6cd5\u63d0\u4f9b\u8be5\u5185\u5bb9",
    "\u7533\u3057\u8a33\u3042\u308a\u307e\u305b\u3093\u304c\u3001\u305d\u306e\u30ea\u30af\u30a8\u30b9\u30c8\u306b\u306f\u5bfe\u5fdc\u3067\u304d\u307e\u305b\u3093\u3002", "D\u00e9sol\u00e9, je ne peux pas vous aider.",
]


@pytest.mark.parametrize("field", ["action", "visual_prompt"])
@pytest.mark.parametrize("text", STORY)
def test_what_the_story_tells_is_never_taken_for_a_refusal(text, field):
    result = parse_script(json.dumps({"panels": [{"index": 1, "shot": "wide", field: text}]}, ensure_ascii=False))
    assert getattr(result.script.panels[0], field) == text and blank_panels(result.script) == ()


@pytest.mark.parametrize("text", REFUSED)
def test_j36_a_value_that_is_a_refusal_and_nothing_else_is_not_drawn(text):
    page = {"panels": [{"index": 1, "shot": "wide", "action": "a door"}, {"index": 2, "shot": "close", "action": text}]}
    result = parse_script(json.dumps(page, ensure_ascii=False))
    assert result.script.panels[1].action == "" and blank_panels(result.script) == (2,)
    assert any(line.startswith("warning: panels[1].action") and "refusal" in line for line in result.report)


def test_j36_what_may_be_a_refusal_is_kept_with_a_warning():
    text = "I'm sorry I can't help, Mother"
    result = parse_script(json.dumps({"panels": [{"index": 1, "shot": "wide", "action": text}]}))
    assert result.script.panels[0].action == text
    assert any(line.startswith("warning: panels[0].action") and "may be a refusal" in line for line in result.report)
