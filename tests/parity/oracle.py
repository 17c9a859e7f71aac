"""The reference: transformers' Qwen3.5 MoE in float32 on the CPU, wrapped to take what the engine takes.

Eager attention and the eager loop over experts are asked for, so that nothing optional (flash-linear-attention,
causal-conv1d, hub kernels, grouped matmul) stands between the formulas and the numbers.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from small_models import FRAMES, MERGE, PATCH, model_config, random_tensors


class Oracle:
    """One small model. `tensors` are published names with fused experts; default: the model's own random weights."""

    def __init__(self, name: str, tensors: dict[str, torch.Tensor] | None = None):
        from transformers import (
            Qwen3_5MoeConfig,
            Qwen3_5MoeForCausalLM,
            Qwen3_5MoeForConditionalGeneration,
            Qwen3_5MoeTextConfig,
        )

        self.config = model_config(name)
        self.has_vision = "vision_config" in self.config
        config_class, model_class = (
            (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration) if self.has_vision
            else (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM))
        config = config_class.from_dict(self.config)
        with torch.random.fork_rng(devices=[]):
            self.model = model_class._from_config(config, attn_implementation="eager",
                                                  experts_implementation="eager", dtype=torch.float32)
        tensors = random_tensors(name) if tensors is None else tensors
        if self.config["tie_word_embeddings"]:
            embedding = "model.language_model.embed_tokens.weight" if self.has_vision else "model.embed_tokens.weight"
            tensors = {**tensors, "lm_head.weight": tensors[embedding]}
        self.model.load_state_dict(tensors, strict=True)
        self.model.eval().requires_grad_(False)

    def save(self, folder: Path, number_format: str) -> None:
        """A checkpoint as transformers writes it: one tensor per expert, shards with an index, its own config.json."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[number_format]
        copy.deepcopy(self.model).to(dtype).save_pretrained(folder, max_shard_size="1MB")

    def picture_inputs(self, pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """`pixel_values` and `image_grid_thw` of uint8 [H, W, 3] pictures by the published image processor."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil(
            patch_size=PATCH, temporal_patch_size=FRAMES, merge_size=MERGE, image_mean=[0.5] * 3, image_std=[0.5] * 3,
            size={"shortest_edge": 1, "longest_edge": 16777216})
        batch = processor(images=[p.numpy() for p in pictures], return_tensors="pt", input_data_format="channels_last")
        return {"pixel_values": batch["pixel_values"], "image_grid_thw": batch["image_grid_thw"]}

    def _inputs(self, ids: list[int], pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        input_ids = torch.tensor([ids])
        if self.has_vision:
            # The reference keeps the rope delta of its last picture prompt on the module and would apply it here.
            self.model.model.rope_deltas = None
        if not pictures:
            return {"input_ids": input_ids}
        return {"input_ids": input_ids, "mm_token_type_ids": self.token_types(input_ids),
                **self.picture_inputs(pictures)}

    def token_types(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (input_ids == self.config["image_token_id"]).int()

    @torch.no_grad()
    def logits(self, ids: list[int], pictures: list[torch.Tensor] = ()) -> torch.Tensor:
        """float32 [T, vocab]."""
        return self.model(**self._inputs(ids, list(pictures)), use_cache=False).logits[0]

    @torch.no_grad()
    def greedy(self, ids: list[int], pictures: list[torch.Tensor] = (), *, steps: int, allowed: int,
               stop: tuple[int, ...] = ()) -> tuple[list[int], float]:
        """`steps` tokens by argmax over ids < `allowed`, one at a time through the reference's own cache.

        Returns the tokens and the smallest lead of a chosen token over the runner-up (logit units).
        """
        output = self.model(**self._inputs(ids, list(pictures)), use_cache=True)
        tokens: list[int] = []
        lead = float("inf")
        for _ in range(steps):
            best = output.logits[0, -1, :allowed].topk(2)
            lead = min(lead, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            if tokens[-1] in stop:
                break
            output = self.model(input_ids=torch.tensor([tokens[-1:]]), cache=output.cache, use_cache=True)
        return tokens, lead

    @torch.no_grad()
    def vision(self, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
        """Merged features [n_tokens, hidden] of each picture."""
        inputs = self.picture_inputs(pictures)
        return list(self.model.model.get_image_features(**inputs, return_dict=True).pooler_output)

    def positions(self, ids: list[int], grids: list[tuple[int, int]]) -> tuple[torch.Tensor, int]:
        """M-RoPE positions int64 [3, T] (T, H, W) and the rope delta; `grids` are merged (rows, columns)."""
        input_ids = torch.tensor([ids])
        thw = torch.tensor([[1, rows * MERGE, columns * MERGE] for rows, columns in grids]) if grids else None
        positions, delta = self.model.model.get_rope_index(
            input_ids, mm_token_type_ids=self.token_types(input_ids), image_grid_thw=thw)
        return positions[:, 0], int(delta[0, 0])

    @torch.no_grad()
    def router_lead(self, ids: list[int], pictures: list[torch.Tensor] = ()) -> float:
        """Smallest gap, over all tokens and layers, between the last chosen expert's logit and the first left out."""
        output = self.model(**self._inputs(ids, list(pictures)), use_cache=False, output_router_logits=True)
        text = self.config.get("text_config", self.config)
        top_k = text["num_experts_per_tok"]
        return min(float((ranked[:, top_k - 1] - ranked[:, top_k]).min())
                   for ranked in (layer.sort(-1, descending=True).values for layer in output.router_logits))
