"""Speed of llama.cpp on the same card: a GGUF of the same shape with random weights, and its own `llama-bench`.

    python benchmarks/beside_llama_cpp.py unpack llama_cpp_python-X.tar.gz SRC     # what is needed of it: 40 MB
    python benchmarks/beside_llama_cpp.py build SRC BUILD --cuda 90                # without --cuda for a CPU
    python benchmarks/beside_llama_cpp.py write model.gguf --type q8_0             # 37 GB; q4_0: 20 GB
    python benchmarks/beside_llama_cpp.py run BUILD model.gguf --prompt 512 2048 --new 128

The source comes from PyPI: `pip download --no-deps --no-binary llama-cpp-python llama-cpp-python`. `write` needs the
packages gguf and numpy, `build` cmake, a C++ compiler and, for a card, the CUDA toolkit. `write --tiny` and a build without
--cuda run anywhere. Every command prints one JSON object. llama-bench draws no tokens, which favours it beside our own
figures, and without --depth it decodes at an empty context.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from a3b_engine.bench.shape import ModelShape  # noqa: E402

ARCHITECTURE = "qwen35moe"
BYTES_OF_BLOCK = {"q8_0": 34, "q4_0": 18}  # of 32 weights: a float16 scale, then the codes
FILE_TYPE = {"q8_0": 7, "q4_0": 2}
TINY = ModelShape(
    layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, delta_key_heads=2, delta_value_heads=4, delta_head_dim=64, experts=8,
    experts_per_token=2, expert_inner=64, text_tokens=2000, vocab=2048, max_tokens=4096, mrope_section=(3, 3, 2),
)  # fmt: skip
KEPT_FOLDERS = ("ggml", "src", "common", "include", "vendor", "cmake", "licenses", "scripts", "tools/llama-bench")
KEPT_FILES = ("CMakeLists.txt", "LICENSE")
PACKAGE = "PACKAGE.txt"  # which source package this came from; the package itself names no version of llama.cpp


# A model


@dataclass(frozen=True)
class Entry:
    """One tensor: its name and shape, rows first. fill None: random codes in the quantised type; else float32, all of this
    value, or random where it is NaN."""

    name: str
    shape: tuple[int, ...]
    fill: float | None = None


def entries(shape: ModelShape) -> Iterator[Entry]:
    """Every tensor that llama.cpp asks of this architecture."""
    hidden, keys, values = shape.hidden, shape.delta_key_heads * shape.delta_head_dim, shape.delta_value_heads * shape.delta_head_dim
    channels, random = 2 * keys + values, math.nan
    yield Entry("token_embd.weight", (shape.vocab, hidden))
    yield Entry("output_norm.weight", (hidden,), 1.0)
    yield Entry("output.weight", (shape.vocab, hidden))
    for layer in range(shape.layers):
        base = f"blk.{layer}."
        yield Entry(f"{base}attn_norm.weight", (hidden,), 1.0)
        yield Entry(f"{base}post_attention_norm.weight", (hidden,), 1.0)
        if (layer + 1) % 4 == 0:
            queries, key_values = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            yield Entry(f"{base}attn_q.weight", (2 * queries, hidden))
            yield Entry(f"{base}attn_k.weight", (key_values, hidden))
            yield Entry(f"{base}attn_v.weight", (key_values, hidden))
            yield Entry(f"{base}attn_output.weight", (hidden, queries))
            yield Entry(f"{base}attn_q_norm.weight", (shape.head_dim,), 1.0)
            yield Entry(f"{base}attn_k_norm.weight", (shape.head_dim,), 1.0)
        else:
            yield Entry(f"{base}attn_qkv.weight", (channels, hidden))
            yield Entry(f"{base}attn_gate.weight", (values, hidden))
            yield Entry(f"{base}ssm_conv1d.weight", (channels, 4), random)
            yield Entry(f"{base}ssm_dt.bias", (shape.delta_value_heads,), random)
            yield Entry(f"{base}ssm_a", (shape.delta_value_heads,), -0.5)
            yield Entry(f"{base}ssm_beta.weight", (shape.delta_value_heads, hidden))
            yield Entry(f"{base}ssm_alpha.weight", (shape.delta_value_heads, hidden))
            yield Entry(f"{base}ssm_norm.weight", (shape.delta_head_dim,), 1.0)
            yield Entry(f"{base}ssm_out.weight", (hidden, values))
        inner = shape.expert_inner
        yield Entry(f"{base}ffn_gate_inp.weight", (shape.experts, hidden), random)
        yield Entry(f"{base}ffn_gate_exps.weight", (shape.experts, inner, hidden))
        yield Entry(f"{base}ffn_up_exps.weight", (shape.experts, inner, hidden))
        yield Entry(f"{base}ffn_down_exps.weight", (shape.experts, hidden, inner))
        yield Entry(f"{base}ffn_gate_inp_shexp.weight", (hidden,), random)
        yield Entry(f"{base}ffn_gate_shexp.weight", (inner, hidden))
        yield Entry(f"{base}ffn_up_shexp.weight", (inner, hidden))
        yield Entry(f"{base}ffn_down_shexp.weight", (hidden, inner))


class Numbers:
    """Random contents of tensors, repeated from one pool: llama.cpp's speed does not depend on them."""

    def __init__(self, quantised: str, seed: int) -> None:
        import numpy as np

        self._np = np
        self.block = BYTES_OF_BLOCK[quantised]
        generator = np.random.default_rng(seed)
        blocks = generator.integers(0, 256, (1 << 19, self.block), dtype=np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(2.0**-11).tobytes(), np.uint8)  # a usual spread of the weights
        self._pools = {True: blocks.reshape(-1), False: (generator.standard_normal(1 << 19) * 0.02).astype(np.float32)}

    def shape_in_file(self, entry: Entry) -> tuple[int, ...]:
        """Of the array that is written: a quantised row is bytes."""
        return entry.shape if entry.fill is not None else (*entry.shape[:-1], entry.shape[-1] // 32 * self.block)

    def array(self, entry: Entry) -> Any:
        """uint8 blocks, or float32."""
        shape = self.shape_in_file(entry)
        if entry.fill is not None and not math.isnan(entry.fill):
            return self._np.full(shape, entry.fill, self._np.float32)
        return self._np.resize(self._pools[entry.fill is None], shape)


def write(options: argparse.Namespace) -> dict[str, Any]:
    """The GGUF file. One tensor at a time is in memory."""
    import gguf
    import numpy as np

    shape = TINY if options.tiny else replace(ModelShape(), layers=options.layers)
    writer = gguf.GGUFWriter(str(options.model), ARCHITECTURE)
    writer.add_context_length(min(shape.max_tokens, 65536))
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(shape.head_dim // 4)
    writer.add_rope_dimension_sections([*shape.mrope_section, 0])
    writer.add_full_attention_interval(4)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.experts_per_token)
    writer.add_expert_feed_forward_length(shape.expert_inner)
    writer.add_expert_shared_feed_forward_length(shape.expert_inner)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(shape.delta_head_dim)
    writer.add_ssm_group_count(shape.delta_key_heads)
    writer.add_ssm_time_step_rank(shape.delta_value_heads)
    writer.add_ssm_inner_size(shape.delta_value_heads * shape.delta_head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(FILE_TYPE[options.type])
    numbers, todo = Numbers(options.type, options.seed), list(entries(shape))
    for entry in todo:
        stored = numbers.shape_in_file(entry)
        quantised = entry.fill is None
        dtype = np.dtype(np.uint8 if quantised else np.float32)
        raw = gguf.GGMLQuantizationType[options.type.upper()] if quantised else None
        writer.add_tensor_info(entry.name, stored, dtype, math.prod(stored) * dtype.itemsize, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in todo:
        writer.write_tensor_data(numbers.array(entry))
    writer.close()
    return {"model": str(options.model), "type": options.type, "tensors": len(todo), "bytes": options.model.stat().st_size, "whole": shape == ModelShape()}


# The program


def unpack(options: argparse.Namespace) -> dict[str, Any]:
    """The part of the source package that llama-bench is built from, in `source`, and nothing else."""
    place = re.compile(r"[^/]+/vendor/llama\.cpp/(.+)")
    found = 0
    with tarfile.open(options.archive) as archive:
        for member in archive:
            match = place.fullmatch(member.name)
            if match is None or not member.isfile():
                continue
            name = match[1]
            if ".." in Path(name).parts or not (name in KEPT_FILES or name.startswith(tuple(f"{folder}/" for folder in KEPT_FOLDERS))):
                continue
            target = options.source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.extractfile(member) as stream, open(target, "wb") as out:
                shutil.copyfileobj(stream, out)
            found += 1
    if not found:
        raise SystemExit(f"{options.archive}: no vendor/llama.cpp inside. Is it the source package of llama-cpp-python?")
    # The only tool that is kept; the original list names the others too.
    (options.source / "tools" / "CMakeLists.txt").write_text("llama_add_compile_flags()\nadd_subdirectory(llama-bench)\n", encoding="utf-8")
    package = options.archive.name.removesuffix(".tar.gz")
    (options.source / PACKAGE).write_text(package, encoding="utf-8")
    return {"source": str(options.source), "files": found, "package": package}


def build(options: argparse.Namespace) -> dict[str, Any]:
    """llama-bench in `build`. --cuda N: for cards of compute capability N (90 for an H200)."""
    off = ("TESTS", "EXAMPLES", "SERVER", "APP", "UI")
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    flags += [f"-DLLAMA_BUILD_{name}=OFF" for name in off]
    if (options.source / PACKAGE).is_file():
        flags.append(f"-DLLAMA_BUILD_COMMIT={(options.source / PACKAGE).read_text(encoding='utf-8')}")  # llama-bench reports it
    if options.cuda:
        flags += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={options.cuda}"]
    subprocess.run(["cmake", "-S", str(options.source), "-B", str(options.build), *flags], check=True, stdout=sys.stderr)
    jobs = str(options.jobs or os.cpu_count() or 1)
    subprocess.run(
        ["cmake", "--build", str(options.build), "--config", "Release", "--target", "llama-bench", "--parallel", jobs], check=True, stdout=sys.stderr
    )
    return {"program": str(program_in(options.build))}


def program_in(folder: Path) -> Path:
    """llama-bench under `folder`."""
    for path in sorted(folder.rglob("llama-bench*")):
        if path.name in ("llama-bench", "llama-bench.exe") and path.is_file():
            return path
    raise SystemExit(f"{folder}: no llama-bench in it. Run build first.")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Its figures: prefill of each prompt length, and decode of `new` tokens."""
    lengths = ",".join(map(str, options.prompt))
    command = [
        str(program_in(options.build)), "-m", str(options.model), "-p", lengths, "-n", str(options.new), "-r", str(options.repeat),
        "-ngl", str(options.gpu_layers), "-fa", "1", "-o", "json",
    ]  # fmt: skip
    if options.depth:
        command += ["-d", ",".join(map(str, options.depth))]
    if options.cpu_experts:
        command += ["-ncmoe", str(options.cpu_experts)]
    answer = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if answer.returncode:
        raise SystemExit(f"llama-bench failed: {answer.stderr.strip()[-500:]}")
    return summary(json.loads(answer.stdout), command)


def summary(rows: list[dict[str, Any]], command: list[str]) -> dict[str, Any]:
    """One object of llama-bench's own rows."""
    first = rows[0]
    return {
        "what": "llama.cpp, random weights",
        "build": first.get("build_commit"),
        "build_number": first.get("build_number"),
        "backends": first.get("backends"),
        "device": first.get("gpu_info") or first.get("cpu_info"),
        "model": first.get("model_type"),
        "model_bytes": first.get("model_size"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command[1:],
        "results": [
            {
                "what": "decode" if row["n_gen"] else "prefill",
                "tokens": row["n_gen"] or row["n_prompt"],
                "depth": row.get("n_depth", 0),
                "tokens_per_s": round(row["avg_ts"], 2),
                "spread": round(row["stddev_ts"], 2),
            }
            for row in rows
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("unpack", help=unpack.__doc__)
    step.add_argument("archive", type=Path)
    step.add_argument("source", type=Path)
    step.set_defaults(do=unpack)
    step = commands.add_parser("build", help=build.__doc__)
    step.add_argument("source", type=Path)
    step.add_argument("build", type=Path)
    step.add_argument("--cuda", metavar="N", help="compute capability, e.g. 90")
    step.add_argument("--jobs", type=int)
    step.set_defaults(do=build)
    step = commands.add_parser("write", help=write.__doc__)
    step.add_argument("model", type=Path)
    step.add_argument("--type", choices=sorted(BYTES_OF_BLOCK), default="q8_0")
    step.add_argument("--layers", type=int, default=ModelShape().layers)
    step.add_argument("--tiny", action="store_true")
    step.add_argument("--seed", type=int, default=0)
    step.set_defaults(do=write)
    step = commands.add_parser("run", help=run.__doc__)
    step.add_argument("build", type=Path)
    step.add_argument("model", type=Path)
    step.add_argument("--prompt", type=int, nargs="+", default=[512, 2048])
    step.add_argument("--new", type=int, default=128)
    step.add_argument("--depth", type=int, nargs="*", help="tokens of context before each measurement")
    step.add_argument("--repeat", type=int, default=3)
    step.add_argument("--gpu-layers", type=int, default=99)
    step.add_argument("--cpu-experts", type=int, default=0, help="layers whose experts stay in RAM")
    step.set_defaults(do=run)
    options = parser.parse_args()
    print(json.dumps(options.do(options), indent=2))


if __name__ == "__main__":
    main()
