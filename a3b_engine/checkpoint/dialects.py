"""What a checkpoint's configuration says about 4-bit tensors that look alike but do not mean the same.

The tensors decide the format. These questions the bytes cannot answer: NVFP4 of ModelOpt or of ComfyUI (other byte
order), zeros of GPTQ's first or second version, AWQ's packing order, rotations that belong to the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, UnsupportedFormatError
from .header import parse_json_object, shown

_COMPANIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_COMPANION_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Dialect:
    """The declarations that matter. method: lower case, "" where nothing says. formats: of compressed-tensors, all of them.

    gptq_format: "gptq" (stored zeros are one too low) or "gptq_v2". symmetric: GPTQ's zeros are all 8. carries: zeros of the
    first version were lowered as whole words, so that a zero of 0 borrowed from its neighbour (GPTQModel does so).
    """

    method: str
    formats: frozenset[str]
    gptq_format: str
    awq_version: str
    symmetric: bool
    reordered: bool
    rotated: bool
    carries: bool


def dialect_of(quantization: Mapping, folder: Path) -> Dialect:
    """From config.json's `quantization_config`; older exports keep it, or part of it, in a file beside config.json."""
    merged = {**_companion(folder), **quantization}
    groups = merged.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    schemes = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
    formats = {_word(part.get("format")) for part in (merged, *groups)} - {"", "mixed-precision"}
    meta = merged.get("meta")
    method = _word(merged.get("quant_method")) or _word(merged.get("method"))
    return Dialect(
        method=method,
        formats=frozenset(formats),
        gptq_format=_word(merged.get("checkpoint_format")) or _word(merged.get("format")) or "gptq",
        awq_version=_word(merged.get("version")) or _word(merged.get("checkpoint_format")) or _word(merged.get("format")) or "gemm",
        symmetric=merged.get("sym") is True,
        reordered=merged.get("desc_act") is True or any(_word(scheme.get("actorder")) == "group" for scheme in schemes),
        rotated=any(_is_set(part.get(key)) for part in (merged, meta if isinstance(meta, Mapping) else {}) for key in ("transform_config", "rotation")),
        carries="gptqmodel" in str(meta.get("quantizer") if isinstance(meta, Mapping) else "").lower(),
    )


def _is_set(value: object) -> bool:
    """Whether something is declared: not null, empty, or an object of nothing but empty ones."""
    return any(map(_is_set, value.values())) if isinstance(value, Mapping) else bool(value)


def require_known_dialect(scheme: str, dialect: Dialect, example: str, folder: Path) -> None:
    """UnsupportedFormatError where tensors like those of `scheme` (`example` is one) are declared to be something else."""
    reason = _refusal(scheme, dialect)
    if reason:
        raise UnsupportedFormatError(
            f"{folder}: {reason} (for example tensor {shown(example)}). "
            "Use a repository of another 4-bit form that this engine reads, or the official FP8 or BF16 one."
        )


def _refusal(scheme: str, dialect: Dialect) -> str:
    method, formats = shown(dialect.method, 40), ", ".join(shown(word, 40) for word in sorted(dialect.formats))
    if dialect.rotated:
        return "the configuration declares a rotation of the weights (transform_config or rotation), which this engine does not undo"
    if scheme in ("nvfp4_ct", "int4_ct"):
        expected = "nvfp4-pack-quantized" if scheme == "nvfp4_ct" else "pack-quantized"
        if dialect.method not in ("", "compressed-tensors"):
            return f"tensors of compressed-tensors, but the configuration says {method}"
        if dialect.formats and expected not in dialect.formats:
            return f"tensors of compressed-tensors' {expected}, but the configuration says {formats}"
    elif scheme == "nvfp4_modelopt":
        if not dialect.method.startswith("modelopt"):
            said = f"says {method}" if method else "does not say so"
            return f"NVFP4 tensors named as ModelOpt and ComfyUI both name them, in different byte orders; the configuration {said}, modelopt expected"
    elif scheme == "gptq":
        if dialect.method != "gptq":
            said = f"says {method}" if method else "says nothing"
            return f"GPTQ tensors, but the configuration {said}; without quant_method gptq the offset of their zeros is unknown"
        if dialect.gptq_format not in ("gptq", "gptq_v2"):
            return f"GPTQ in the format {shown(dialect.gptq_format, 40)}; gptq and gptq_v2 are read"
    elif scheme == "awq":
        if dialect.method != "awq":
            said = f"says {method}" if method else "says nothing"
            return f"AWQ tensors, but the configuration {said}; quant_method awq expected"
        if dialect.awq_version != "gemm":
            return f"AWQ in the version {shown(dialect.awq_version, 40)}; gemm is read"
    return ""


def _companion(folder: Path) -> dict:
    """The declarations of the first such file that is there."""
    for name in _COMPANIONS:
        path = folder / name
        if not path.is_file():
            continue
        try:
            if path.stat().st_size > _COMPANION_BYTES:
                raise CheckpointError(f"{path}: larger than {_COMPANION_BYTES} bytes; this is not a configuration.")
            content = parse_json_object(path.read_bytes(), str(path))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from None
        if name == "hf_quant_config.json":
            producer = content.get("producer")
            return {"quant_method": producer.get("name")} if isinstance(producer, Mapping) else {}
        return {"quant_method": "gptq" if name == "quantize_config.json" else "awq", **content}
    return {}


def _word(value: object) -> str:
    return value.lower() if isinstance(value, str) else ""
