"""What the Comfy Registry, ComfyUI-Manager and Windows tools read of the repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = [
    line
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def project():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 or newer")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_registry_fields():
    facts = project()
    assert facts["project"]["name"] == "a3b-comic-script"
    assert re.fullmatch(r"\d+\.\d+\.\d+", facts["project"]["version"])
    assert (
        (ROOT / facts["project"]["license"]["file"]).read_text(encoding="utf-8").lstrip().startswith("Apache License")
    )
    assert {"PublisherId", "DisplayName", "requires-comfyui"} <= set(facts["tool"]["comfy"])


def test_dependencies_are_the_requirements():
    assert project()["project"]["dependencies"] == REQUIREMENTS


def test_requirements_replace_nothing():
    """U15: lower bounds only, and none of the packages whose version a ComfyUI must choose itself."""
    names = [re.split(r"[<>=!~\[; ]", line)[0] for line in REQUIREMENTS]
    assert not {"transformers", "torchvision", "torchaudio"} & set(names)
    for line in REQUIREMENTS:
        assert re.fullmatch(r"[a-z0-9-]+(>=[0-9.]+)?", line), line
    assert "torch" in REQUIREMENTS  # without a bound: it is ComfyUI's own


def test_python_files_encode_in_cp1252():
    folders = [ROOT / name for name in ("a3b_engine", "nodes", "tools", "tests", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*.py")] + list(ROOT.glob("*.py"))
    assert len(files) > 50
    for path in files:
        path.read_text(encoding="utf-8").encode("cp1252")


def test_demo_pictures_are_what_the_script_draws(tmp_path):
    from PIL import Image, ImageChops

    subprocess.run([sys.executable, str(ROOT / "tools" / "draw_demo_pictures.py"), str(tmp_path)], check=True, timeout=60)
    for language in ("en", "zh"):
        shipped = ROOT / "assets" / f"demo_picture.{language}.png"
        assert shipped.stat().st_size < 200_000
        with Image.open(tmp_path / shipped.name) as first, Image.open(shipped) as second:
            assert first.size == second.size == (384, 384)
            assert max(high for _, high in ImageChops.difference(first, second).getextrema()) <= 8


@pytest.mark.parametrize("language", ["en", "zh"])
def test_demo_stories(language):
    text = (ROOT / "assets" / f"demo_story.{language}.txt").read_text(encoding="utf-8")
    assert len(text) > 20 and "\ufffd" not in text and "\r" not in text
