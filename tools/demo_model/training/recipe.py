"""Sizes, seeds and settings of the trained demo model. Everything that `run.json` records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.demo_model.make_random import model_config

SIDE = 384  # pixels of a picture's side


@dataclass(frozen=True)
class Phase:
    """A part of the training: `until` which share of its time, with `kinds` of lessons in these shares (none: pictures
    without words, for the eyes alone)."""

    name: str
    until: float
    kinds: dict[str, float]


# The eyes come first: taught all at once, the language learns to guess before the eyes can tell it anything.
PHASES = (
    Phase("eyes", 0.14, {}),
    Phase("pictures", 0.30, {"inventory": 0.4, "question": 0.35, "describe": 0.15, "tags": 0.1}),
    Phase("scripts", 1.0, {"script_full": 0.36, "script_short": 0.24, "question": 0.12, "inventory": 0.12, "describe": 0.09, "tags": 0.07}),
)


@dataclass(frozen=True)
class Recipe:
    """How to train. Times are in minutes of training, lengths in tokens."""

    seed: int = 1  # of the weights, and the first of the lessons
    rate: float = 1.5e-3  # highest learning rate
    warmup_steps: int = 200
    last_rate: float = 0.01  # of the highest, at the end of the cosine
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.97)
    clip: float = 1.0
    balance: float = 0.01  # weight of the load-balancing loss
    eyes: float = 0.5  # weight of the eyes' own loss beside that of words
    trait_weight: float = 2.0  # weight of tokens that name something drawn
    group: int = 384  # lessons that a worker sorts by length
    batch_lessons: int = 144  # most lessons of a batch
    batch_pictures: int = 192  # pictures of a batch without words
    batch_tokens: int = 65536  # most tokens of a batch, padding included
    phases: tuple[Phase, ...] = PHASES

    def phase(self, progress: float) -> Phase:
        """The phase at a share of the time."""
        return next((phase for phase in self.phases if progress < phase.until), self.phases[-1])


def demo_config(ids: dict[str, int], *, small: bool = False) -> dict[str, Any]:
    """`config.json` of the trained model; `small` gives one for tests on a CPU."""
    config = model_config(ids)
    text, vision = config["text_config"], config["vision_config"]
    layers, hidden, width = (4, 128, 96) if small else (8, 256, 256)
    text.update(
        vocab_size=-(-(max(ids.values()) + 2) // 128) * 128,
        hidden_size=hidden,
        num_hidden_layers=layers,
        layer_types=["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)],
        num_experts=4 if small else 16,
        num_experts_per_tok=2 if small else 4,
        max_position_embeddings=8192,
    )
    vision.update(depth=2 if small else 6, hidden_size=width, num_heads=4, intermediate_size=3 * width, out_hidden_size=hidden)
    return config
