"""Importing the pack: light, quiet, and indifferent to the console's encoding. Each host's own Python does it."""

import json
import subprocess

import pytest

from comfy_server import NODES, ROOT
from tools.runner.console import clean_environment

PROBE = """
import importlib.util, json, logging, random, sys, time, warnings
import torch
root = sys.argv[1]
name = "custom_nodes/a3b-comic-script"
def globals_now():
    log = logging.getLogger()
    return {"dtype": repr(torch.get_default_dtype()), "torch rng": torch.random.get_rng_state().sum().item(),
            "random": repr(random.getstate()), "log level": log.level, "log handlers": len(log.handlers),
            "warnings": repr(warnings.filters), "stdout": id(sys.stdout), "path": list(sys.path)}
before = globals_now()
begin = time.perf_counter()
spec = importlib.util.spec_from_file_location(name, root + "/__init__.py", submodule_search_locations=[root])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
seconds = time.perf_counter() - begin
after = globals_now()
changed = [key for key in before if before[key] != after[key]]
for node in module.NODE_CLASS_MAPPINGS.values():
    node()
print(json.dumps({
    "nodes": sorted(module.NODE_CLASS_MAPPINGS), "seconds": seconds, "changed": changed,
    "cuda": torch.cuda.is_initialized(),
    "heavy": [name for name in ("transformers", "cv2", "comfy", "llguidance") if name in sys.modules],
    "web": module.WEB_DIRECTORY,
}))
"""


def probe(host, **environment):
    done = subprocess.run(
        [str(host.python), "-c", PROBE, str(ROOT)],
        capture_output=True,
        timeout=120,
        env=clean_environment(**environment),
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "environment",
    [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "gbk:strict"}],
    ids=["plain", "LC_ALL=C", "gbk"],
)
def test_every_node_can_be_made(host, environment):
    """U17, U20"""
    assert probe(host, **environment)["nodes"] == sorted(NODES)


def test_import_is_light(host):
    facts = min(
        (probe(host) for _ in range(3)), key=lambda facts: facts["seconds"]
    )  # the best of three: caches, neighbours
    assert facts["seconds"] < 1, facts
    assert facts["cuda"] is False
    assert facts["heavy"] == []
    assert facts["web"] == "./web"


def test_import_changes_nothing_global(host):
    assert probe(host)["changed"] == []
