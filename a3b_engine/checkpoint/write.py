"""Writing checkpoints: safetensors files, block FP8, sharding and the official layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from ..config import ModelConfig
from ..errors import CheckpointError
from .dtypes import dtype_code
from .index import INDEX_NAME
from .names import DEFAULT_PREFIX, is_expert_stack, shapes_in_files

FP8_MAX = 448.0  # largest finite value of float8_e4m3fn
BLOCK = (128, 128)

_FLOAT_FORMATS = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
FP8_MODULE = re.compile(
    r"(?:.*\.)?layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.shared_expert\.(gate|up|down)_proj|mlp\.experts\.(\d+\.(gate|up|down)_proj|gate_up_proj|down_proj))"
)
_FUSED = re.compile(r"(?P<base>.*\.mlp\.experts)\.(?P<which>gate_up_proj|down_proj)")
_SEPARATE = re.compile(r"(?P<base>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<which>gate|up|down)_proj\.weight")


def quantize_fp8_block(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., N, K] -> (float8_e4m3fn [..., N, K], bfloat16 scale [..., ceil(N/bn), ceil(K/bk)]).

    scale = amax / 448 of each block, rounded to bfloat16; the codes are computed against the rounded scale, so that
    its rounding adds no error. Blocks of zeros (or too small for the scale's range) get scale 1.
    """
    rows, columns = weight.shape[-2:]
    height, width = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.nn.functional.pad(weight.float(), (0, width * block[1] - columns, 0, height * block[0] - rows))
    tiles = padded.view(*weight.shape[:-2], height, block[0], width, block[1])
    scale = (tiles.abs().amax(dim=(-3, -1)) / FP8_MAX).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (tiles / scale.float()[..., :, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    # Padding is cut off through bytes: slicing then copying float8 is not implemented for every device.
    codes = codes.view(padded.shape).view(torch.uint8)[..., :rows, :columns].contiguous().view(torch.float8_e4m3fn)
    return codes, scale


def to_official(weights: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Canonical names and shapes -> official ones, experts per expert. Views of the given tensors where possible."""
    official: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if is_expert_stack(name):
            base, which = name.removesuffix(".weight").rsplit(".", 1)
            for expert in range(tensor.shape[0]):
                official[f"{DEFAULT_PREFIX}{base}.{expert}.{which}_proj.weight"] = tensor[expert]
            continue
        shaped = tensor.view(shapes_in_files(name, tuple(tensor.shape), config)[0])
        prefix = "" if name.startswith("lm_head.") else "model." if name.startswith("visual.") else DEFAULT_PREFIX
        official[prefix + name] = shaped
    return official


def write_checkpoint(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    config: dict,
    *,
    format: str = "fp8",
    experts: str = "per_expert",
    max_shard_bytes: int = 4 * 1024**3,
    with_index: bool = True,
) -> None:
    """Write weights and config.json into `folder` (made when absent).

    tensors: official names (any prefix), dense, experts fused or per expert. format: "fp8" (the modules the official
    repository converts become e4m3 with bfloat16 128x128 block scales, the rest bfloat16), "bf16" or "fp32". experts:
    "per_expert" or "fused". A tensor larger than max_shard_bytes gets a shard of its own. Raises CheckpointError when
    other .safetensors files are in the folder, since a later reader could not tell them apart.
    """
    if format not in _FLOAT_FORMATS or experts not in ("per_expert", "fused"):
        raise ValueError(f"format {format!r} (fp8, bf16, fp32), experts {experts!r} (per_expert, fused)")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arranged = _separate_experts(tensors) if experts == "per_expert" else _fused_experts(tensors)
    stored: dict[str, torch.Tensor] = {}
    kept: list[str] = []
    for name, tensor in arranged.items():
        module = name.removesuffix(".weight")
        if format == "fp8" and FP8_MODULE.fullmatch(module):
            stored[name], stored[f"{module}_scale_inv" if module == name else f"{module}.weight_scale_inv"] = quantize_fp8_block(tensor)
        else:
            stored[name] = tensor.to(_FLOAT_FORMATS[format])
            kept.append(module)
    shards = _shards(stored, max_shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    strangers = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names)
    if strangers:
        raise CheckpointError(f"{folder}: holds other weights ({strangers[0]}); write into an empty folder.")
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, {"format": "pt"})
    if with_index:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in stored.values())
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if format == "fp8":
        config["quantization_config"] = fp8_config(kept)
    write_json(folder / "config.json", config)


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one file: widest elements first and the header padded, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": dtype_code(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as stream:
        stream.write(len(raw).to_bytes(8, "little"))
        stream.write(raw)
        for name in order:
            # numpy knows neither bfloat16 nor float8, but it knows bytes.
            stream.write(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def write_json(path: Path, value: object) -> None:
    """UTF-8 JSON with a final newline, the same bytes on every system."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_bytes(text.encode("utf-8"))


def _separate_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            base = f"{match['base']}.{expert}."
            if match["which"] == "down_proj":
                result[f"{base}down_proj.weight"] = matrix
            else:
                result[f"{base}gate_proj.weight"], result[f"{base}up_proj.weight"] = matrix.chunk(2)
    return result


def _fused_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    groups: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _SEPARATE.fullmatch(name)
        if match is None:
            result[name] = tensor
        else:
            groups.setdefault(match["base"], {})[int(match["expert"]), match["which"]] = tensor
    for base, group in groups.items():
        count = 1 + max(expert for expert, _ in group)
        result[f"{base}.gate_up_proj"] = torch.stack([torch.cat([group[e, "gate"], group[e, "up"]]) for e in range(count)])
        result[f"{base}.down_proj"] = torch.stack([group[e, "down"] for e in range(count)])
    return result


def _shards(tensors: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def fp8_config(kept: list[str]) -> dict:
    """The `quantization_config` of the official FP8 repository, its skip list made from the modules left alone."""
    skip = dict.fromkeys(_skip_name(module) for module in kept)
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(skip),
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }


def _skip_name(module: str) -> str:
    if ".visual." in module or module.startswith("visual."):
        return "model.visual"
    if module.endswith("embed_tokens"):
        return "model.embed_tokens"  # the official list leaves out "language_model" here
    return module
