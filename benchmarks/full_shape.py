"""Speed and memory of the engine in the full Qwen3.5-35B-A3B shape with random weights: no files needed, one GPU.

    python benchmarks/full_shape.py [--new 64] [--prompt 512] [--layers 40]

Random weights run the same operations on the same bytes as real ones, so times and memory hold; the words do not.
Prints one JSON object. Experts and projections are FP8 with 128x128 block scales as in the official files, the rest
bfloat16. `--layers` and `--device cpu` make a quick look on a small machine possible; quote only full runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from a3b_engine.checkpoint.names import expected_tensors, kept_in_float32, may_stay_scaled  # noqa: E402
from a3b_engine.checkpoint.scaled import ScaledWeight  # noqa: E402
from a3b_engine.config import ModelConfig  # noqa: E402
from a3b_engine.model.text import TextModel  # noqa: E402
from a3b_engine.model.vision import VisionModel  # noqa: E402
from a3b_engine.runtime.cache import SequenceState  # noqa: E402
from a3b_engine.runtime.forward import forward_chunks  # noqa: E402
from a3b_engine.sampling import Sampler, SamplingParams  # noqa: E402


def published_config(layers: int = 40) -> ModelConfig:
    """The sizes of Qwen3.5-35B-A3B, with fewer layers where asked."""
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "full_attention_interval": 4, "eos_token_id": 248044,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    }  # fmt: skip
    vision = {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "hidden_act": "gelu_pytorch_tanh", "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048, "num_position_embeddings": 2304,
    }  # fmt: skip
    ids = {"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054}
    return ModelConfig.from_dict({"model_type": "qwen3_5_moe", "text_config": text, "vision_config": vision, **ids})


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict:
    """Random tensors under every canonical name: FP8 with block scales where the official files have it."""
    generator = torch.Generator(device=device).manual_seed(0)
    weights = {}
    for name, shape in expected_tensors(config).items():
        if may_stay_scaled(name) and name != "lm_head.weight":
            # Codes up to 0x6f are finite, at most 128 in size; the scale brings the weights to a usual spread.
            codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device, generator=generator)
            codes |= torch.randint(0, 2, shape, dtype=torch.uint8, device=device, generator=generator) << 7
            scale = torch.full((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), 5e-4, device=device)
            weights[name] = ScaledWeight(codes.view(torch.float8_e4m3fn), scale, (128, 128))
        elif kept_in_float32(name):
            weights[name] = torch.rand(shape, device=device, generator=generator) * 0.1
        else:
            weights[name] = torch.randn(shape, device=device, generator=generator, dtype=dtype) * 0.02
    return weights


class Stopwatch:
    """Seconds of the work queued inside the block, the device's included."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def __enter__(self) -> "Stopwatch":
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._began


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict:
    device = torch.device(options.device)
    dtype = torch.bfloat16
    config = published_config(options.layers)
    with Stopwatch(device) as making:
        weights = random_weights(config, device, dtype)
    model, vision = TextModel(config.text, weights), VisionModel(config.vision, weights)
    weight_bytes = sum(w.nbytes for w in weights.values())
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    report = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "layers": options.layers,
        "weights_gb": round(weight_bytes / 1e9, 2),
        "make_weights_s": round(making.seconds, 1),
    }
    generator = torch.Generator().manual_seed(1)

    def prompt(tokens: int) -> list[int]:
        return torch.randint(0, 240000, (tokens,), generator=generator).tolist()

    def prefill(tokens: int) -> tuple[SequenceState, torch.Tensor, float]:
        state, ids = SequenceState(config.text, 1 << 17, device, dtype), prompt(tokens)
        with Stopwatch(device) as watch:
            *_, hidden = forward_chunks(model, config, state, ids)
        return state, hidden[-1:], watch.seconds

    prefill(64)  # first use of every kernel
    _, _, seconds = prefill(2048)
    report["prefill_2048_tokens_per_s"] = round(2048 / seconds)
    state, hidden, _ = prefill(options.prompt)
    sampler = Sampler(SamplingParams(), config.text.vocab_size, 248077, [], device)
    with Stopwatch(device) as watch:
        for _ in range(options.new):
            token = sampler.draw(model.logits(hidden)[0])
            sampler.record(token)
            *_, hidden = forward_chunks(model, config, state, [token])
    report.update(prompt=options.prompt, new=options.new, decode_tokens_per_s=round(options.new / watch.seconds, 1))
    patches = torch.randn(24 * 24, config.vision.patch_dim)
    vision.encode(patches, (12, 12))
    with Stopwatch(device) as watch:
        vision.encode(patches, (12, 12))
    report["encode_384px_ms"] = round(watch.seconds * 1e3, 1)
    report["finite"] = bool(hidden.isfinite().all())
    if device.type == "cuda":
        report["peak_above_weights_gb"] = round((torch.cuda.max_memory_allocated() - weight_bytes) / 1e9, 2)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
