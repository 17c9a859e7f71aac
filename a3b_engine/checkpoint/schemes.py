"""How each module of a checkpoint is stored, decided from the tensors that stand beside each other.

One table: a row recognises one storage format by its sibling tensors (names first; the configuration is only
quoted in messages). Rows with a `scheme` are read by `plan.py`; the others are refused by name. To add a format,
give its row a scheme and teach the plan that scheme.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import CheckpointError, UnsupportedFormatError
from .dtypes import FP8_CODES, SCALE_CODES
from .header import TensorInfo, shown

ADVICE = "Use the official FP8 or BF16 repository (for example Qwen/Qwen3.5-35B-A3B-FP8)."


@dataclass(frozen=True)
class Module:
    """The tensors of one module: `parts` maps "weight", "weight_scale_inv", ... to where they lie."""

    name: str
    parts: Mapping[str, TensorInfo]

    def dtype(self, part: str) -> str | None:
        info = self.parts.get(part)
        return None if info is None else info.dtype

    def has(self, *parts: str) -> bool:
        return any(part in self.parts for part in parts)

    def has_like(self, *fragments: str) -> bool:
        return any(fragment in part for part in self.parts for fragment in fragments)


@dataclass(frozen=True)
class Format:
    """One row: `scheme` is None for formats that are recognised only to be refused."""

    name: str
    matches: Callable[[Module], bool]
    scheme: str | None = None
    advice: str = ADVICE


def _is_mxfp8(module: Module) -> bool:
    weight, scale = module.parts.get("weight"), module.parts.get("weight_scale")
    if weight is None or scale is None or weight.dtype not in FP8_CODES or scale.dtype not in ("U8", "F8_E8M0"):
        return False
    rows, columns = (weight.shape[-2], weight.shape[-1]) if len(weight.shape) >= 2 else (1, 0)
    return rows > 1 and scale.shape[-2:] == (rows, -(-columns // 32))


# First match wins: ComfyUI files share suffixes with ModelOpt but not its byte order, so they come first.
FORMATS: tuple[Format, ...] = (
    Format("ComfyUI single-file quantization", lambda m: m.has("comfy_quant", "scaled_fp8", "scale_weight", "scale_input")),
    Format("SVDQuant (Nunchaku / ModelOpt NVFP4_SVD)", lambda m: m.has_like("svdquant_lora", "proj_down", "smooth_factor")),
    Format("ModelOpt AWQ (activation pre-scaling)", lambda m: m.has("pre_quant_scale")),
    Format("MXFP4 (compressed-tensors)", lambda m: m.dtype("weight_packed") == "U8" and m.dtype("weight_scale") in ("U8", "F8_E8M0")),
    Format("NVFP4 (compressed-tensors)", lambda m: m.dtype("weight_packed") == "U8", scheme="nvfp4_ct"),
    Format("int4 of two scales (ModelOpt W4A8)", lambda m: m.has("weight_scale_2") and m.dtype("weight_scale") not in ("F8_E4M3", None)),
    Format("FP4 in elements of 4 bits", lambda m: m.dtype("weight") == "F4"),
    Format("NVFP4 (ModelOpt)", lambda m: m.dtype("weight") == "U8" and _is_nvfp4(m), scheme="nvfp4_modelopt"),
    Format("MXFP4 (fused blocks)", lambda m: m.has("weight_blocks")),
    Format("MXFP8", _is_mxfp8),
    Format("int4 (compressed-tensors pack-quantized)", lambda m: m.has("weight_packed"), scheme="int4_ct"),
    Format("AWQ", lambda m: m.has("qweight") and _packs_output_columns(m), scheme="awq"),
    Format("GPTQ", lambda m: m.has("qweight"), scheme="gptq"),
    Format("MLX", lambda m: m.has("scales") and m.dtype("weight") == "U32"),
    Format("bitsandbytes 4-bit", lambda m: m.has_like("quant_state", "weight.absmax", "weight.nested_absmax")),
    Format("bitsandbytes int8", lambda m: m.has("SCB", "weight_format")),
    Format("EXL3", lambda m: m.has("trellis", "suh", "svh")),
    Format("EXL2", lambda m: m.has("q_weight", "q_scale", "q_invperm")),
    Format("HQQ", lambda m: m.has("W_q")),
    Format("torchao (flattened tensor subclasses)", lambda m: m.has_like("__qdata", "weight_qdata", "tensor_impl")),
    Format("Quanto", lambda m: m.has("weight._data", "weight._scale")),
    Format("Marlin / QQQ packed int4", lambda m: m.dtype("B") in ("I32", "U32") and m.has("s", "s_channel", "s_group")),
    Format("int8", lambda m: m.dtype("weight") in ("I8", "U8") and m.has("weight_scale", "weight_scale_inv", "scale")),
    Format("few bits made by this engine", lambda m: m.has("codes") and m.has("scale"), scheme="a3b"),
    Format("FP8", lambda m: m.dtype("weight") in FP8_CODES and m.has("weight_scale_inv", "weight_scale"), scheme="fp8"),
    Format("FP8 without a scale", lambda m: m.dtype("weight") in FP8_CODES, scheme="fp8_without_scale"),
    Format("FP8 FNUZ", lambda m: m.dtype("weight") in ("F8_E4M3FNUZ", "F8_E5M2FNUZ")),
    Format("dense float", lambda m: True, scheme="dense"),
)


def _is_nvfp4(module: Module) -> bool:
    """Bytes with E4M3 scales are FP4 pairs; the scale of the whole tensor may be lacking, which the plan reports."""
    return module.has("weight_scale_2") or module.dtype("weight_scale") == "F8_E4M3"


def _packs_output_columns(module: Module) -> bool:
    """AWQ packs 8 outputs per word ([K, N/8] beside scales [K/g, N]); GPTQ packs along K ([K/8, N])."""
    qweight, scales = module.parts["qweight"], module.parts.get("scales")
    return scales is not None and len(qweight.shape) == 2 and bool(scales.shape) and scales.shape[-1] == 8 * qweight.shape[1]


_FUSED = re.compile(r"(?P<module>.*\.experts\.(?:gate_up_proj|down_proj))(?:_(?P<part>[a-z0-9_]+))?")


def split_name(name: str) -> tuple[str, str]:
    """(module, part) of a tensor name: "a.q_proj.weight_scale" -> ("a.q_proj", "weight_scale").

    Fused experts carry no ".weight": "experts.gate_up_proj" is the part "weight" of its module and
    "experts.gate_up_proj_scale_inv" the part "weight_scale_inv".
    """
    fused = _FUSED.fullmatch(name)
    if fused:
        return fused["module"], "weight" if fused["part"] is None else f"weight_{fused['part']}"
    module, middle, part = name.partition(".weight.")
    if middle:
        return module, f"weight.{part}"
    module, _, part = name.rpartition(".")
    return module, part


def group_modules(tensors: Iterable[TensorInfo]) -> dict[str, Module]:
    """Modules by name, each with all the tensors that share its prefix."""
    groups: dict[str, dict[str, TensorInfo]] = {}
    for info in tensors:
        module, part = split_name(info.name)
        groups.setdefault(module, {})[part] = info
    return {name: Module(name, parts) for name, parts in groups.items()}


def classify(module: Module) -> Format:
    """The first row of FORMATS that recognises `module`."""
    if module.parts.keys() <= _USUAL_PARTS:
        return _classify_usual(tuple((part, info.dtype) for part, info in module.parts.items()))
    return next(row for row in FORMATS if row.matches(module))


# The 31,000 modules of the official files; none of the rows that look at shapes applies to these parts.
_USUAL_PARTS = frozenset({"weight", "bias", "weight_scale_inv"})


@lru_cache(maxsize=1024)
def _classify_usual(dtypes: tuple[tuple[str, str], ...]) -> Format:
    module = Module("", {part: TensorInfo(part, Path(), dtype, (), 0, 0) for part, dtype in dtypes})
    return next(row for row in FORMATS if row.matches(module))


def refuse_unsupported(modules: Iterable[Module], metadata: Mapping[str, str], quantization: Mapping, folder: Path) -> None:
    """Raise UnsupportedFormatError naming the format and an example tensor, or CheckpointError for scale-less FP8."""
    declared = _declared_format(quantization)
    if metadata.get("format") == "mlx":
        # Even unquantised MLX files differ silently: their norms hold w + 1 and conv1d is transposed.
        raise UnsupportedFormatError(f"{folder}: an MLX conversion (its header says format mlx). {ADVICE}")
    if "_quantization_metadata" in metadata:
        raise UnsupportedFormatError(f"{folder}: ComfyUI single-file quantization (its header says so). {ADVICE}")
    for module in modules:
        row = classify(module)
        if row.scheme is None:
            example = next(iter(module.parts.values()))
            raise UnsupportedFormatError(
                f"{folder}: stored as {row.name}{declared}, which this engine does not read "
                f"(for example tensor {shown(example.name)}, {example.dtype} {list(example.shape)}). {row.advice}"
            )
        if row.scheme == "fp8_without_scale":
            info = module.parts["weight"]
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} is {info.dtype} but no weight_scale_inv or weight_scale stands beside "
                f"it; without its scale the weight is meaningless. Incomplete download, or a plain cast to FP8. {ADVICE}"
            )


def _declared_format(quantization: Mapping) -> str:
    words = [quantization.get(key) for key in ("quant_method", "format", "checkpoint_format", "quant_algo")]
    words = [shown(word, 40) for word in words if isinstance(word, str) and word]
    return f" (config.json says {', '.join(words)})" if words else ""


_FOREIGN_FILES = (
    ("GGUF", (".gguf",)),
    ("OpenVINO", ("openvino_model.xml", "openvino_language_model.xml")),
    ("ONNX", (".onnx",)),
    ("MLX arrays", (".npz",)),
    ("PyTorch pickle (never opened: a pickle can run code)", (".bin", ".pt", ".pth", ".ckpt")),
)


def refuse_foreign_files(folder: Path, names: Iterable[str]) -> None:
    """UnsupportedFormatError when a folder without safetensors holds another kind of model file."""
    names = list(names)
    for format_name, endings in _FOREIGN_FILES:
        for name in names:
            if name.lower().endswith(endings):
                raise UnsupportedFormatError(
                    f"{folder}: stored as {format_name} ({shown(name)}), which this engine does not read. {ADVICE}"
                )


@dataclass(frozen=True)
class ScaleLayout:
    """How a scale tensor covers its weight: `block` rows x columns share one value.

    `shape` is the scale as [n, k] per matrix (a view of the file's bytes); `broadcast` is True when the single
    value in the file serves every matrix of a stack.
    """

    block: tuple[int, int]
    shape: tuple[int, int]
    broadcast: bool = False


def scale_of(module: Module) -> TensorInfo:
    """The FP8 scale tensor of `module`; both at once is ambiguous and refused."""
    found = [module.parts[part] for part in ("weight_scale_inv", "weight_scale") if part in module.parts]
    if len(found) > 1:
        raise CheckpointError(f"{found[0].file}: both {shown(found[0].name)} and {shown(found[1].name)} are present; keep one.")
    if found[0].dtype not in SCALE_CODES:
        raise CheckpointError(
            f"{found[0].file}: scale {shown(found[0].name)} has dtype {found[0].dtype}; expected one of {', '.join(SCALE_CODES)}."
        )
    return found[0]


def scale_layout(weight: TensorInfo, scale: TensorInfo, declared_block: tuple[int, int] | None) -> ScaleLayout:
    """Per-tensor, per-channel or block, by the scale's shape; the declared block size only when it fits.

    weight [N, K] or a stack [E, N, K]. Accepted scales, each with the stack's leading E: scalar, [N] or [N, 1],
    [ceil(N/bn), ceil(K/bk)], and ModelOpt's [N/bn, 1, K/bk, 1].
    """
    *lead, rows, columns = weight.shape
    count = lead[0] if lead else 1
    shape = list(scale.shape)
    elements = 1
    for size in shape:
        elements *= size
    if elements == 1:
        return ScaleLayout((rows, columns), (1, 1), broadcast=count > 1)
    if lead:
        if not shape or shape[0] != count:
            raise _scale_error(weight, scale, declared_block)
        shape = shape[1:]
    if len(shape) == 4 and shape[1] == 1 and shape[3] == 1:
        shape = [shape[0], shape[2]]
    if elements == count:
        return ScaleLayout((rows, columns), (1, 1))
    if shape in ([rows], [rows, 1]):
        return ScaleLayout((1, columns), (rows, 1))
    for block in (declared_block, (128, 128)):
        if block and shape == [-(-rows // block[0]), -(-columns // block[1])]:
            return ScaleLayout(block, (shape[0], shape[1]))
    raise _scale_error(weight, scale, declared_block)


def _scale_error(weight: TensorInfo, scale: TensorInfo, declared_block) -> CheckpointError:
    return CheckpointError(
        f"{scale.file}: scale {shown(scale.name)} {list(scale.shape)} fits weight {list(weight.shape)} neither per tensor, nor "
        f"per channel, nor in blocks of {list(declared_block or (128, 128))}. Damaged or an unknown variant. {ADVICE}"
    )


def declared_block_size(quantization: Mapping) -> tuple[int, int] | None:
    """The block size a config declares (`weight_block_size`, or compressed-tensors `block_structure`), if sane."""
    found = [quantization.get("weight_block_size")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    for block in found:
        if isinstance(block, (list, tuple)) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
    return None
