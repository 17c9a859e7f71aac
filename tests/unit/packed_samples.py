"""The 4-bit samples of tests/data/packed, and whole tiny checkpoints made from the same packings."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_samples import official_weights, tiny_config, write_raw
from safetensors import safe_open

from a3b_engine.checkpoint.names import expected_tensors
from a3b_engine.config import ModelConfig

FOLDER = Path(__file__).resolve().parents[1] / "data" / "packed"

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
CT_NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
CT_INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
GPTQ_V1 = {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq"}
GPTQ_V2 = {**GPTQ_V1, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
BY_GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}

# sample: what its config.json says
DECLARED = {
    "modelopt_nvfp4": MODELOPT,
    "ct_nvfp4": CT_NVFP4,
    "ct_int4_sym_g32": CT_INT4,
    "ct_int4_asym_g32": CT_INT4,
    "ct_int4_sym_g64": CT_INT4,
    "ct_int4_asym_g128": CT_INT4,
    "ct_int4_sym_channel": CT_INT4,
    "ct_int4_asym_channel": CT_INT4,
    "gptqmodel_v1_sym_g32": {**GPTQ_V1, "sym": True},
    "gptqmodel_v2_sym_g128": {**GPTQ_V2, "sym": True},
    "gptqmodel_v2_asym_g32": GPTQ_V2,
    "gptqmodel_v1_asym_g32": {**GPTQ_V1, **BY_GPTQMODEL},
    "autogptq_v1_asym_g64": GPTQ_V1,
    "autoawq_g32": AWQ,
    "autoawq_g128": AWQ,
}


def sample(name: str) -> dict[str, torch.Tensor]:
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def stored_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("expected")}


Q = "model.language_model.layers.1.self_attn.q_proj"


def one_module(folder, parts, declared, shape=None, module=Q):
    """A checkpoint whose `module`, of `shape` [N, K], is stored as `parts`."""
    rows, columns = shape or (64, 64)
    config = tiny_config(hidden_size=columns, num_attention_heads=1, head_dim=rows // 2)
    config["vision_config"]["out_hidden_size"] = columns
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 1]
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 12 / rows
    tensors = official_weights(config)
    del tensors[f"{module}.weight"]
    tensors.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
    return write_raw(folder, tensors, {**config, "quantization_config": declared})


# Packing whole matrices: written from the descriptions of the formats, apart from the engine's code.


def packed(scheme: str, rows: int, columns: int, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of `scheme` for a weight [rows, columns] in groups of 16 (NVFP4) or 32, and the float32 weight."""
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    group = 16 if scheme.startswith("nvfp4") else 32
    groups = columns // group
    if scheme.startswith("nvfp4"):
        scale = (torch.rand(rows, groups, generator=generator) + 0.5).to(torch.float8_e4m3fn)
        whole = torch.rand((), generator=generator) + 0.5
        number = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        if scheme == "nvfp4_ct":
            parts = {"weight_packed": pairs, "weight_scale": scale, "weight_global_scale": whole.reshape(1), "input_global_scale": whole.reshape(1)}
            factors = scale.float() / whole
        else:
            parts = {"weight": pairs, "weight_scale": scale, "weight_scale_2": whole, "input_scale": whole}
            factors = scale.float() * whole
        return parts, number * factors.repeat_interleave(group, 1)
    scale = ((torch.rand(rows, groups, generator=generator) + 0.5) / 16).half()
    zero = torch.randint(1, 16, (rows, groups), generator=generator)
    dense = (codes - zero.repeat_interleave(group, 1)).float() * scale.float().repeat_interleave(group, 1)
    if scheme == "int4_ct":
        return {"weight_packed": words(codes), "weight_scale": scale, "weight_zero_point": words(zero.t()).t().contiguous(), "weight_shape": torch.tensor([rows, columns])}, dense
    stored = {"scales": scale.t().contiguous()}
    if scheme == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        mixed = [values.t().unflatten(1, (-1, 8))[..., order].flatten(1) for values in (codes, zero)]
        return {"qweight": words(mixed[0]), "qzeros": words(mixed[1]), **stored}, dense
    lowered = zero - 1 if scheme == "gptq_v1" else zero
    order = torch.arange(columns, dtype=torch.int32) // group
    return {"qweight": words(codes).t().contiguous(), "qzeros": words(lowered.t()), "g_idx": order, **stored}, dense


def words(codes: torch.Tensor) -> torch.Tensor:
    """int32 [R, C // 8] of codes [R, C], the first in the lowest bits."""
    shifted = codes.long().unflatten(1, (-1, 8)) << (4 * torch.arange(8))
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


DECLARED_BY_SCHEME = {"nvfp4_modelopt": MODELOPT, "nvfp4_ct": CT_NVFP4, "int4_ct": CT_INT4, "gptq_v1": GPTQ_V1, "gptq_v2": GPTQ_V2, "awq": AWQ}


def packed_checkpoint(folder: Path, scheme: str, config: dict | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """A tiny checkpoint: experts, shared expert and head of 4 bits, attention FP8 a tensor, the rest plain. Canonical name -> float32 truth."""
    config = config or tiny_config(shared_expert_intermediate_size=64)
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(ModelConfig.from_dict(config))
    tensors, truth = official_weights(config, seed), {}
    base = "model.language_model."

    def store(module: str, shape: tuple[int, int]) -> torch.Tensor:
        parts, dense = packed(scheme, *shape, generator)
        tensors.pop(f"{module}.weight", None)
        tensors.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
        return dense

    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if ".mlp.experts." in name:
            stem, which = module.rsplit(".", 1)
            truth[name] = torch.stack([store(f"{base}{stem}.{expert}.{which}_proj", shape[1:]) for expert in range(shape[0])])
        elif ".shared_expert." in name:
            truth[name] = store(base + module, shape)
        elif name == "lm_head.weight":
            truth[name] = store(module, shape)
        elif ".self_attn." in name and name.endswith("_proj.weight"):
            codes, scale = tensors[base + name].to(torch.float8_e4m3fn), torch.rand((), generator=generator) + 0.5
            tensors[base + name], tensors[f"{base}{module}.weight_scale"] = codes, scale
            truth[name] = codes.float() * scale
    write_raw(folder, tensors, {**config, "quantization_config": DECLARED_BY_SCHEME[scheme]})
    return truth
