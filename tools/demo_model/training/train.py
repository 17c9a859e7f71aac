"""Train the small demonstration model on drawn lessons.

    python tools/demo_model/training/train.py --minutes 20 --out RESULTS --work STATE [--resume]
    python tools/demo_model/training/train.py --smoke --out RESULTS

Made for one H200 with 16 CPU cores. `--minutes` is the time of the whole training; one call trains for at most
`--piece-minutes` of it, and the same command with `--resume` goes on. RESULTS gets the weights, tokenizer.json, run.json
and train.log; the state to go on from (270 MB) is in STATE. Where STATE is lost, `--resume` goes on from the weights in
RESULTS with a fresh optimizer. Needs torch, numpy, Pillow, tokenizers and pydantic.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

# Worker processes import this module too: torch is imported only where it is used.
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of training in all")
    parser.add_argument("--piece-minutes", type=float, default=9.0, help="of training in this call, at most")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--work", type=Path, help="folder for the state (default: OUT with -state behind its name)")
    parser.add_argument("--resume", action="store_true", help="go on with the training in these folders")
    parser.add_argument("--evaluate", type=int, default=128, help="held-out scripts to measure at the end of this call; 0 for none")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--device", default="")
    parser.add_argument("--small", action="store_true", help="a tiny network, for a CPU")
    parser.add_argument("--smoke", action="store_true", help="20 steps, timings, and every later stage once")
    parser.add_argument("--compile", action="store_true", help="fuse elementwise operations with torch.compile (with --smoke: time both)")
    parser.add_argument("--rate", type=float, help="highest learning rate")
    parser.add_argument("--restart-rate", action="store_true", help="with --resume: let the learning rate fall again from --rate")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()

    from dataclasses import replace

    import torch

    from tools.demo_model.training.recipe import Recipe
    from tools.demo_model.training.session import Options, Session
    from tools.demo_model.training.smoke import smoke

    recipe = Recipe()
    if arguments.rate is not None:
        recipe = replace(recipe, rate=arguments.rate)
    if arguments.seed is not None:
        recipe = replace(recipe, seed=arguments.seed)
    if arguments.small:
        recipe = replace(recipe, group=16, batch_lessons=8, batch_tokens=4096, warmup_steps=20)
    options = Options(
        out=arguments.out,
        work=arguments.work or arguments.out.with_name(f"{arguments.out.name}-state"),
        minutes=arguments.minutes,
        piece_minutes=arguments.piece_minutes,
        workers=arguments.workers,
        resume=arguments.resume,
        device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        small=arguments.small,
        compile=arguments.compile,
        restart_rate=arguments.restart_rate,
        tokenizer_lessons=200 if arguments.small else Options.tokenizer_lessons,
        recipe=recipe,
    )
    if arguments.smoke:
        return smoke(options)
    session = Session(options)
    session.log(f"{session.trainer.steps} steps and {session.elapsed:.0f} s so far, {options.workers} workers, {options.device}")
    session.run()
    result = session.finish(arguments.evaluate)
    if result:
        shares = {part: {name: row["share"] for name, row in result[part].items()} for part in ("scripts", "pictures")}
        session.log(json.dumps(shares))
    session.log(f"{session.trainer.steps} steps, {session.elapsed:.0f} of {session.total_seconds:.0f} s, {'done' if session.done else 'to be resumed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
