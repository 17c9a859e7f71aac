"""The small checkpoint of random numbers that most tests in a ComfyUI run on: it answers in a moment."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from .console import run_logged, say
from .paths import LOGS, RANDOM_MODEL, ROOT, WORK

MAKER = ROOT / "tools" / "demo_model" / "make_random.py"


def ensure_random_model(python: Path, verbose: bool = False) -> Path:
    """The random checkpoint's folder, made when absent or made by an older version of the maker."""
    sources = sorted(path for path in MAKER.parent.iterdir() if path.is_file())
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = WORK / "random_model.stamp"
    if (RANDOM_MODEL / "config.json").is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == version:
        return RANDOM_MODEL
    say("Making the random checkpoint ...")
    shutil.rmtree(RANDOM_MODEL, ignore_errors=True)
    run_logged(
        [str(python), str(MAKER), str(RANDOM_MODEL)],
        LOGS / "random_model.log",
        what="making the random checkpoint",
        verbose=verbose,
    )
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(version, encoding="utf-8")
    return RANDOM_MODEL
