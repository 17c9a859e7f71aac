"""Speed of the `transformers` implementation of the same model on the same card: random bfloat16 weights, batch 1.

    python benchmarks/beside_transformers.py                          # full shape: a card with 80 GB
    python benchmarks/beside_transformers.py --layers 10              # a quarter of it
    python benchmarks/beside_transformers.py --tiny --device cpu      # seconds, anywhere: shows that the script works

Needs transformers 5.3 or newer beside torch. Prints one JSON object: for each way it has to run experts, decode tokens a
second (difference of a long and a one-token answer to the same prompt, sampling as in our own benchmark) and the time to
the first token of the prompt. Each way gets one untimed answer of the timed length first; medians of --repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from a3b_engine.bench.bandwidth import copy_rate  # noqa: E402
from a3b_engine.bench.machine import describe  # noqa: E402
from a3b_engine.bench.shape import ModelShape, config_dict  # noqa: E402

TINY = ModelShape(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=32, delta_key_heads=2, delta_value_heads=4, delta_head_dim=16, experts=8,
    experts_per_token=2, expert_inner=32, text_tokens=2000, vocab=2048, max_tokens=4096, mrope_section=(2, 1, 1), vision_depth=2,
    vision_hidden=32, vision_inner=64, vision_heads=2, vision_positions=64,
)  # fmt: skip
EXPERTS = ("grouped_mm", "batched_mm", "eager")
OPTIONAL = ("flash-linear-attention", "causal-conv1d", "flash-attn")


def random_model(shape: ModelShape, device: torch.device, seed: int) -> torch.nn.Module:
    """The library's own model with its own initialisation, made on the device in bfloat16."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    config = Qwen3_5MoeConfig.from_dict(config_dict(shape))
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3_5MoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


class Asked:
    """A model and how it is asked."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape, device: torch.device, prompt: int, seed: int) -> None:
        self.model, self.device = model, device
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, shape.text_tokens, (1, prompt), generator=generator).to(device)
        self.pad = shape.control_id("<|endoftext|>")

    def seconds(self, new: int) -> float:
        """Time of an answer of exactly `new` tokens."""
        self._wait()
        began = time.perf_counter()
        with torch.no_grad():
            self.model.generate(
                input_ids=self.ids, attention_mask=torch.ones_like(self.ids), max_new_tokens=new, min_new_tokens=new, do_sample=True,
                temperature=0.7, top_p=0.8, top_k=20, pad_token_id=self.pad, eos_token_id=self.pad,
            )  # fmt: skip
        self._wait()
        return time.perf_counter() - began

    def measure(self, experts: str, new: int, repeat: int) -> dict[str, object]:
        """Figures with one way to run the experts, or why there are none."""
        try:
            self.model.set_experts_implementation(experts)
            self.seconds(1 + new)
            first = statistics.median(self.seconds(1) for _ in range(repeat))
            whole = statistics.median(self.seconds(1 + new) for _ in range(repeat))
        except Exception as problem:  # an implementation may want a package or a card that is not here
            return {"experts": experts, "error": f"{type(problem).__name__}: {str(problem)[:200]}"}
        return {"experts": experts, "decode_tokens_per_s": round(new / (whole - first), 2), "first_token_ms": round(first * 1e3, 2)}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def version(package: str) -> str | None:
    """Version of an installed package, None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def measure(options: argparse.Namespace) -> dict[str, object]:
    import transformers

    device = torch.device(options.device)
    shape = TINY if options.tiny else replace(ModelShape(), layers=options.layers)
    rate = copy_rate(device, 1 << (20 if options.tiny else 30))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = random_model(shape, device, options.seed)
    asked = Asked(model, shape, device, options.prompt, options.seed)
    report: dict[str, object] = {
        "what": "transformers, bfloat16, random weights",
        "transformers": transformers.__version__,
        "optional_kernels": {name: version(name) for name in OPTIONAL},  # without them it runs its own slower code
        "machine": describe(device),
        "copy_gb_per_s": round(rate / 1e9, 1),
        "layers": shape.layers,
        "whole": shape == ModelShape(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "prompt_tokens": options.prompt,
        "new_tokens": options.new,
        "results": [asked.measure(experts, options.new, options.repeat) for experts in options.experts],
    }
    report["peak_gb"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=ModelShape().layers)
    parser.add_argument("--tiny", action="store_true", help="a model of a few hundred kilobytes instead of the published shape")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--experts", nargs="+", default=list(EXPERTS), choices=EXPERTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA card here; --tiny --device cpu shows that the script works")
    print(json.dumps(measure(options), indent=2))


if __name__ == "__main__":
    main()
