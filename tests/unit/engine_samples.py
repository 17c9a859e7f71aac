"""What the tests of the engine share: sampling, pictures, and changed copies of the small random checkpoint."""

import json
import shutil

import numpy as np

from a3b_engine import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
LIVELY = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24, seed=11)


def picture(height=64, width=64, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def edited(source, folder, name, change):
    """A copy of a checkpoint whose JSON file `name` went through `change`."""
    shutil.copytree(source, folder)
    value = json.loads((folder / name).read_text(encoding="utf-8"))
    change(value)
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def with_template(source, folder, template):
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Engine.load(folder, context=1024)
