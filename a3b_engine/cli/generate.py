"""`generate`: one answer from a checkpoint folder, streamed to the terminal or as a JSON object."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError, ImageError, MemoryBudgetError, PromptError
from ..prompt import Prompt, build_messages
from ..sampling_presets import SCRIPT, chosen_numbers
from ..script.instructions import LANGUAGES, NO_PRESET, PRESET_NAMES, form_of, system_text, with_choices
from ..script.presets import JOBS, PRESETS
from .console import CUT, note, print_json, say

USUAL_PANELS = 4  # as the widgets of the Generate and Build nodes
USUAL_ROUNDS = 4
USUAL_PROMPT_LANGUAGE = "English"
COMIC_PRESET = "western"  # of --comic alone; the example workflow's
# Sampling numbers where nothing is asked; a comic script takes those of the Generate node.
_FREE = {
    "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="write an answer", description="Write one answer; text goes to standard output as it appears.")
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="checkpoint folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="user text; [[IMG]] or [[IMG:2]] places pictures; @FILE reads a UTF-8 file")
    parser.add_argument("--system", default="", metavar="TEXT", help="system text, after that of the preset; @FILE reads a UTF-8 file")
    parser.add_argument(
        "--preset", choices=PRESET_NAMES, metavar="NAME",
        help=f"ready instructions, as in Build [[IMG]] Prompt: {', '.join(PRESET_NAMES)}; a comic ({' to '.join((*PRESETS,)[:: len(PRESETS) - 1])}) means --comic too"
        f" (default: {COMIC_PRESET} with --comic and no --system, else {NO_PRESET})",
    )  # fmt: skip
    parser.add_argument("--language", choices=LANGUAGES, metavar="NAME", help=f"language of the answer, in a comic of captions and dialogue: {', '.join(LANGUAGES)} (default: that of the text)")
    parser.add_argument("--prompt-language", choices=LANGUAGES, metavar="NAME", help=f"language of what an image model reads in a comic script (default {USUAL_PROMPT_LANGUAGE})")
    parser.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="picture, may be repeated")
    parser.add_argument("--image-size", type=int, default=384, metavar="PX", help="encoder input size (default %(default)s)")
    parser.add_argument("--fit", default="keep", choices=("keep", "letterbox", "crop", "stretch"))
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--schema", type=Path, metavar="FILE", help="JSON schema the answer must follow")
    shape.add_argument("--comic", type=int, nargs="?", const=USUAL_PANELS, metavar="N", help="answer with a comic script of N panels (default %(const)s)")
    shape.add_argument("--regex", metavar="RE", help="regular expression the answer must match")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rows of dialogue in the whole comic script (default {USUAL_ROUNDS})")
    parser.add_argument("--short", action="store_true", help="a comic script with fewer fields, a quarter of the tokens")
    parser.add_argument("--thinking", action="store_true", help="let the model think first")
    parser.add_argument("--thinking-budget", type=int, metavar="N", help="close the thinking after N tokens")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="limit of the answer (default 4096 for a comic script or --schema, else 1024)")
    script = chosen_numbers(SCRIPT, {})
    for name, usual in _FREE.items():
        other = "" if script[name] == usual else f"; {script[name]:g} for a comic script"
        words = "0 is greedy " if name == "temperature" else ""
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(usual), metavar="N" if isinstance(usual, int) else "X", help=f"{words}(default {usual:g}{other})")
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
    from ..sampling import SamplingParams

    _check_forms(options)
    system = _text(options.system)
    panels, preset = _panels(options), _preset(options, system)
    rounds = USUAL_ROUNDS if options.rounds is None else options.rounds
    schema = _read_text(options.schema) if options.schema else None
    if panels is not None:
        from ..script.grammar import comic_json_schema

        schema = comic_json_schema(panels, rounds, brief=options.short)
    limit = options.max_new_tokens
    if limit is None:
        limit = 1024 if schema is None else 4096
    sampling = SamplingParams(
        max_new_tokens=limit,
        **_numbers(options, script=panels is not None),
        seed=options.seed,
        stop=tuple(options.stop),
        thinking_budget=options.thinking_budget,
    )
    if not (math.isfinite(options.vram_gb) and options.vram_gb >= 0):
        raise MemoryBudgetError(f"--vram-gb: found {options.vram_gb}, expected gigabytes, or 0 for no cap.")
    budget = math.ceil(options.vram_gb * 1e9) or None
    pictures = [_open_picture(path) for path in options.image]
    system = system_text(preset, system, options.language, options.prompt_language or USUAL_PROMPT_LANGUAGE)
    prompt = Prompt(user=_text(options.prompt), system=system, images=pictures, form=form_of(preset))
    prompt = with_choices(prompt, panels or USUAL_PANELS, rounds, options.short)
    build_messages(prompt)  # wrong markers are said before gigabytes are read
    if panels is None and (idle := _comic_options(options, system)):
        note(f"generate: {', '.join(idle)}: no effect without a comic script (--comic, or --preset {', '.join(PRESETS)})")
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
            say(event.text, end="")

    answer = engine.generate(
        prompt, sampling, schema=schema, regex=options.regex, thinking=options.thinking, on_token=None if options.json else show
    )
    if options.json:
        print_json({**answer.to_dict(), "model": engine.name, "memory": engine.memory()})
    else:
        say()
        timings = answer.timings
        note(f"{answer.status} {timings.tokens_per_second:.1f} tokens/s, first token after {timings.time_to_first_token:.2f} s")
    constrained = schema is not None or options.regex is not None
    return CUT if constrained and answer.finish_reason == "length" else 0


def _check_forms(options: argparse.Namespace) -> None:
    """Refuse instructions for one form of answer with a grammar for another."""
    preset = options.preset
    if preset in JOBS and options.comic is not None:
        raise ConfigError(f"--preset {preset} and --comic: the first asks for plain text, the second for a comic script. Leave one out, or name a comic preset: {', '.join(PRESETS)}.")
    other = "--schema" if options.schema is not None else "--regex" if options.regex is not None else None
    if preset in PRESETS and other:
        raise ConfigError(f"--preset {preset} and {other}: the first asks for a comic script, the second for an answer of another form. Leave one out; --system takes instructions of your own.")


def _panels(options: argparse.Namespace) -> int | None:
    """Panels of a comic script; None where the answer is something else. A comic preset asks for one, as in the nodes."""
    return USUAL_PANELS if options.comic is None and options.preset in PRESETS else options.comic


def _preset(options: argparse.Namespace, system: str) -> str:
    if options.preset is None and options.comic is not None and not system.strip():
        return COMIC_PRESET
    return options.preset or NO_PRESET


def _comic_options(options: argparse.Namespace, system: str) -> list[str]:
    """The options for a comic script that were given; without those for which the system text itself has a place."""
    given = {
        "--short": options.short and "{{short|" not in system,
        "--rounds": options.rounds is not None and "{{rounds}}" not in system,
        "--prompt-language": options.prompt_language is not None,
    }
    return [name for name, is_given in given.items() if is_given]


def _numbers(options: argparse.Namespace, script: bool) -> dict[str, float]:
    """Sampling numbers: those that were given, the others as usual for a script or for free text."""
    usual = chosen_numbers(SCRIPT, {}) if script else _FREE
    given = {name: getattr(options, name) for name in usual}
    return {name: usual[name] if value is None else value for name, value in given.items()}


def _text(value: str) -> str:
    return _read_text(Path(value[1:])) if value.startswith("@") else value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: not UTF-8 text ({error}).") from error


def _open_picture(path: Path):
    from PIL import Image, ImageOps

    if path.is_dir():
        raise ImageError(f"--image {path}: this is a folder. Give the file of a picture; --image may be repeated.")
    if not path.is_file():
        raise ImageError(f"--image {path}: {'this is no ordinary file' if path.exists() else 'there is no such file'}.")
    with open(path, "rb") as stream:
        try:
            return ImageOps.exif_transpose(Image.open(stream))  # a loaded copy, so that the file can be closed
        except Exception as error:  # Pillow's decoders fail on damaged files in many ways
            raise ImageError(f"{path}: not a picture that can be read ({error}). Is it whole?") from error
