"""One training: weights, optimizer, schedule; one step at a time."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, ContextManager

import torch
import torch.nn.functional as F

from a3b_engine.config import ModelConfig

from .eyes import Eyes
from .feeder import Batch
from .network import Network, Trace, initial_weights
from .recipe import Recipe

_NO_DECAY = ("norm.weight", ".bias", "A_log", "dt_bias", "conv1d.weight", "embed_tokens.weight", "pos_embed.weight")


class Trainer:
    """`step(batch, progress)` trains on one batch; `progress` runs from 0 to 1 over the planned time."""

    def __init__(self, config: ModelConfig, recipe: Recipe, device: torch.device, weights: dict[str, torch.Tensor] | None = None) -> None:
        self.recipe, self.device = recipe, device
        self.network = Network(config, weights or initial_weights(config, recipe.seed), device)
        self.eyes = Eyes(config.vision.out_hidden_size, device)
        self.steps = self.started_at = 0  # warming up begins anew where the optimizer or the kind of lessons does
        named = self.network.weights
        decayed = [name for name, weight in named.items() if weight.dim() > 1 and not name.endswith(_NO_DECAY) and ".norm" not in name]
        others = [name for name in named if name not in set(decayed)]
        groups = [
            {"params": [named[name] for name in decayed], "weight_decay": recipe.weight_decay},
            {"params": [*(named[name] for name in others), *self.eyes.heads.values()], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=True)

    def autocast(self) -> ContextManager:
        """bfloat16 products on a GPU; float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean cross-entropy of the answers' tokens, weighted sum of the other losses). A batch without words: that of
        the eyes, and nothing."""
        if batch.ids is None:
            entropy = self.eyes.loss(self._features(batch), batch.labels)
            return entropy, torch.zeros_like(entropy)
        valid = (torch.arange(batch.ids.shape[1], device=self.device) < batch.lengths[:, None]).float()
        trace = Trace(valid)
        with self.autocast():
            hidden = self.network.forward(batch.ids, batch.pictures, batch.starts, batch.positions, trace)
        # Outside of autocast: bfloat16 is too coarse for the scores of tokens.
        logits = self.network.text.logits(hidden.flatten(0, 1).index_select(0, batch.where))
        entropy = F.cross_entropy(logits, batch.targets, reduction="none")
        others = self.recipe.balance * torch.stack(trace.balance).mean() + self.recipe.eyes * self.eyes.loss(trace.features, batch.labels)
        return (entropy * batch.weights).sum() / batch.weights.sum(), others

    def _features(self, batch: Batch) -> torch.Tensor:
        with self.autocast():
            return self.network.vision.encode_pictures(batch.pictures)[0]

    @torch.no_grad()
    def seen(self, batch: Batch) -> dict[str, float]:
        """Share of right answers of the eyes' heads, a trait."""
        return self.eyes.right(self._features(batch), batch.labels)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Gradients of one batch; returns the cross-entropy (still on the device)."""
        entropy, others = self.loss(batch)
        (entropy + others).backward()
        return entropy.detach()

    def warm_up(self) -> None:
        """Begin the rise of the learning rate anew: other lessons, other gradients."""
        self.started_at = self.steps

    def update(self, progress: float) -> None:
        """Apply the gradients; a step whose gradients are not finite is left out."""
        recipe = self.recipe
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, progress))
        warm = min(1.0, (self.steps - self.started_at + 1) / recipe.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate * warm * (recipe.last_rate + (1 - recipe.last_rate) * cosine)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters(), recipe.clip)
        # The fused optimizer skips on the device; asking here would make the host wait for the step.
        self.optimizer.found_inf = (~norm.isfinite()).float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def _parameters(self) -> list[torch.Tensor]:
        return [*self.network.weights.values(), *self.eyes.heads.values()]

    def step(self, batch: Batch, progress: float) -> torch.Tensor:
        entropy = self.backward(batch)
        self.update(progress)
        return entropy

    def state(self) -> dict[str, Any]:
        weights = {name: weight.detach() for name, weight in self.network.weights.items()}
        heads = {name: head.detach() for name, head in self.eyes.heads.items()}
        return {"weights": weights, "heads": heads, "optimizer": self.optimizer.state_dict(), "steps": self.steps, "started_at": self.started_at}

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in self.network.weights.items():
                weight.copy_(state["weights"][name])
            for name, head in self.eyes.heads.items():
                head.copy_(state["heads"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.started_at = state["steps"], state["started_at"]
