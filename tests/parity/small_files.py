"""Checkpoint folders of the small models in every form people have, with a tiny tokenizer beside the weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from small_models import (
    FRAMES,
    MERGE,
    PATCH,
    PLAIN_TOKENS,
    SPECIAL_TOKENS,
    model_config,
    random_tensors,
    tensor_shapes,
    token_id,
)


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The per-expert form of the same weights (names as in the FP8 repository)."""
    result: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        if key.endswith("mlp.experts.gate_up_proj"):
            stem = key.removesuffix("gate_up_proj")
            for index, expert in enumerate(value):
                gate, up = expert.chunk(2)
                result[f"{stem}{index}.gate_proj.weight"] = gate.contiguous()
                result[f"{stem}{index}.up_proj.weight"] = up.contiguous()
        elif key.endswith("mlp.experts.down_proj"):
            stem = key.removesuffix("down_proj")
            for index, expert in enumerate(value):
                result[f"{stem}{index}.down_proj.weight"] = expert.contiguous()
        else:
            result[key] = value
    return result


def join_experts(tensors: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """Published names with fused experts, from either form: the inverse of `split_experts`."""
    result = {}
    for key, shape in tensor_shapes(config).items():
        if key in tensors:
            result[key] = tensors[key]
        elif key.endswith("mlp.experts.gate_up_proj"):
            stem = key.removesuffix("gate_up_proj")
            result[key] = torch.stack([
                torch.cat([tensors[f"{stem}{i}.gate_proj.weight"], tensors[f"{stem}{i}.up_proj.weight"]])
                for i in range(shape[0])])
        elif key.endswith("mlp.experts.down_proj"):
            stem = key.removesuffix("down_proj")
            result[key] = torch.stack([tensors[f"{stem}{i}.down_proj.weight"] for i in range(shape[0])])
        else:
            raise KeyError(key)
    return result


def dequantized(folder: Path, config: dict) -> dict[str, torch.Tensor]:
    """float32 tensors of an FP8 block-scaled folder, multiplied out here rather than by the engine."""
    from safetensors.torch import load_file

    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(path))
    rows, columns = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"]["weight_block_size"]
    result = {}
    for key, value in stored.items():
        if key.endswith("_scale_inv"):
            continue
        scale = stored.get(key + "_scale_inv")
        value = value.float()
        if scale is not None:
            grid = scale.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
            value = value * grid[..., : value.shape[-2], : value.shape[-1]]
        result[key] = value
    return join_experts(result, config)


def write_folder(folder: Path, name: str, tensors: dict[str, torch.Tensor] | None = None, *, format: str = "fp32",
                 experts: str = "fused") -> Path:
    """A complete checkpoint folder (weights, configuration, tokenizer, template) through the engine's own writer."""
    from a3b_engine.checkpoint.write import write_checkpoint

    tensors = random_tensors(name) if tensors is None else tensors
    config = copy.deepcopy(model_config(name))
    write_checkpoint(folder, split_experts(tensors) if experts == "per_expert" else tensors, config,
                     format=format, experts=experts, max_shard_bytes=1 << 20)
    write_companions(folder)
    return folder


CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}
"""


def write_companions(folder: Path) -> None:
    """The files beside the weights: a byte-level tokenizer with the published control tokens, template, settings."""
    added = [{"id": token_id(content), "content": content, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": content in SPECIAL_TOKENS} for content in SPECIAL_TOKENS + PLAIN_TOKENS]
    files = {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                              "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
                      "vocab": {letter: index for index, letter in enumerate(_byte_letters())}, "merges": []},
        },
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                                  "tokenizer_class": "Qwen2Tokenizer"},
        "generation_config.json": {"eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
                                   "pad_token_id": token_id("<|endoftext|>")},
        "preprocessor_config.json": {"size": {"shortest_edge": 65536, "longest_edge": 16777216},
                                     "patch_size": PATCH, "temporal_patch_size": FRAMES, "merge_size": MERGE,
                                     "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
                                     "image_processor_type": "Qwen2VLImageProcessorFast"},
    }
    for filename, content in files.items():
        (folder / filename).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte in a byte-level BPE: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(256):
        letters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return letters
