"""Rendering with a small tokenizer and template: order, images, thinking, and texts that imitate control tokens."""

import json

import pytest
from fixtures_text import CONTROL, CONTROL_TEXTS, SMALL_TEMPLATE, chat_config, small, small_folder  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from a3b_engine.chat import ChatTemplate, ImageSpan, render_chat
from a3b_engine.errors import CheckpointError, PromptError
from a3b_engine.prompt import Prompt

RELAXED = settings(max_examples=60, deadline=None, derandomize=True)
SENTINELS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
HOSTILE = st.lists(
    st.sampled_from(
        [*CONTROL, *SENTINELS, "<|", "|>", "im_end", "{{ messages }}", "{% if", "{", "}", "\\n", "\n", " ", "a"]
    ),
    max_size=10,
).map("".join)


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(SMALL_TEMPLATE, "small template")


@pytest.fixture
def render(small, template):  # noqa: F811
    def render(prompt, counts=(), thinking=False, template=template):
        return render_chat(prompt, template, small, chat_config(small), list(counts), thinking)

    return render


def control_in(ids, small):  # noqa: F811
    return [number for number in ids if number in small.control_ids]


def test_T01_thinking_off_closes_the_block_and_on_opens_it(render):
    off, on = render(Prompt(user="hi")), render(Prompt(user="hi"), thinking=True)
    assert off.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") and not off.opens_thinking
    assert on.text.endswith("<|im_start|>assistant\n<think>\n") and on.opens_thinking


def test_T02_closing_block_is_the_same_with_and_without_an_image(render):
    text = render(Prompt(user="hi"))
    image = render(Prompt(user="hi", images=["a"]), [4])
    assert text.token_ids[-6:] == image.token_ids[-6:]
    assert text.text[-30:] == image.text[-30:] and text.text.endswith("</think>\n\n")


def test_C01_system_first_whatever_the_order(render):
    history = [{"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}]
    text = render(Prompt(history=history)).text
    assert text.startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant"
    )


def test_C04_and_C06_image_with_empty_text(render, small):  # noqa: F811
    for prompt in (Prompt(user="[[IMG]]", images=["a"]), Prompt(system="As JSON", user="  \n", images=["a"])):
        rendered = render(prompt, [6])
        [span] = rendered.image_spans
        pad = small.token_to_id("<|image_pad|>")
        assert rendered.text.count("<|image_pad|>") == 1 and rendered.token_ids.count(pad) == 6
        assert rendered.token_ids[span.start : span.start + span.length] == [pad] * 6
        assert rendered.token_ids[span.start - 1] == small.token_to_id("<|vision_start|>")
        assert rendered.token_ids[span.start + span.length] == small.token_to_id("<|vision_end|>")


def test_C07_braces_and_template_syntax_arrive_intact(render, small):  # noqa: F811
    text = 'Story: {story}. {{ messages }} {% raw %} {# no #} Reply like {"panels":[{"shot":"close"}]}'
    rendered = render(Prompt(user=text, system=text))
    assert rendered.text.count(text) == 2
    assert small.decode(rendered.token_ids).count(text) == 2


@pytest.mark.parametrize("typed", CONTROL_TEXTS + [SENTINELS + "<|im_end|>", "<|im_end|>" * 50])
def test_C09_typed_control_tokens_stay_text(render, small, typed):  # noqa: F811
    history = [{"role": "user", "content": typed}, {"role": "assistant", "content": "a " + typed}]
    rendered = render(Prompt(user=typed, system=typed, history=history))
    honest = render(Prompt(user="x", system="x", history=[{**turn, "content": "x"} for turn in history]))
    assert control_in(rendered.token_ids, small) == control_in(honest.token_ids, small)
    assert typed.strip() in rendered.text and typed.strip() in small.decode(rendered.token_ids, skip_special=False)


@given(user=HOSTILE, system=HOSTILE, earlier=HOSTILE)
@RELAXED
def test_C09_no_text_reaches_a_control_token(small, template, user, system, earlier):  # noqa: F811
    history = [{"role": "user", "content": earlier}, {"role": "assistant", "content": "=" + earlier}]
    prompt = Prompt(user="=" + user, system="=" + system, history=history)
    rendered = render_chat(prompt, template, small, chat_config(small), [], False)
    honest = Prompt(user="x", system="x", history=[{**turn, "content": "x"} for turn in history])
    expected = render_chat(honest, template, small, chat_config(small), [], False)
    assert control_in(rendered.token_ids, small) == control_in(expected.token_ids, small)
    assert small.decode(rendered.token_ids, skip_special=False) == rendered.text
    assert ("=" + user).strip() in rendered.text and ("=" + system).strip() in rendered.text


def test_C09_with_a_real_image_beside_a_typed_placeholder(render, small):  # noqa: F811
    rendered = render(Prompt(user="<|image_pad|> [[IMG]] <|vision_start|><|image_pad|>", images=["a"]), [9])
    assert rendered.token_ids.count(small.token_to_id("<|image_pad|>")) == 9
    assert rendered.token_ids.count(small.token_to_id("<|vision_start|>")) == 1
    assert rendered.text.count("<|image_pad|>") == 3


def test_all_sentinels_in_the_text_still_renders(render, small):  # noqa: F811
    rendered = render(Prompt(user=SENTINELS + "<|im_end|>" + SENTINELS))
    assert SENTINELS + "<|im_end|>" + SENTINELS in small.decode(rendered.token_ids, skip_special=False)


def test_I01_marker_count_is_checked_before_any_model_work(render):
    with pytest.raises(PromptError, match="2 markers, 1 image"):
        render(Prompt(user="[[IMG]] and [[IMG]]", images=["a"]), [4])


def test_I04_all_images_of_a_batch_are_placed(render):
    rendered = render(Prompt(user="compare", images=["a", "b", "c"]), [4, 4, 4])
    assert [span.image_index for span in rendered.image_spans] == [0, 1, 2]
    assert rendered.text.index("<|image_pad|>") < rendered.text.index("compare")


def test_I07_spans_follow_the_markers(render, small):  # noqa: F811
    prompt = Prompt(user="second [[IMG:2]] first [[IMG:1]]", images=["red", "blue"], label_images=True)
    rendered = render(prompt, [3, 5])
    assert [(span.image_index, span.length) for span in rendered.image_spans] == [(1, 5), (0, 3)]
    assert "Picture 2: <|vision_start|><|image_pad|><|vision_end|> first Picture 1: <|vision_start|>" in rendered.text
    pads = [i for i, number in enumerate(rendered.token_ids) if number == small.token_to_id("<|image_pad|>")]
    assert pads == [i for span in rendered.image_spans for i in range(span.start, span.start + span.length)]


def test_one_image_named_twice_has_two_spans(render):
    rendered = render(Prompt(user="[[IMG:1]] and [[IMG:1]]", images=["a"]), [2])
    assert [(span.length, span.image_index) for span in rendered.image_spans] == [(2, 0), (2, 0)]
    assert isinstance(rendered.image_spans[0], ImageSpan)


def test_counts_must_match_the_images(render):
    with pytest.raises(PromptError, match="1 images, but 0 token counts"):
        render(Prompt(user="a", images=["x"]), [])


def test_template_without_image_support_is_named(render):
    plain = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "plain.jinja")
    assert render(Prompt(user="hi"), template=plain).text == "user: hi\n"
    with pytest.raises(CheckpointError, match="plain.jinja wrote 0 image placeholders for 1 images"):
        render(Prompt(user="hi", images=["a"]), [4], template=plain)


def test_template_that_ignores_thinking_opens_none(render):
    plain = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    assert not render(Prompt(user="hi"), thinking=True, template=plain).opens_thinking


def test_refusal_of_the_template_is_a_prompt_error(render):
    refusing = ChatTemplate("{{ raise_exception('Only cats may ask.') }}", "cats.jinja")
    with pytest.raises(PromptError, match="cats.jinja refuses this conversation: Only cats may ask."):
        render(Prompt(user="hi"), template=refusing)


def test_lone_surrogates_do_not_stop_a_prompt(render):
    assert "a\ufffdb" in render(Prompt(user="a\ud83db", system="\udc00")).text


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}}, "A"),
        ({"chat_template.jinja": "\ufeffA\r\nB"}, "A\nB"),
        ({"chat_template.json": {"chat_template": "C"}, "tokenizer_config.json": {"chat_template": "B"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": "B"}}, "B"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
    ],
)
def test_template_is_found_in_every_place(tmp_path, files, expected):
    write(tmp_path, files)
    assert (
        ChatTemplate.from_folder(tmp_path).render([{"role": "user", "content": "x"}], enable_thinking=False) == expected
    )


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "has no chat template"),
        ({"tokenizer_config.json": {}}, "has no chat template"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool", "template": "T"}]}}, "named 'default'"),
        ({"tokenizer_config.json": {"chat_template": 5}}, "named 'default'"),
        ({"chat_template.jinja": "{% for %}"}, "cannot be compiled"),
        ({"chat_template.jinja": "{{ x | no_such_filter }}"}, "no_such_filter"),
        ({"chat_template.jinja": b"\xff\xfe\x00"}, "cannot be read"),
        ({"chat_template.jinja": " " * 128 * 1024 + "x"}, "at most"),
    ],
)
def test_missing_and_broken_templates_are_named(tmp_path, files, words):
    write(tmp_path, files)
    with pytest.raises(CheckpointError, match=words):
        ChatTemplate.from_folder(tmp_path)


def write(folder, files):
    for name, content in files.items():
        content = json.dumps(content) if isinstance(content, dict) else content
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
