"""Measure a trained network on held-out lessons: greedy answers, scored fact by fact.

    python tools/demo_model/training/evaluate.py FOLDER [--lessons 256] [--device cuda] [--show 2] [--grammar]

FOLDER is what train.py wrote, or an exported checkpoint (FP8 is measured as FP8). Without a grammar many lessons are
answered at once; `--grammar` measures scripts as the Generate node writes them: by the engine, one by one, each token
held to the script's schema. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.demo_model.training.generate import greedy  # the line above makes it importable
from tools.demo_model.training.network import Network
from tools.demo_model.training.store import read_weights
from tools.demo_model.training.tokens import Encoder
from tools.demo_model.world import FORM_FACTS, PICTURE_FACTS, STORY_FACTS, add, sample, score

FIRST_SEED = 1 << 41  # beyond every training seed's group
AT_ONCE = 128
MOST_TOKENS = 1100
SCRIPTS = ("script_full", "script_short")
LOOKS = ("inventory", "question", "describe", "tags")


def evaluate(network: Network, encoder: Encoder, lessons: int, *, most: int = MOST_TOKENS, show: int = 0) -> dict[str, Any]:
    """Scores of `lessons` held-out scripts (full and short ones in turn) and as many requests about pictures alone.

    Per fact {"right", "asked", "share"}; over picture and story facts together; strictly valid JSON with the right
    number of panels.
    """
    began = time.perf_counter()
    scripts = _measure(network, encoder, [_script(number) for number in range(lessons)], most, show)
    looks = _measure(network, encoder, [sample(FIRST_SEED + 2 * lessons + n, True, LOOKS[n % len(LOOKS)]) for n in range(lessons)], 200, 0)
    return {"lessons": lessons, "scripts": scripts, "pictures": looks, "seconds": round(time.perf_counter() - began, 1)}


def _script(number: int) -> Any:
    return sample(FIRST_SEED + number, True, SCRIPTS[number % 2])


def _measure(network: Network, encoder: Encoder, lessons: list, most: int, show: int) -> dict[str, Any]:
    encoded = [encoder.encode(lesson) for lesson in lessons]
    # Alike long answers together: a batch takes as long as its longest.
    order = sorted(range(len(lessons)), key=lambda n: (lessons[n].kind, len(encoded[n].prompt)))
    texts: dict[int, str] = {}
    for first in range(0, len(order), AT_ONCE):
        part = order[first : first + AT_ONCE]
        answers = greedy(
            network, [encoded[n] for n in part], [lessons[n].picture for n in part],
            end_id=encoder.end_id, allowed=encoder.tokenizer.size, most=most,
        )  # fmt: skip
        texts.update((n, encoder.tokenizer.decode(answer)) for n, answer in zip(part, answers, strict=True))
    return _tally(lessons, [texts[n] for n in range(len(lessons))], show)


def evaluate_with_grammar(folder: Path, lessons: int, *, device: str = "cpu", show: int = 0) -> dict[str, Any]:
    """Scores of `lessons` held-out scripts, as `evaluate` gives them, under the grammar of the Generate node."""
    from a3b_engine import Engine, Prompt, SamplingParams
    from a3b_engine.script.grammar import comic_json_schema

    began = time.perf_counter()
    engine, scripts, texts = Engine.load(folder, device=device), [_script(number) for number in range(lessons)], []
    sampling = SamplingParams(max_new_tokens=2 * MOST_TOKENS, temperature=0.0)
    for lesson in scripts:
        prompt = Prompt(user=lesson.user, system=lesson.system, images=engine.encode_image(lesson.picture))
        schema = comic_json_schema(lesson.panels, lesson.rounds, brief=lesson.kind == "script_short")
        texts.append(engine.generate(prompt, sampling, schema=schema).text)
    engine.close()
    return {"lessons": lessons, "scripts": _tally(scripts, texts, show), "seconds": round(time.perf_counter() - began, 1)}


def _tally(lessons: list, texts: list[str], show: int) -> dict[str, Any]:
    total: dict[str, tuple[int, int]] = {}
    for number, lesson in enumerate(lessons):
        readable = not lesson.kind.startswith("script") or _strict(texts[number], lesson.panels)
        total = add(total, score(texts[number] if readable else "", lesson.facts))
        if lesson.kind.startswith("script"):
            total = add(total, {"strict_json": (int(readable), 1)})
        if number < show:
            print(texts[number], file=sys.stderr)
    result = {name: _share(*pair) for name, pair in sorted(total.items())}
    for group, names in (("all_picture", PICTURE_FACTS), ("all_story", STORY_FACTS), ("all_form", FORM_FACTS)):
        pairs = [total[name] for name in names if name in total]
        if pairs:
            result[group] = _share(sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
    return result


def _strict(text: str, panels: int) -> bool:
    """Whether the answer is JSON as it stands, with the number of panels that was asked for."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and isinstance(value.get("panels"), list) and len(value["panels"]) == panels


def _share(right: int, asked: int) -> dict[str, Any]:
    return {"right": right, "asked": asked, "share": round(right / asked, 4) if asked else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lessons", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--show", type=int, default=0, help="print this many answers")
    parser.add_argument("--grammar", action="store_true", help="scripts only, by the engine under the grammar (needs a whole checkpoint)")
    arguments = parser.parse_args()
    if arguments.grammar:
        print(json.dumps(evaluate_with_grammar(arguments.folder, arguments.lessons, device=arguments.device, show=arguments.show), indent=1))
        return 0
    config, weights = read_weights(arguments.folder)
    network = Network(config, weights, arguments.device)
    rows, columns = network.grid(384)
    result = evaluate(network, Encoder(arguments.folder, rows * columns), arguments.lessons, show=arguments.show)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
