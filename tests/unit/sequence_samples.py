"""A small random language model without an engine around it, prompts for it, and what running one gives."""

from dataclasses import dataclass

import numpy as np
import torch

from a3b_engine.checkpoint.index import CheckpointIndex
from a3b_engine.checkpoint.plan import build_plan
from a3b_engine.checkpoint.reader import load_weights
from a3b_engine.config import ModelConfig
from a3b_engine.image import ImageFeatures
from a3b_engine.model.text import TextModel
from a3b_engine.runtime.cache import SequenceState, snapshot_bytes
from a3b_engine.runtime.forward import forward_chunks, locate_images
from a3b_engine.runtime.prefix import PrefixStore, cut_points, prefill

CPU = torch.device("cpu")
LIMIT = 1024
PLENTY = 1 << 30
CHUNK = 48  # so that every part of the prompts of the tests has several chunks


@dataclass(frozen=True)
class Sample:
    """A language model and its configuration."""

    config: ModelConfig
    model: TextModel
    dtype: torch.dtype

    @classmethod
    def load(cls, folder, dtype):
        config = ModelConfig.from_folder(folder)
        weights = load_weights(build_plan(CheckpointIndex.open(folder), config), CPU, dtype, dequantize=True)
        return cls(config, TextModel(config.text, weights), dtype)

    def state(self, capacity=None, limit=LIMIT):
        return SequenceState(self.config.text, limit, CPU, self.dtype, capacity)

    def picture(self, seed, rows=8, columns=8):
        """Made-up features of a picture of rows x columns tokens."""
        features = torch.randn(rows * columns, self.config.text.hidden_size, generator=torch.Generator().manual_seed(seed))
        return ImageFeatures(features, (rows, columns), np.zeros((rows * 32, columns * 32, 3), np.uint8), "made up")

    def ids(self, length, seed):
        """Ordinary tokens, none of which begins or ends anything."""
        return torch.randint(0, 1700, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    def prompt(self, system, user, pictures=(), between=()):
        """Token ids of a system turn, pictures with `between` after each, and a user text; and the end of the system turn."""
        config = self.config
        ids = [*system, config.eos_token_ids[0]] if system else []
        system_end = len(ids)
        for number, picture in enumerate(pictures):
            ids += [config.vision_start_token_id, *[config.image_token_id] * picture.n_tokens, config.vision_end_token_id]
            ids += between if number + 1 < len(pictures) else []
        return ids + list(user), system_end

    def model_steps(self, state, ids, images=None, **options):
        """Hidden states chunk by chunk."""
        with torch.no_grad():
            yield from forward_chunks(self.model, self.config, state, ids, images, **options)

    def feed(self, state, ids, images=None, **options):
        """Hidden states of all of `ids` that are run, [T, D]."""
        return torch.cat(list(self.model_steps(state, ids, images, **options)))

    @torch.no_grad()
    def go_on(self, state, hidden, count=6):
        """Greedy tokens after `hidden` [1, D], and the logits [count, vocab] they were taken from."""
        tokens, logits = [], []
        for _ in range(count):
            logits.append(self.model.logits(hidden))
            tokens.append(int(logits[-1].argmax()))
            (hidden,) = forward_chunks(self.model, self.config, state, [tokens[-1]])
        return tokens, torch.cat(logits)


def same(one, other):
    """Equal bit by bit: 0.0 is not -0.0 here, and what is not a number equals itself."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def kept_bytes(sample, tokens):
    """Of a kept state after `tokens` tokens."""
    return snapshot_bytes(sample.config.text, tokens, sample.dtype) + sample.config.text.hidden_size * sample.dtype.itemsize


class Runs:
    """Queue runs on one state and one store, each compared with computing everything again."""

    def __init__(self, sample, limit_bytes=PLENTY, capacity=None, chunk_size=CHUNK):
        self.sample, self.chunk_size = sample, chunk_size
        self.store, self.state = PrefixStore(limit_bytes), sample.state(capacity)

    def run(self, prompt, pictures=()):
        """Run a prompt, check it against a run without anything kept, and return how many tokens were reused."""
        (ids, system_end), sample = prompt, self.sample
        hidden, reused = self.prefill(prompt, pictures)
        tokens, logits = sample.go_on(self.state, hidden)
        places = locate_images(ids, pictures, sample.config.image_token_id)
        cuts = cut_points(ids, places, system_end, sample.config.vision_end_token_id)
        state = sample.state()
        expected = sample.feed(state, ids, pictures, cuts=cuts, chunk_size=self.chunk_size)[-1:]
        assert same(hidden, expected)
        expected_tokens, expected_logits = sample.go_on(state, expected)
        assert tokens == expected_tokens and same(logits, expected_logits)
        assert (self.state.length, self.state.next_position) == (state.length, state.next_position)
        return reused

    @torch.no_grad()
    def prefill(self, prompt, pictures=(), before_chunk=lambda: None):
        return prefill(
            self.sample.model, self.sample.config, self.state, self.store, prompt[0], pictures,
            system_end=prompt[1], chunk_size=self.chunk_size, before_chunk=before_chunk,
        )  # fmt: skip
