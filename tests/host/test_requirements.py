"""U15: installing the pack's requirements leaves a ComfyUI's own packages alone."""

import json
import subprocess
import sys
import sysconfig

import pytest

from hosts import ROOT
from tools.runner import environment
from tools.runner.console import clean_environment

# what people have: the transformers of 2025 and an early 5.x, with the neighbours each asks for
SETS = {
    "transformers 4.57": ["transformers==4.57.1", "tokenizers==0.22.1"],
    "transformers 5.3": ["transformers==5.3.0", "tokenizers==0.22.2"],
}
PRECIOUS = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "pillow", "aiohttp", "huggingface-hub"}

IMPORT_BOTH = """
import importlib.util, sys, transformers
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("a3b_pack", root + "/__init__.py", submodule_search_locations=[root])
module = importlib.util.module_from_spec(spec)
sys.modules["a3b_pack"] = module
spec.loader.exec_module(module)
print(transformers.__version__, len(module.NODE_CLASS_MAPPINGS))
"""


@pytest.mark.parametrize("installed", SETS.values(), ids=SETS)
def test_nothing_is_up_or_downgraded(installed, tmp_path):
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    python = environment.venv_python(folder)

    def pip(*arguments):
        return subprocess.run(
            [str(python), "-m", "pip", *arguments],
            check=True,
            timeout=600,
            capture_output=True,
            env=clean_environment(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1"),
        ).stdout

    own = environment.python_answers(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    # torch and the rest are seen through this environment's own packages; what is installed here comes first
    with open(own + "/below.pth", "w", encoding="utf-8") as hook:
        hook.write(sysconfig.get_paths()["purelib"] + "\n")
    pip("install", "--quiet", *installed)
    plan = json.loads(pip("install", "--quiet", "--dry-run", "--report", "-", "-r", str(ROOT / "requirements.txt")))
    assert {item["metadata"]["name"].lower() for item in plan["install"]} & PRECIOUS == set()
    done = subprocess.run(
        [str(python), "-c", IMPORT_BOTH, str(ROOT)],
        capture_output=True,
        timeout=120,
        env=clean_environment(),
        encoding="utf-8",
    )
    assert done.stdout.split() == [installed[0].split("==")[1], "9"], done.stderr
