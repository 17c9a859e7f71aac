"""The tokenizer of the trained demo model, and lessons as token ids. No torch here: worker processes start fast."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from a3b_engine.prompt import Prompt, build_messages
from a3b_engine.script.presets import PRESETS, TEXT_LANGUAGES, job_prompt, system_prompt
from a3b_engine.tokenizer import Tokenizer
from tools.demo_model.world import sample, traits

BPE_SIZE = 2000  # with 26 added tokens 2026 ids; 2048 rows, some of them padding as in the published model
TOKENIZER_SEED = 1 << 40
TOKENIZER_LESSONS = 1200
IMAGE = "<|image_pad|>"


@dataclass(frozen=True)
class Encoded:
    """A lesson as ids: the prompt with its image tokens (the first of them at `start`), and the answer with its end token."""

    prompt: list[int]
    start: int
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def training_texts(lessons: int = TOKENIZER_LESSONS) -> Iterator[str]:
    """What the tokenizer is trained on: system texts of all presets, and the requests and answers of some lessons."""
    asked = [system_prompt(preset, text_language=language) for preset in PRESETS for language in TEXT_LANGUAGES]
    asked += [job_prompt(job, text_language=language) for job in ("describe", "tags") for language in TEXT_LANGUAGES]
    yield from asked
    for seed in range(TOKENIZER_SEED, TOKENIZER_SEED + lessons):
        lesson = sample(seed)
        yield lesson.user
        yield lesson.answer
    for text in asked:  # often enough that their words become tokens
        yield from [text] * (lessons // 20)


def chat_text(system: str, user: str) -> str:
    """The chat template's text for a request with one picture, up to the answer, thinking off."""
    messages = build_messages(Prompt(user=user, system=system, images=(None,)))
    text = ""
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            picture = f"<|vision_start|>{IMAGE}<|vision_end|>"
            content = "".join(part["text"] if part["type"] == "text" else picture for part in content)
        text += f"<|im_start|>{message['role']}\n{content.strip()}<|im_end|>\n"
    return text + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Encoder:
    """Lessons to ids with the tokenizer of a folder."""

    def __init__(self, folder: Path, image_tokens: int) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.image_tokens = image_tokens
        self.image_id = self.tokenizer.token_to_id(IMAGE)
        self.end_id = self.tokenizer.token_to_id("<|im_end|>")
        self.pad_id = self.tokenizer.token_to_id("<|endoftext|>")
        self._known = lru_cache(maxsize=1 << 14)(self.tokenizer.encode_plain)  # system texts come again and again

    def encode(self, lesson: Any) -> Encoded:
        prompt: list[int] = []
        start = -1
        for piece in self.tokenizer.split(chat_text(lesson.system, lesson.user)):
            if piece == self.image_id:
                start = len(prompt)
                prompt += [piece] * self.image_tokens
            elif isinstance(piece, int):
                prompt.append(piece)
            else:
                prompt += self._known(piece)
        return Encoded(prompt, start, [*self.tokenizer.encode_plain(lesson.answer), self.end_id])


def trait_weights(tokenizer: Tokenizer, vocab_size: int, weight: float) -> np.ndarray:
    """float32 [vocab_size]: `weight` for tokens that name something drawn, or begin its name; else 1."""
    table = np.ones(vocab_size, dtype=np.float32)
    groups = ("COLOURS", "KINDS", "GARMENTS", "EXPRESSIONS", "POSITIONS", "PROPS", "PLACES", "TIMES", "WEATHERS")
    drawn = {traits.word(name.lower(), key, language) for name in groups for key in getattr(traits, name) for language in traits.LANGUAGES}
    for phrases in (traits.BACKGROUNDS, traits.LIGHTS, traits.AIRS, traits.FACES):
        drawn |= {word for phrase in phrases.values() for word in re.findall(r"\w{4,}", phrase)} - {"with"}
    for spelling in {spelling for word in drawn for spelling in (word, f" {word}")}:
        token = tokenizer.encode_plain(spelling)[0]
        text = tokenizer.decode([token]).strip()
        if text and "\ufffd" not in text and (len(text) > 2 or not text.isascii()):
            table[token] = weight
    return table
