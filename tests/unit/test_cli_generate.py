"""`python -m a3b_engine generate`: what is said, and when, for good and bad input."""

import io
import json
import os
import random
import shutil

import pytest
from PIL import Image

from a3b_engine.__main__ import main
from a3b_engine.cli.generate import _open_picture
from a3b_engine.engine import Engine
from a3b_engine.errors import ImageError
from a3b_engine.options import EXPERT_FORMATS


@pytest.fixture
def say(random_checkpoint, capsys):
    """Run the command; returns (exit code, standard output, standard error)."""

    def say(*options):
        code = main(["generate", "--model", str(random_checkpoint), "--max-new-tokens", "6", *map(str, options)])
        return (code, *capsys.readouterr())

    return say


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.new("RGB", (384, 384), (200, 10, 10)).save(path)
    return path


def test_an_answer_is_printed_and_its_figures_apart(say, picture):
    code, out, err = say("--prompt", "Look: [[IMG]]", "--image", picture, "--temperature", 0)
    assert code == 0 and out.strip() and "token limit" in err
    code, out, err = say("--prompt", "Look: [[IMG]]", "--image", picture, "--temperature", 0, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["usage"]["image_tokens"] == 144 and not err


def test_a_schema_file_may_begin_with_a_byte_order_mark(say, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "boolean"}', encoding="utf-8-sig")
    assert say("--prompt", "x", "--schema", path)[1].strip() in ("true", "false")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--device", "gpu"], "device: found 'gpu'"),
        (["--device", "cuda:99"], "device: found 'cuda:99'"),
        (["--vram-gb", "nan"], "--vram-gb"),
        (["--vram-gb", "inf"], "--vram-gb"),
        (["--vram-gb=-1"], "--vram-gb"),
        (["--vram-gb", "1e-12"], "budget"),
        (["--context", "0"], "context"),
        (["--stop", ""], "stop"),
        (["--comic", "0"], "panels"),
        (["--preset", "describe", "--comic"], "--preset describe and --comic"),
        (["--preset", "manga", "--regex", "a"], "--preset manga and --regex"),
        (["--preset", "children", "--schema", "schema.json"], "--preset children and --schema"),
    ],
)
def test_bad_values_are_one_line(say, options, words):
    code, out, err = say("--prompt", "x", *options)
    assert code == 2 and not out and words in err and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["--schema", "--prompt", "--system"])
def test_text_files_in_another_encoding_are_named(say, tmp_path, kind):
    path = tmp_path / "text"
    path.write_text('{"type": "boolean"}', encoding="utf-16")
    options = ["--prompt", "x"] if kind != "--prompt" else []
    code, _, err = say(*options, kind, path if kind == "--schema" else f"@{path}")
    assert code == 2 and str(path) in err and "UTF-8" in err


@pytest.mark.parametrize("prompt", ["[[IMG]] [[IMG]]", "[[IMG:7]]", "@no such file"])
def test_I01_a_bad_prompt_is_refused_before_the_weights_are_read(say, picture, prompt, monkeypatch):
    monkeypatch.setattr(Engine, "load_weights", lambda *_, **__: pytest.fail("the weights were read"))
    assert say("--prompt", prompt, "--image", picture)[0] == 2


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow remarks on each damaged tag
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "TGA", "WEBP"])
def test_damaged_pictures_are_named(tmp_path, kind):
    stream = io.BytesIO()
    Image.effect_noise((40, 30), 90).convert("RGB").save(stream, kind)
    whole, path, chance = stream.getvalue(), tmp_path / "picture", random.Random(kind)
    path.write_bytes(whole)
    assert _open_picture(path).size == (40, 30)
    refused = 0
    for attempt in range(60):
        damaged = bytearray(whole[: chance.randrange(len(whole))] if attempt % 2 else whole)
        for _ in range(3 if damaged else 0):
            damaged[chance.randrange(min(len(damaged), 120))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            _open_picture(path)
        except ImageError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused


def test_a_script_that_was_cut_is_no_success(say):
    code, out, err = say("--prompt", "Tell me", "--comic", 2)
    assert code == 1 and "cut after 6 tokens" in err
    code, out, err = say("--prompt", "Tell me", "--regex", "ab")
    assert code == 0 and out.strip() == "ab"


@pytest.mark.parametrize(
    "options, named",
    [
        (["--short"], "--short"),
        (["--rounds", -3], "--rounds"),
        (["--rounds", 4], "--rounds"),
        (["--preset", "describe", "--prompt-language", "English"], "--prompt-language"),
        (["--regex", "ab", "--short", "--rounds", 2, "--prompt-language", "German"], "--short, --rounds, --prompt-language"),
    ],
)
def test_options_of_a_comic_are_remarked_on_without_one(say, options, named):
    code, out, err = say("--prompt", "x", "--json", *options)
    assert code == 0 and json.loads(out) and err.count("\n") == 1 and f" {named}: no effect" in err


@pytest.mark.parametrize("options", [[], ["--system", "{{rounds}} rows. {{short|Be brief.}}", "--rounds", 2, "--short"], ["--language", "German"]])
def test_options_that_have_an_effect_are_not_remarked_on(say, options):
    assert say("--prompt", "x", "--json", *options)[::2] == (0, "")


@pytest.mark.parametrize("options", [["--comic", 2], ["--preset", "manga"]])
def test_a_comic_takes_its_options_without_a_remark(say, options):
    code, _, err = say("--prompt", "x", "--json", "--short", "--rounds", 2, "--prompt-language", "German", *options)
    assert code == 1 and not err


def test_what_is_no_picture_is_named(say, tmp_path):
    code, out, err = say("--prompt", "Tell me", "--image", "none.png")
    assert code == 2 and "none.png: there is no such file" in err
    code, out, err = say("--prompt", "Tell me", "--image", tmp_path)
    assert code == 2 and f"{tmp_path}: this is a folder" in err and err.count("\n") == 1
    if os.name == "nt":
        return  # its devices have no path
    code, out, err = say("--prompt", "Tell me", "--image", os.devnull)
    assert code == 2 and f"{os.devnull}: this is no ordinary file" in err


@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
def test_experts_are_rounded_and_kept_when_asked(random_checkpoint, tmp_path, capsys, expert_format):
    folder = shutil.copytree(random_checkpoint, tmp_path / "model")
    command = ["generate", "--model", str(folder), "--max-new-tokens", "3", "--prompt", "x", "--expert-format", expert_format, "--json"]
    answers = []
    for options in ([], ["--cache-experts"], ["--cache-experts"]):
        assert main([*command, "--temperature", "0", *options]) == 0
        answers.append(json.loads(capsys.readouterr().out))
        kept = [path.name for path in folder.iterdir() if path.is_dir()]
        assert kept == ([f"a3b-experts-{expert_format}-g64"] if options and expert_format != "stored" else [])
    assert len({answer["text"] for answer in answers}) == 1 and answers[0]["memory"]["weights"] > 0
