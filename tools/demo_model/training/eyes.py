"""Extra teaching for the vision tower, thrown away after training.

A language model's loss reaches the tower through a few words an answer, and the eyes open late. So linear heads on the
image tokens name what is drawn, directly: the tokens of each third of a picture the character that stands there, all
tokens the place, the time and the weather.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .looks import LABELS, PERSON_TRAITS, SCENE_TRAITS, THIRDS


class Eyes:
    """`heads`: float32 leaf tensors; `loss` and `right` compare features with `looks.labels`."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.sizes = {name: len(values) + 1 for name, values in PERSON_TRAITS.items()}
        self.scene_sizes = {name: len(values) for name, values in SCENE_TRAITS.items()}
        self.heads = {
            name: torch.zeros(sum(sizes.values()), width, device=device, requires_grad=True)
            for name, sizes in (("person", self.sizes), ("scene", self.scene_sizes))
        }

    def _logits(self, features: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """features [B, rows * columns, D] of square pictures -> (trait, logits [B, tokens, classes]) in the order of the labels."""
        batch, tokens, width = features.shape
        side = round(tokens**0.5)
        features = features.float()
        thirds = features.view(batch, side, THIRDS, side // THIRDS, width).transpose(1, 2).reshape(batch, THIRDS, -1, width)
        people = (thirds @ self.heads["person"].T).split(list(self.sizes.values()), dim=-1)
        scene = (features @ self.heads["scene"].T).split(list(self.scene_sizes.values()), dim=-1)
        named = [(name, logits[:, third]) for third in range(THIRDS) for name, logits in zip(self.sizes, people)]
        return named + list(zip(self.scene_sizes, scene))

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over traits and tokens; labels int64 [B, LABELS]."""
        losses = [
            F.cross_entropy(logits.flatten(0, 1), labels[:, place].repeat_interleave(logits.shape[1]))
            for place, (_, logits) in enumerate(self._logits(features))
        ]
        assert len(losses) == LABELS
        return torch.stack(losses).mean()

    @torch.no_grad()
    def right(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Share of right answers a trait, from the mean of the tokens' logits; person traits where somebody stands."""
        hits: dict[str, list[torch.Tensor]] = {}
        kinds = list(range(0, THIRDS * len(self.sizes), len(self.sizes)))
        for place, (name, logits) in enumerate(self._logits(features)):
            same = logits.mean(1).argmax(-1) == labels[:, place]
            if name in self.sizes:
                same = same[labels[:, kinds[place // len(self.sizes)]] > 0]
            hits.setdefault(name, []).append(same)
        return {name: round(float(torch.cat(parts).float().mean()), 3) for name, parts in hits.items()}
