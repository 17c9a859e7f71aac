"""Thinking and answer come apart, stop texts end the answer, whatever the borders of the pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3b_engine.runtime.transcript import Transcript, split_thinking


def run(pieces, thinking=False, stop=()):
    transcript = Transcript(thinking, stop)
    shown = []
    for piece in pieces:
        shown += transcript.push(piece)
    shown += transcript.finish()
    return transcript, shown


def test_T06_an_empty_block_in_front_is_removed():
    assert split_thinking("<think>\n\n\n\n</think>\n\nOK.") == ("", "OK.")


def test_T03_an_open_block_is_all_thinking():
    thinking, text = split_thinking("step one, step two", inside=True)
    assert (thinking, text) == ("step one, step two", "")
    assert split_thinking("<think>step one, step two") == ("step one, step two", "")


def test_J10_a_tag_inside_an_answer_stays():
    raw = '{"line":"my <think>tag</think> leaked"}'
    assert split_thinking(raw) == ("", raw)


def test_only_the_first_closing_tag_counts():
    assert split_thinking("a</think>\n\nb</think>c", inside=True) == ("a", "b</think>c")


def test_answer_without_thinking_keeps_its_white_space():
    assert split_thinking("  two spaces\n") == ("", "  two spaces\n")


@given(st.text(alphabet="ab<>/think\n {}", max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=30), st.booleans())
def test_pieces_never_change_the_result(raw, sizes, inside):
    pieces, rest, turn = [], raw, 0
    while rest:
        size = sizes[turn % len(sizes)]
        pieces.append(rest[:size])
        rest, turn = rest[size:], turn + 1
    transcript, shown = run(pieces, inside)
    assert (transcript.thinking, transcript.text) == split_thinking(raw, inside)
    assert "".join(t for t, thinking in shown if thinking).strip() == transcript.thinking


@pytest.mark.parametrize("size", range(1, 9))
def test_stop_texts_are_found_across_borders_and_left_out(size):
    raw = "one two END three"
    transcript, shown = run([raw[i : i + size] for i in range(0, len(raw), size)], stop=("END", "NEVER"))
    assert transcript.text == "one two " and transcript.stopped
    assert "".join(t for t, _ in shown) == "one two "


def test_a_half_stop_text_at_the_end_is_released():
    transcript, _ = run(["almost EN"], stop=("END",))
    assert transcript.text == "almost EN" and not transcript.stopped


def test_stop_texts_do_not_act_on_thinking():
    transcript, _ = run(["a END b</think>\n\nanswer"], thinking=True, stop=("END",))
    assert transcript.thinking == "a END b" and transcript.text == "answer"
