"""Answers of the engine on a small random checkpoint: decoding, thinking, grammars, limits, cancel."""

import json
import re
from dataclasses import replace

import pytest
import torch
from engine_samples import GREEDY, LIVELY, picture, with_template

from a3b_engine import Engine, Prompt, SamplingParams
from a3b_engine.errors import GrammarError, PromptError


def greedy_by_logits(engine, prompt, count):
    """Oracle for the cached loop: argmax over a fresh full pass for every token."""
    rendered = engine.render(prompt)
    ids, images = list(rendered.token_ids), [prompt.images[s.image_index] for s in rendered.image_spans]
    out = []
    for _ in range(count):
        row = engine.logits(ids, images)[-1]
        row[engine.tokenizer.size :] = -torch.inf
        token = int(row.argmax())
        if token in engine.config.eos_token_ids:
            break
        out.append(token)
        ids.append(token)
    return out


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_cached_decoding_equals_full_passes(engine, pictures):
    images = [f for i in range(pictures) for f in engine.encode_image(picture(64, 96, i))]
    prompt = Prompt(user="A fox " + "[[IMG]] and " * pictures + "a castle", images=images)
    expected = greedy_by_logits(engine, prompt, GREEDY.max_new_tokens)
    answer = engine.generate(prompt, GREEDY)
    assert answer.usage.completion_tokens == len(expected)
    stream = engine.tokenizer.stream()
    assert answer.text == "".join(map(stream.push, expected))  # without a character that is cut at the end
    assert answer.usage.image_tokens == sum(i.n_tokens for i in images)


def test_same_seed_same_answer_and_other_seed_another(engine):
    prompt = Prompt(user="Tell me")
    first, second = engine.generate(prompt, LIVELY), engine.generate(prompt, LIVELY)
    other = engine.generate(prompt, SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24, seed=12))
    assert first.text == second.text != other.text


def test_N07_other_users_of_torch_random_do_not_matter(engine):
    prompt = Prompt(user="Tell me")
    before = engine.generate(prompt, LIVELY).text
    torch.manual_seed(1)
    torch.rand(100)
    state = torch.get_rng_state()
    assert engine.generate(prompt, LIVELY).text == before
    assert torch.equal(state, torch.get_rng_state())


def test_a_narrow_model_runs_on_one_thread_and_gives_the_host_its_setting_back(engine):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        engine.generate(Prompt(user="Tell me"), GREEDY, on_token=lambda event: seen.append(torch.get_num_threads()))
        assert set(seen) == {1} and torch.get_num_threads() == 3

        def stop(event):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(Prompt(user="Tell me"), GREEDY, on_token=stop)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_streamed_pieces_make_the_answer(engine):
    events = []
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, on_token=events.append)
    assert "".join(e.text for e in events if not e.thinking) == answer.text
    assert [e.count for e in events] == sorted(e.count for e in events)
    assert events[-1].count == answer.usage.completion_tokens and events[-1].limit == 24


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_stops_within_a_token(engine, after):
    seen = []
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, on_token=seen.append, cancel=lambda: len(seen) >= after)
    assert answer.finish_reason == "cancelled" and answer.usage.completion_tokens <= after + 1
    assert engine.memory()["sequence"] == 0


def test_N01_an_exception_from_cancel_passes_and_leaves_the_engine_usable(engine):
    class Interrupt(BaseException):
        pass

    seen = []

    def cancel():
        if len(seen) >= 3:
            raise Interrupt
        return False

    before = engine.generate(Prompt(user="Tell me"), LIVELY).text
    with pytest.raises(Interrupt):
        engine.generate(Prompt(user="Tell me"), LIVELY, on_token=seen.append, cancel=cancel)
    assert engine.memory()["sequence"] == 0
    assert engine.generate(Prompt(user="Tell me"), LIVELY).text == before


def test_stop_text_ends_the_answer(engine):
    text = engine.generate(Prompt(user="Tell me"), LIVELY).text
    stop = text[3:6]
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24, seed=11, stop=(stop,)))
    assert answer.finish_reason == "stop_string" and answer.text == text[: text.index(stop)]


SCHEMA = {
    "type": "object",
    "properties": {"shot": {"enum": ["close", "medium", "wide"]}, "line": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["shot", "line", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_after_the_thinking(engine, thinking, seed):
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=200, seed=seed, thinking_budget=7)
    answer = engine.generate(Prompt(user="Tell me"), sampling, schema=SCHEMA, thinking=thinking)
    value = json.loads(answer.text)
    assert answer.finish_reason == "stop" and set(value) == {"shot", "line", "n"} and value["shot"] in ("close", "medium", "wide")
    assert bool(answer.thinking) == thinking
    if thinking:
        assert answer.usage.thinking_tokens <= 7 + 2


def test_a_regex_holds(engine):
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, regex=r"(red|blue) [a-z]{2,5}!")
    assert re.fullmatch(r"(red|blue) [a-z]{2,5}!", answer.text)


def test_schema_and_regex_together_are_refused(engine):
    with pytest.raises(GrammarError, match="not both"):
        engine.generate(Prompt(user="x"), GREEDY, schema=SCHEMA, regex="a")


def test_T03_a_budget_spent_thinking_is_said(engine):
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(temperature=1.0, max_new_tokens=5), thinking=True)
    assert answer.text == "" and answer.finish_reason == "length"
    assert "while thinking" in answer.status


def test_a_thinking_budget_closes_the_block(engine):
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(temperature=1.0, max_new_tokens=30, thinking_budget=4), thinking=True)
    assert answer.ended_thinking and answer.usage.thinking_tokens <= 6


def test_a_prompt_longer_than_the_context_is_refused_with_its_size(engine):
    with pytest.raises(PromptError, match="1024"):
        engine.generate(Prompt(user="word " * 3000), GREEDY)


def test_the_context_bounds_the_answer(random_checkpoint):
    small = Engine.load(random_checkpoint, context=48)
    answer = small.generate(Prompt(user="Hi"), SamplingParams(temperature=1.0, max_new_tokens=500))
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens <= 48


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def test_T01_thinking_off_closes_the_block_that_a_template_always_opens(random_checkpoint, tmp_path):
    engine = with_template(random_checkpoint, tmp_path / "copy", TURNS + "<think>\n")
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, thinking=False)
    assert answer.ended_thinking and not answer.thinking and answer.text
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, thinking=False, schema={"type": "boolean"})
    assert answer.text in ("true", "false")


def test_T02_thinking_on_with_a_template_that_opens_no_block_keeps_the_answer(random_checkpoint, tmp_path):
    answer = with_template(random_checkpoint, tmp_path / "copy", TURNS).generate(Prompt(user="Tell me"), LIVELY, thinking=True)
    assert answer.text and not answer.thinking and "while thinking" not in answer.status


def test_T03_an_end_token_inside_the_thinking_ends_only_the_thinking(random_checkpoint):
    engine = Engine.load(random_checkpoint, context=1024)
    head = engine._text.logits
    end, steps = engine.config.eos_token_ids[0], []

    def logits(hidden):
        steps.append(1)
        row = head(hidden)
        if len(steps) == 3:
            row[:, end] = 1e4
        return row

    engine._text.logits = logits
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, thinking=True, regex="yes|no")
    assert answer.thinking and answer.text in ("yes", "no") and answer.finish_reason == "stop"


@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_that_is_whole_at_the_limit_was_not_cut(engine, thinking):
    def ask(limit):
        sampling = SamplingParams(max_new_tokens=limit, thinking_budget=2)
        return engine.generate(Prompt(user="Tell me"), sampling, regex="abc,abc", thinking=thinking)

    whole = ask(200)
    assert whole.text == "abc,abc" and whole.finish_reason == "stop"
    assert ask(whole.usage.completion_tokens).finish_reason == "stop"
    short = ask(whole.usage.completion_tokens - 1)
    assert short.finish_reason == "length" and short.text == "abc,ab"


@pytest.mark.parametrize("limit", range(1, 9))
def test_N05_a_character_cut_by_the_limit_is_left_out(engine, limit):
    events = []
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(max_new_tokens=limit), regex="\U0001f62d{2}", on_token=events.append)
    assert answer.text == "\U0001f62d" * len(answer.text)
    assert "".join(e.text for e in events) == answer.text


def test_an_answer_cut_by_the_context_says_so(random_checkpoint):
    small = Engine.load(random_checkpoint, context=40)
    for thinking in (False, True):
        answer = small.generate(Prompt(user="Hi"), SamplingParams(temperature=0.0, max_new_tokens=500), regex="x{300}", thinking=thinking)
        assert answer.finish_reason == "length" and "context" in answer.status and "max_new_tokens" not in answer.status


def test_kept_prompts_go_before_buffers(engine):
    """What a memory manager takes back first is what only saves time; the answer afterwards is the same."""
    engine.release_caches()
    first = engine.generate(Prompt(user="Tell me"), GREEDY)
    engine.generate(Prompt(user="Tell me more"), GREEDY)
    kept = engine.memory()["prefixes"]
    assert kept == engine.cached_bytes > 0  # in plain PyTorch a sequence ends with its answer
    assert 0 < engine.release_caches(1) < kept  # the older one
    assert engine.generate(Prompt(user="Tell me more"), GREEDY).usage.kept_tokens > 0
    left = engine.cached_bytes
    assert engine.release_caches() == left > 0 and engine.cached_bytes == 0
    again = engine.generate(Prompt(user="Tell me"), GREEDY)
    assert again.usage.kept_tokens == 0 and again.text == first.text


def test_kept_prompts_stay_within_the_budget(random_checkpoint):
    """vram_gb is a hard limit, however many prompts came before."""
    engine = Engine.load(random_checkpoint, context=2048)
    system, kept = "You draw. " * 60, []
    tokens = len(engine.render(Prompt(system=system + "99", user="99")).token_ids) + 2
    budget = max(engine.weight_bytes + engine.working_bytes(tokens), engine._budget.least)
    engine.close()
    engine = Engine.load(random_checkpoint, context=tokens, vram_budget=budget)
    for number in range(10, 70):
        prompt = Prompt(system=system + str(number), user=str(number))
        held = []
        engine.generate(prompt, replace(GREEDY, max_new_tokens=2), on_token=lambda event: held.append(engine.memory()["total"]))
        assert max(held) <= budget and engine.memory()["total"] <= budget
        kept.append(engine.generate(prompt, replace(GREEDY, max_new_tokens=2, seed=1)).usage.kept_tokens)
    assert min(kept) > 0  # the last prompt is kept all the same
    engine.close()
