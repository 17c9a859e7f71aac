"""Trained weights -> a checkpoint folder in the official FP8 layout, as it ships.

    python tools/demo_model/training/export.py TRAINED FOLDER

TRAINED is what train.py wrote. Prints the sizes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from a3b_engine.tokenizer import Tokenizer  # the line above makes it importable
from tools.demo_model.make_random import ADDED_TOKENS, write_settings, write_tokenizer_config
from tools.demo_model.training.store import read_weights, save_weights

MOST_BYTES, MOST_FILE_BYTES = 32_000_000, 15_000_000


def export(trained: Path, folder: Path) -> dict[str, int]:
    """Write the FP8 checkpoint into an empty or new `folder`; bytes of each file."""
    _, weights = read_weights(trained)
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    save_weights(folder, weights, config, "fp8")
    shutil.copyfile(trained / "tokenizer.json", folder / "tokenizer.json")
    tokenizer = Tokenizer.from_folder(folder)
    ids = {content: tokenizer.token_to_id(content) for content, _ in ADDED_TOKENS}
    write_tokenizer_config(folder, ids)
    write_settings(folder, ids)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trained", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    sizes = export(arguments.trained, arguments.folder)
    for name, size in sizes.items():
        print(f"{size:>12,} {name}")
    total = sum(sizes.values())
    print(f"{total:>12,} in all")
    if total > MOST_BYTES or max(sizes.values()) > MOST_FILE_BYTES:
        print(f"Too large: at most {MOST_BYTES:,} bytes in all and {MOST_FILE_BYTES:,} a file.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
