"""Where pictures stand in a prompt, and in which order the turns go."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.errors import PromptError
from a3b_engine.prompt import Prompt, build_messages, place_images

RELAXED = settings(max_examples=80, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    "text, images, expected",
    [
        ("no pictures", 0, ["no pictures"]),
        ("", 0, []),
        ("compare", 3, [0, 1, 2, "compare"]),
        ("[[IMG]]", 1, [0]),
        ("first [[IMG]] second [[IMG]]", 2, ["first ", 0, " second ", 1]),
        ("[[IMG:2]] then [[IMG:1]]", 2, [1, " then ", 0]),
        ("[[img]] [[ Img : 2 ]]", 2, [0, " ", 1]),
        ("[[IMG:1]][[IMG]]", 2, [0, 1]),
        ("[[IMG]][[IMG:1]]", 2, [1, 0]),
        ("only [[IMG:2]]", 3, [0, 2, "only ", 1]),
        ("[[IMG:1]] again [[IMG:1]]", 1, [0, " again ", 0]),
        ("[[IMG\uff1a\uff12]]", 2, [0, 1]),
        ("[[IMAGE]] [IMG] [[IMGS]] [[I MG]]", 0, ["[[IMAGE]] [IMG] [[IMGS]] [[I MG]]"]),
        ("[[[IMG]]]", 1, ["[", 0, "]"]),
    ],
)
def test_places(text, images, expected):
    assert place_images(text, images) == expected


@pytest.mark.parametrize(
    "text, images, words",
    [
        ("[[IMG]] and [[IMG]]", 1, ["2 markers", "1 image:"]),
        ("[[IMG]]", 0, ["1 marker,", "0 images"]),
        ("[[IMG:1]] [[IMG]]", 1, ["2 markers", "1 image:"]),
        ("[[IMG:3]]", 2, ["[[IMG:3]]", "2 images"]),
        ("[[IMG:0]]", 2, ["[[IMG:0]]", "2 images"]),
        ("[[IMG:-1]]", 2, ["[[IMG:-1]]"]),
        ("[[IMG:two]]", 2, ["[[IMG:two]]"]),
        ("[[IMG:]]", 2, ["[[IMG:]]"]),
        ("[[IMG:\u00b2]]", 2, ["not understood"]),
        ("[[IMG:" + "9" * 5000 + "]]", 2, ["2 images"]),
    ],
)
def test_I01_wrong_markers_are_refused_with_the_numbers(text, images, words):
    with pytest.raises(PromptError) as caught:
        build_messages(Prompt(user=text, images=[object()] * images))
    for word in words:
        assert word in str(caught.value)


@given(pieces=st.lists(st.one_of(st.just("[[IMG]]"), st.text(max_size=8)), max_size=8), spare=st.integers(0, 3))
@RELAXED
def test_every_image_is_placed_once_and_no_text_is_lost(pieces, spare):
    text = "".join(pieces)
    markers = sum(part == 0 for part in _parts_with(text))
    parts = place_images(text, markers + spare)
    assert [part for part in parts if isinstance(part, int)] == [*range(markers, markers + spare), *range(markers)]
    assert "".join(part for part in parts if isinstance(part, str)) == text.replace("[[IMG]]", "")


def _parts_with(text):
    """Count markers by plain search; the generator above builds none but exact ones."""
    return [0] * text.count("[[IMG]]")


def test_I04_a_batch_without_markers_is_used_whole():
    [turn] = build_messages(Prompt(user="compare", images=["a", "b", "c"]))
    assert [item.get("index", item.get("text")) for item in turn["content"]] == [0, 1, 2, "compare"]


def test_I07_markers_follow_the_input_order_and_labels_name_it():
    [turn] = build_messages(Prompt(user="[[IMG:2]] or [[IMG:1]]", images=["red", "blue"], label_images=True))
    content = [item.get("index", item.get("text")) for item in turn["content"]]
    assert content == ["Picture 2: ", 1, " or ", "Picture 1: ", 0]


def test_C01_system_goes_first_and_the_order_of_the_rest_stays():
    history = [
        {"role": "user", "content": "hello"},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "hi"},
    ]
    turns = build_messages(Prompt(user="and now?", system="be kind", history=history))
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("system", "be kind\n\nbe brief"), ("user", "hello"), ("assistant", "hi"), ("user", "and now?"),
    ]  # fmt: skip


def test_C01_history_alone_is_enough():
    history = [{"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}]
    turns = build_messages(Prompt(history=history))
    assert [turn["role"] for turn in turns] == ["system", "user"]


def test_C04_image_alone_is_a_user_query():
    [turn] = build_messages(Prompt(user="[[IMG]]", images=["a"]))
    assert turn == {"role": "user", "content": [{"type": "image", "index": 0}]}


def test_C06_whitespace_counts_as_empty_and_the_image_stays():
    turns = build_messages(Prompt(system="Describe as JSON", user="  \n", images=["a"]))
    assert turns[1]["content"] == [{"type": "image", "index": 0}]


def test_C06_system_alone_runs_with_an_empty_user_turn():
    assert build_messages(Prompt(system="Describe", user=" "))[1] == {"role": "user", "content": ""}


@pytest.mark.parametrize("prompt", [Prompt(), Prompt(user=" \n\t"), Prompt(system="  ")])
def test_nothing_to_answer_says_what_to_fill_in(prompt):
    with pytest.raises(PromptError, match="user text"):
        build_messages(prompt)


def test_history_that_ends_with_an_answer_needs_a_new_question():
    with pytest.raises(PromptError, match="empty"):
        build_messages(Prompt(history=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))


@pytest.mark.parametrize(
    "text",
    [
        'Story: {story}. Reply like {"panels":[{"shot":"close"}]}',
        "{{ x }} {% if %} {# #} %s {0} ${y}",
        "{",
        "}}{{",
        "a\\{b}",
    ],
)
def test_C07_braces_stay(text):
    history = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    turns = build_messages(Prompt(user=text, system=text, history=history))
    assert [turn["content"] for turn in turns] == [text] * 4


@pytest.mark.parametrize(
    "prompt, word",
    [
        (Prompt(user="a", system="see [[IMG]]", images=["x"]), "system text"),
        (Prompt(user="a", history=[{"role": "user", "content": "[[img:1]]"}], images=["x"]), "history turn 1"),
        (Prompt(user="a", history=[{"role": "assistant", "content": "[[IMG]]"}]), "history turn 1"),
    ],
)
def test_markers_outside_the_user_text_are_refused(prompt, word):
    with pytest.raises(PromptError, match=word):
        build_messages(prompt)


@pytest.mark.parametrize(
    "turn",
    [{}, {"role": "tool", "content": "x"}, {"role": "user"}, {"role": "user", "content": 3}, "user", None, ["user"]],
)
def test_bad_history_is_named(turn):
    with pytest.raises(PromptError, match="History turn 1"):
        build_messages(Prompt(user="a", history=[turn]))


@pytest.mark.parametrize(
    "fields", [{"user": 1}, {"system": None}, {"images": "x"}, {"history": {"a": 1}}, {"images": 3}]
)
def test_bad_fields_are_named(fields):
    with pytest.raises(PromptError, match=next(iter(fields))):
        Prompt(**fields)


@pytest.mark.parametrize(
    "content, answer, thinking",
    [
        ("plain", "plain", None),
        ("<think>\nhm\n</think>\n\nyes", "yes", "hm"),
        ("hm</think>yes", "yes", "hm"),
        ("<think>\n\n</think>\n\nyes", "yes", ""),
        ("my <think>tag</think> leaked", "my <think>tag</think> leaked", None),
        ("<think>a</think>b</think>c", "b</think>c", "a"),
        ("<think>never closed", "<think>never closed", None),
    ],
)
def test_thinking_of_earlier_answers_is_kept_apart(content, answer, thinking):
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    turn = build_messages(Prompt(user="next", history=history))[1]
    assert (turn["content"], turn.get("reasoning_content")) == (answer, thinking)


def test_open_markers_without_end_are_text_and_cost_no_time():
    text = "[[IMG:" * 20_000
    began = time.monotonic()
    assert place_images(text, 0) == [text]
    assert time.monotonic() - began < 2
