"""Greedy decoding token by token against the reference's own cached decoding."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from compare import encode
from small_models import ALL, TOKENIZER_SIZE, WITH_VISION, token_id
from small_prompts import picture, random_ids, with_images

STEPS = 64
ENDS = (token_id("<|im_end|>"), token_id("<|endoftext|>"))
CASES = [(name, pictures) for name in ALL for pictures in ((0, 1, 2) if name in WITH_VISION else (0,))]


class Recorder:
    """The engine's tokenizer, keeping the ids that the decode loop hands over for display."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def stream(self, *args, **kwargs):
        inner, ids = self._tokenizer.stream(*args, **kwargs), self.ids

        class Stream:
            def push(self, token: int) -> str:
                ids.append(token)
                return inner.push(token)

            def flush(self) -> str:
                return inner.flush()

        return Stream()


@torch.inference_mode()
def greedy(engine, ids: list[int], images: list | None, steps: int) -> tuple[list[int], str]:
    """Tokens of the engine's decode loop and why it ended."""
    from a3b_engine.sampling import SamplingParams

    tokenizer, recorder = engine.tokenizer, Recorder(engine.tokenizer)
    engine.tokenizer = recorder
    try:
        answer = engine._write(ids, images or [], SamplingParams(max_new_tokens=steps, temperature=0.0), thinking=False)
    finally:
        engine.tokenizer = tokenizer
    assert answer.usage.completion_tokens == len(recorder.ids)
    return recorder.ids, answer.finish_reason


def build(name: str, pictures: int, attempt: int) -> tuple[list[int], list[torch.Tensor]]:
    shapes = [(64, 64), (32, 128)][:pictures]
    drawn = [picture(*shape, seed=100 * attempt + index) for index, shape in enumerate(shapes)]
    parts: list = [random_ids(9, name, "greedy", attempt)]
    for index, one in enumerate(drawn):
        parts += [one, random_ids(5 + index, name, "between", attempt)]
    return with_images(parts), drawn


def prompt_that(oracle, name: str, pictures: int, *, wanted: Callable[[list[int]], bool]):
    """The first prompt whose reference answer is as wanted, and never decided by rounding."""
    for attempt in range(60):
        ids, drawn = build(name, pictures, attempt)
        tokens, lead = oracle.greedy(ids, drawn, steps=STEPS, allowed=TOKENIZER_SIZE, stop=ENDS)
        if wanted(tokens) and lead > 1e-3:
            return ids, drawn, tokens
    raise AssertionError(f"{name}: no prompt with such an answer within {STEPS} tokens")


def goes_on(tokens: list[int]) -> bool:
    return tokens[-1] not in ENDS


@pytest.mark.parametrize(("name", "pictures"), CASES)
def test_64_greedy_tokens_equal_the_reference(models, differences, name, pictures):
    ids, drawn, expected = prompt_that(models.oracle(name), name, pictures, wanted=goes_on)
    engine = models.engine(name)
    tokens, reason = greedy(engine, ids, encode(engine, drawn), STEPS)
    wrong = sum(ours != theirs for ours, theirs in zip(tokens, expected)) + abs(len(tokens) - len(expected))
    differences.note("greedy tokens that differ, of 64", wrong, f"{name}, {pictures} pictures", 0)
    assert tokens == expected and len(tokens) == STEPS
    assert reason == "length"


def test_an_image_token_in_an_answer_is_like_any_other(models):
    """A random model may write the placeholder of pictures; the reference then embeds it like text and goes on."""
    name = "base"
    pad = token_id("<|image_pad|>")
    ids, drawn, expected = prompt_that(models.oracle(name), name, 1,
                                       wanted=lambda tokens: pad in tokens[:-1] and goes_on(tokens))
    engine = models.engine(name)
    tokens, _ = greedy(engine, ids, encode(engine, drawn), STEPS)
    assert tokens == expected


def test_the_answers_end_where_the_reference_ends(models):
    """An end token stops the loop, is not part of the answer, and both end tokens of the configuration do it."""
    name = "base"
    ids, drawn, expected = prompt_that(models.oracle(name), name, 1, wanted=lambda tokens: not goes_on(tokens))
    engine = models.engine(name)
    assert set(engine.config.eos_token_ids) == set(ENDS)
    tokens, reason = greedy(engine, ids, encode(engine, drawn), STEPS)
    assert tokens == expected[:-1]
    assert reason == "stop"


@pytest.mark.parametrize("name", ("base", "published_heads"))
def test_generate_gives_the_reference_text(models, name):
    """The public path: prompt, template, pictures, sampling, decoding to text."""
    from a3b_engine import Prompt, SamplingParams

    engine, oracle = models.engine(name), models.oracle(name)
    drawn = [picture(64, 64, seed=7), picture(32, 128, seed=8)]
    prompt = Prompt(system="Be brief.", user="Compare [[IMG]] with [[IMG]], please.", images=encode(engine, drawn))
    ids = engine.render(prompt).token_ids
    tokens, lead = oracle.greedy(ids, drawn, steps=48, allowed=TOKENIZER_SIZE, stop=ENDS)
    assert lead > 1e-4
    answer = engine.generate(prompt, SamplingParams(max_new_tokens=48, temperature=0.0))
    assert answer.text == engine.tokenizer.decode([token for token in tokens if token not in ENDS])
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.image_tokens == 8
