"""Where things lie: the repository, and the work folder `.a3b/` that git ignores."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / ".a3b"
VENV = WORK / "venv"
LOGS = WORK / "logs"
ASSETS = ROOT / "assets"
WORKFLOW = ROOT / "example_workflows" / "comic_script.api.json"
PACK_NAME = "a3b-comic-script"
DEMO_MODEL = ROOT / "demo_model" / "a3b-drawn-scenes-demo"  # trained, ships with the pack
RANDOM_MODEL = WORK / "models" / "a3b-random-demo"  # made for tests
