"""The figures: each asks the real engine, through `encode_image` and `generate`, and reads the clock outside."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from ..engine import Engine
from ..prompt import Prompt
from ..runtime.answer import Answer
from ..sampling import SamplingParams
from .routing import MODEL
from .words import text_of

MAX_ANSWERS = 24  # of a real model, which may end its answers early
WARM_UP_TOKENS = 8
SPARE_TOKENS = 64  # of context beyond prompt and answer


@dataclass(frozen=True)
class BenchSettings:
    """What is measured. Lengths in tokens; repeat: runs of each figure, of which the median is given.

    new: tokens of each decode run. peak_context: where peak memory is measured. text_tokens, system_tokens: of the prompts
    with a picture. grammar_tokens: least length of the constrained run. copy_bytes: of the copy that bandwidth is
    compared with. profile_steps: decode steps in the profile. routing: see `routing`. settle: tokens written first where the
    experts on the device have to become those that the routing asks for.
    """

    contexts: tuple[int, ...] = (512, 8192, 32768)
    prompt: int = 2048
    new: int = 128
    repeat: int = 3
    seed: int = 0
    image: bool = True
    grammar: bool = True
    profile: bool = True
    peak_context: int = 8192
    picture_px: int = 384
    text_tokens: int = 64
    system_tokens: int = 256
    grammar_tokens: int = 400
    panels: int = 6
    rounds: int = 4
    copy_bytes: int = 1 << 30
    profile_steps: int = 16
    routing: str = MODEL
    settle: int = 256


class Subject:
    """An engine under measurement: prompts of exact length for it, and timed runs."""

    def __init__(self, engine: Engine, settings: BenchSettings) -> None:
        self.engine, self.settings = engine, settings
        self._frame = len(engine.render(Prompt(user="7")).token_ids) - 1
        self._drawn = 0

    def prompt(self, tokens: int, seed: int) -> Prompt:
        """A prompt of `tokens` tokens, the template's own included, and at least one of its text."""
        return Prompt(user=self.text(max(1, tokens - self._frame), seed))

    def text(self, tokens: int, seed: int) -> str:
        return text_of(lambda text: len(self.engine.tokenizer.encode_plain(text)), tokens, self.settings.seed * 1_000_003 + seed)

    def picture(self) -> np.ndarray:
        """A picture unlike every one before it, uint8 [px, px, 3]."""
        self._drawn += 1
        side = self.settings.picture_px
        return np.random.default_rng([self.settings.seed, self._drawn]).integers(0, 256, (side, side, 3), dtype=np.uint8)

    def run(
        self, prompt: Prompt, new: int, seed: int, schema: dict | None = None, on_token: Callable[[Any], None] | None = None, began: float | None = None
    ) -> tuple[Answer, float]:
        """An answer, and the seconds from `began` (by default now) to its first token."""
        first: float | None = None
        began = time.perf_counter() if began is None else began

        def heard(event: Any) -> None:
            nonlocal first
            first = first or time.perf_counter()
            if on_token is not None:
                on_token(event)

        answer = self.engine.generate(prompt, SamplingParams(max_new_tokens=new, seed=seed), schema=schema, on_token=heard)
        return answer, (first or time.perf_counter()) - began

    # Decode

    def decode(self, prompt: Prompt, new: int, schema: dict | None = None, on_token: Callable[[Any], None] | None = None) -> dict[str, Any]:
        """Tokens a second after the first one, sampling and everything between tokens included: median of the runs.

        A run is one answer of `new` tokens. Where answers end by themselves it takes as many as make `new` tokens.
        """
        settings = self.settings
        self.run(prompt, WARM_UP_TOKENS, settings.seed, schema, on_token)
        rates, answers, counted, length = [], 0, 0, 0
        for repeat in range(settings.repeat):
            steps = seconds = 0
            for attempt in range(MAX_ANSWERS):
                answer, _ = self.run(prompt, new, settings.seed + 1000 * repeat + attempt + 1, schema)
                answers += 1
                length = answer.usage.prompt_tokens
                steps += max(0, answer.usage.completion_tokens - 1)
                seconds += answer.timings.decode_seconds if answer.usage.completion_tokens > 1 else 0.0
                if steps >= new - 1:
                    break
            counted += steps
            rates.append(steps / seconds if seconds > 0 else 0.0)
        return {"prompt_tokens": length, "tokens_per_s": median(rates, 2), "runs": rounded(rates, 2), "tokens": counted, "answers": answers}

    # Prefill and first tokens

    def prefill(self, tokens: int) -> dict[str, Any]:
        """A prompt never seen before, up to its first token, which is drawn too."""
        settings = self.settings
        seconds, length, kept_tokens = [], 0, 0
        for repeat in range(settings.repeat + 1):
            answer, _ = self.run(self.prompt(tokens, 1_000_000 + tokens * 10 + repeat), 1, settings.seed)
            length, kept_tokens = answer.usage.prompt_tokens, max(kept_tokens, answer.usage.kept_tokens)
            seconds.append(answer.timings.time_to_first_token)
        kept = seconds[1:]
        rate = length / statistics.median(kept)
        return {
            "prompt_tokens": length, "kept_tokens": kept_tokens, "tokens_per_s": round(rate), "first_token_ms": median(kept, 2, 1e3),
            "runs_ms": rounded(kept, 2, 1e3), "first_run_ms": round(seconds[0] * 1e3, 2),
        }  # fmt: skip

    def first_picture(self) -> dict[str, Any]:
        """From a picture never seen before and a text to the first token: `encode_image`, then `generate`."""
        seconds, encoding, length = [], [], 0
        for repeat in range(self.settings.repeat + 1):
            picture, text = self.picture(), self.text(self.settings.text_tokens, 2_000_000 + repeat)
            began = time.perf_counter()
            features = self.engine.encode_image(picture, self.settings.picture_px)
            encoding.append(time.perf_counter() - began)
            answer, first = self.run(Prompt(user=text, images=features), 2, self.settings.seed, began=began)
            seconds.append(first)
            length = answer.usage.prompt_tokens
        return {
            "prompt_tokens": length, "ms": median(seconds[1:], 2, 1e3), "runs_ms": rounded(seconds[1:], 2, 1e3), "encode_ms": median(encoding[1:], 2, 1e3)
        }  # fmt: skip

    def first_again(self) -> dict[str, Any]:
        """First token of a prompt with a long beginning (system text, picture): unseen, with its last text changed, and
        with nothing but the seed changed."""
        settings = self.settings
        images = self.engine.encode_image(self.picture(), settings.picture_px) if settings.image and self.engine.has_vision else []
        number = 3_000_000

        def asked(change: str) -> dict[str, Any]:
            nonlocal prompt, number
            seconds, length, kept = [], 0, 0
            for repeat in range(settings.repeat + 1):
                number += 1
                if change == "all":
                    prompt = Prompt(system=self.text(settings.system_tokens, number), user=self.text(settings.text_tokens, number + 1), images=images)
                elif change == "text":
                    prompt = replace(prompt, user=self.text(settings.text_tokens, number + 1))
                answer, first = self.run(prompt, 2, settings.seed + repeat + 1)
                seconds.append(first)
                length, kept = answer.usage.prompt_tokens, answer.usage.kept_tokens
            return {"prompt_tokens": length, "kept_tokens": kept, "ms": median(seconds[1:], 2, 1e3), "runs_ms": rounded(seconds[1:], 2, 1e3)}

        prompt = Prompt(user="")
        return {"unseen": asked("all"), "text_changed": asked("text"), "seed_changed": asked("seed")}

    # Grammar

    def grammar(self, tokens: int) -> dict[str, Any]:
        """Decode under the JSON schema of the comic script, beside the same without."""
        from ..script.grammar import comic_json_schema

        settings = self.settings
        schema, prompt = comic_json_schema(settings.panels, settings.rounds), self.prompt(tokens, 4_000_000)
        _, first_use = self.run(prompt, WARM_UP_TOKENS, settings.seed, schema)
        _, first = self.run(prompt, WARM_UP_TOKENS, settings.seed, schema)
        constrained = self.decode(prompt, settings.grammar_tokens + 1, schema)
        free = self.decode(prompt, settings.grammar_tokens + 1)
        share = constrained["tokens_per_s"] / free["tokens_per_s"] if free["tokens_per_s"] else None
        return {
            **constrained,
            "free_tokens_per_s": free["tokens_per_s"],
            "share_of_free": None if share is None else round(share, 3),
            "first_token_ms": round(first * 1e3, 2),
            "first_use_ms": round(first_use * 1e3, 1),
        }


def median(values: list[float], digits: int, factor: float = 1.0) -> float:
    return round(statistics.median(values) * factor, digits)


def rounded(values: list[float], digits: int, factor: float = 1.0) -> list[float]:
    return [round(value * factor, digits) for value in values]
