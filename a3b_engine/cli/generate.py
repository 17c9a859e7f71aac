"""`generate`: one answer from a checkpoint folder, streamed to the terminal or as a JSON object."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from ..errors import ImageError, MemoryBudgetError, PromptError
from .console import CUT, print_json


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="write an answer", description="Write one answer; text goes to standard output as it appears.")
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="checkpoint folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="user text; [[IMG]] or [[IMG:2]] places pictures; @FILE reads a UTF-8 file")
    parser.add_argument("--system", default="", metavar="TEXT", help="system text; @FILE reads a UTF-8 file")
    parser.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="picture, may be repeated")
    parser.add_argument("--image-size", type=int, default=384, metavar="PX", help="encoder input size (default %(default)s)")
    parser.add_argument("--fit", default="keep", choices=("keep", "letterbox", "crop", "stretch"))
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--schema", type=Path, metavar="FILE", help="JSON schema the answer must follow")
    shape.add_argument("--comic", type=int, metavar="N", help="answer with a comic script of N panels")
    shape.add_argument("--regex", metavar="RE", help="regular expression the answer must match")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds of dialogue with --comic (default %(default)s)")
    parser.add_argument("--thinking", action="store_true", help="let the model think first")
    parser.add_argument("--thinking-budget", type=int, metavar="N", help="close the thinking after N tokens")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="limit of the answer (default 4096 with --comic or --schema, else 1024)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="0 to 2^64-1 (default %(default)s)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends the answer, may be repeated")
    parser.add_argument("--device", default="auto", help="cpu, cuda:0, ...; auto: the first CUDA card, else the CPU (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="compute type (default: float32 on a CPU, bfloat16 on a GPU)")
    parser.add_argument("--expert-format", choices=("stored", "int4", "int3"), default="stored", help="routed experts as in the file, or rounded to 4 or 3 bits while loading (default %(default)s)")
    parser.add_argument("--cache-experts", action="store_true", help="with --expert-format int4 or int3: keep the rounded experts in a folder beside the checkpoint's files and read them from there next time")
    parser.add_argument("--vram-gb", type=float, default=0.0, metavar="GB", help="hold no more than this on the device; experts that do not fit wait in RAM (0: no cap)")
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="most tokens of prompt and answer (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 when an answer that must have a form was cut before its end; bad input raises `A3BError` or `OSError`, which the caller prints in one line."""
    import torch

    from ..engine import Engine
    from ..prompt import Prompt, build_messages
    from ..sampling import SamplingParams

    schema = _read_text(options.schema) if options.schema else None
    if options.comic is not None:
        from ..script.grammar import comic_json_schema

        schema = comic_json_schema(options.comic, options.rounds)
    limit = options.max_new_tokens
    if limit is None:
        limit = 1024 if schema is None else 4096
    sampling = SamplingParams(
        max_new_tokens=limit,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=tuple(options.stop),
        thinking_budget=options.thinking_budget,
    )
    if not (math.isfinite(options.vram_gb) and options.vram_gb >= 0):
        raise MemoryBudgetError(f"--vram-gb: found {options.vram_gb}, expected gigabytes, or 0 for no cap.")
    budget = math.ceil(options.vram_gb * 1e9) or None
    pictures = [_open_picture(path) for path in options.image]
    prompt = Prompt(user=_text(options.prompt), system=_text(options.system), images=pictures)
    build_messages(prompt)  # wrong markers are said before gigabytes are read
    device = options.device
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    engine = Engine.load(
        options.model, device, dtype=options.dtype, vram_budget=budget, context=options.context,
        expert_format=options.expert_format, cache_experts=options.cache_experts,
    )  # fmt: skip
    if pictures:
        prompt = replace(prompt, images=engine.encode_image(pictures, options.image_size, options.fit))

    def show(event) -> None:
        if not event.thinking:
            sys.stdout.write(event.text)
            sys.stdout.flush()

    answer = engine.generate(
        prompt, sampling, schema=schema, regex=options.regex, thinking=options.thinking, on_token=None if options.json else show
    )
    if options.json:
        print_json({**answer.to_dict(), "model": engine.name, "memory": engine.memory()})
    else:
        print()
        timings = answer.timings
        print(f"{answer.status} {timings.tokens_per_second:.1f} tokens/s, first token after {timings.time_to_first_token:.2f} s", file=sys.stderr)
    constrained = schema is not None or options.regex is not None
    return CUT if constrained and answer.finish_reason == "length" else 0


def _text(value: str) -> str:
    return _read_text(Path(value[1:])) if value.startswith("@") else value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: not UTF-8 text ({error}).") from error


def _open_picture(path: Path):
    from PIL import Image, ImageOps

    if not path.is_file():
        raise ImageError(f"--image {path}: there is no such file.")
    with open(path, "rb") as stream:
        try:
            return ImageOps.exif_transpose(Image.open(stream))  # a loaded copy, so that the file can be closed
        except Exception as error:  # Pillow's decoders fail on damaged files in many ways
            raise ImageError(f"{path}: not a picture that can be read ({error}). Is it whole?") from error
