"""The small random checkpoint that stands in until a trained demo model ships."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from .console import run_logged, say
from .paths import DEMO_MODEL, LOGS, ROOT, WORK

MAKER = ROOT / "tools" / "demo_model" / "make_random.py"


def ensure_demo_model(python: Path, verbose: bool = False) -> Path:
    """The random checkpoint's folder, made when absent or made by an older version of the maker."""
    sources = sorted(path for path in MAKER.parent.iterdir() if path.is_file())
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = WORK / "demo_model.stamp"
    if (DEMO_MODEL / "config.json").is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == version:
        return DEMO_MODEL
    say("Making the random demo checkpoint ...")
    shutil.rmtree(DEMO_MODEL, ignore_errors=True)
    run_logged(
        [str(python), str(MAKER), str(DEMO_MODEL)],
        LOGS / "demo_model.log",
        what="making the demo checkpoint",
        verbose=verbose,
    )
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(version, encoding="utf-8")
    return DEMO_MODEL
