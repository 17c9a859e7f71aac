"""Build a small random Qwen3.5-MoE checkpoint: the official FP8 layout with made-up weights.

    python tools/demo_model/make_random.py FOLDER [--seed N]

Needs torch, tokenizers, safetensors and numpy, a CPU and a few seconds; reads no other model and no network. Its
answers are noise: it exists to exercise every part of the pack on any machine. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Iterable

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from a3b_engine.bench.shape import CONTROL_TOKENS  # the line above makes it importable
from a3b_engine.checkpoint.names import expected_tensors
from a3b_engine.checkpoint.write import to_official, write_checkpoint, write_json
from a3b_engine.config import ModelConfig

HERE = Path(__file__).resolve().parent
BPE_SIZE = 1792
SHARD_BYTES = 1_200_000

# Qwen's pre-tokenizer: contractions, words, single digits, punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# (content, special) in the order of the published tokenizer, as far as a demo model needs them; ids follow the BPE.
ADDED_TOKENS = CONTROL_TOKENS[: CONTROL_TOKENS.index(("</think>", False)) + 1]

CHAT_TEMPLATE = """\
{#- Turns of a conversation for the demo models; same conventions as the published checkpoints. -#}
{%- macro show(content, pictures_allowed) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
        {%- if not pictures_allowed -%}{{- raise_exception('Pictures belong to user turns.') -}}{%- endif -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif 'text' in part -%}
        {{- part.text -}}
      {%- else -%}
        {{- raise_exception('A content part is neither text nor a picture.') -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if not messages or messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}
  {{- raise_exception('There is no user turn.') -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' and not loop.first -%}
    {{- raise_exception('The system turn must come first.') -}}
  {%- elif message.role not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception('Unknown role: ' ~ message.role) -}}
  {%- endif -%}
  {%- set body = show(message.content, message.role == 'user') | trim -%}
  {{- '<|im_start|>' ~ message.role ~ '\\n' ~ body ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is true -%}
    {{- '<think>\\n' -}}
  {%- else -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def make_random_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a whole checkpoint into `folder` (made when absent) and return it. Same seed, same bytes.

    About 4 MB in several shards with an index, config.json, generation_config.json, preprocessor_config.json,
    tokenizer.json, tokenizer_config.json and chat_template.jinja. Never touches torch's global generator.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        write_files(Path(scratch), seed)
        # config.json last: a folder that has it is whole, even when this process is ended half way.
        for path in sorted(Path(scratch).iterdir(), key=lambda path: (path.name == "config.json", path.name)):
            os.replace(path, folder / path.name)
    return folder


def write_files(folder: Path, seed: int) -> None:
    """All files of the checkpoint, into an empty folder."""
    ids = write_tokenizer(folder)
    config = model_config(ids)
    parsed = ModelConfig.from_dict(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: random_weight(name, shape, generator) for name, shape in expected_tensors(parsed).items()}
    write_checkpoint(folder, to_official(weights, parsed), config, format="fp8", max_shard_bytes=SHARD_BYTES)
    write_settings(folder, ids)


def write_settings(folder: Path, ids: dict[str, int]) -> None:
    """The small files beside the weights: generation and picture settings, chat template."""
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": pad,
            "do_sample": True,
            "eos_token_id": [end, pad],
            "pad_token_id": pad,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    write_json(
        folder / "preprocessor_config.json",
        {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
    )
    (folder / "chat_template.jinja").write_bytes(CHAT_TEMPLATE.encode("utf-8"))


def model_config(ids: dict[str, int]) -> dict:
    """The config.json of the demo model. `ids` maps token content to id and is as long as the tokenizer."""
    vocab_size = -(-(max(ids.values()) + 1) // 64) * 64
    if vocab_size == len(ids):
        vocab_size += 64  # always some padding ids, as in the published model
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "vocab_size": vocab_size,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-06,
            "attention_bias": False,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "layer_types": kinds,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "mamba_ssm_dtype": "float32",
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "dtype": "bfloat16",
            "eos_token_id": ids["<|endoftext|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
        },
        "vision_config": {
            "model_type": "qwen3_5_moe",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_heads": 4,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 576,
            "deepstack_visual_indexes": [],
        },
    }


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """float32 values of the sizes a trained model has, so that every intermediate stays finite and logits differ."""

    def normal(std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log_()
    if name.endswith("dt_bias"):
        return normal(0.1)
    if name.endswith("linear_attn.norm.weight") or (name.startswith("visual.") and ".norm" in name and name.endswith(".weight")):
        return torch.ones(shape)  # plain weights
    if name.endswith(("norm.weight", ".bias")):
        return torch.zeros(shape)  # language-model norms multiply by 1 + w
    if name.endswith("conv1d.weight"):
        return normal(1 / math.sqrt(shape[-1]))
    return normal(0.05)


def write_tokenizer(folder: Path, texts: Iterable[str] | None = None, size: int = BPE_SIZE) -> dict[str, int]:
    """Train a byte-level BPE of `size` ids on `texts` (by default the corpus beside this file) and write tokenizer.json
    and tokenizer_config.json. Returns the id of every token, the added ones included."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(corpus() if texts is None else texts, trainer)
    tokens = [AddedToken(content, special=special, normalized=False) for content, special in ADDED_TOKENS]
    for token, (_, special) in zip(tokens, ADDED_TOKENS, strict=True):
        # One by one: ids follow the published order, whatever the kind.
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    (folder / "tokenizer.json").write_bytes(tokenizer.to_str(pretty=False).encode("utf-8"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    write_tokenizer_config(folder, ids)
    return ids


def write_tokenizer_config(folder: Path, ids: dict[str, int]) -> None:
    """tokenizer_config.json; `ids` holds at least the added tokens."""
    specials = [content for content, special in ADDED_TOKENS if special]
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(ids[content]): {
                    "content": content,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": special,
                }
                for content, special in ADDED_TOKENS
            },
            "additional_special_tokens": specials[1:],
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 32768,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )


def corpus() -> list[str]:
    """Lines of English and Chinese comic prose, and scripts as JSON made from them."""
    lines = (HERE / "corpus.txt").read_text(encoding="utf-8").splitlines()
    texts = list(lines)
    shots = ("close", "medium", "wide", "extreme_close", "full", "establishing", "over_shoulder", "pov")
    for number, line in enumerate(lines):
        panel = {
            "index": number % 16 + 1,
            "shot": shots[number % len(shots)],
            "characters": ["rin", "kai", "mei"][: number % 3 + 1],
            "action": line,
            "micro_expression": "",
            "background": "",
            "light": "",
            "props": [],
            "caption": "",
            "sfx": "",
            "scene_tag": "",
            "visual_prompt": line,
            "negative": "",
        }
        row = {"panel": panel["index"], "speaker": "rin", "line": line, "emotion_tag": "calm"}
        script = {
            "title": line,
            "style": "manga",
            "language": "zh" if ord(line[0]) > 0x2E80 else "en",
            "reading_direction": "rtl",
            "characters": [{"id": "rin", "name": "Rin", "look": line}],
            "dialogue": [row],
            "panels": [panel],
        }
        texts.append(json.dumps(script, ensure_ascii=False, indent=2 if number % 2 else None))
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = make_random_checkpoint(arguments.folder, arguments.seed)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
