"""`python -m a3b_engine bench`: every figure on a tiny model on the CPU, options and errors."""

import argparse
import importlib
import json
import logging
from dataclasses import replace

import pytest
import torch
from bench_samples import CPU, QUICK, TINY, tiny  # noqa: F401

from a3b_engine.__main__ import main
from a3b_engine.bench import bench as bench_module
from a3b_engine.bench.bench import Bench, heard_log
from a3b_engine.bench.made_up import made_up_parts
from a3b_engine.bench.measure import Subject
from a3b_engine.bench.profiling import own_kernel_names
from a3b_engine.bench.shape import ModelShape, model_config
from a3b_engine.bench.table import table
from a3b_engine.bench.weights import RandomWeights
from a3b_engine.cli import bench as command
from a3b_engine.engine import Engine
from a3b_engine.errors import MemoryBudgetError, PromptError
from a3b_engine.prompt import Prompt
from a3b_engine.runtime.answer import Answer, Timings, Usage


@pytest.fixture(scope="module")
def report():
    lines = []
    result = Bench(made_up_parts(TINY), CPU, QUICK, lines.append).run()
    return {**result, "said": lines}


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


# The report


def test_every_figure_is_there_and_makes_sense(report):
    assert [row["context"] for row in report["decode"]] == [64, 150]  # one in the small engine, one in the large one
    for row in report["decode"]:
        assert row["prompt_tokens"] == row["context"]  # filled by a real prompt of exactly that length
        assert row["answers"] == QUICK.repeat and row["tokens"] == QUICK.repeat * (QUICK.new - 1)  # no answer ended early
        assert len(row["runs"]) == QUICK.repeat and min(row["runs"]) <= row["tokens_per_s"] <= max(row["runs"])
        moved = row["step_mb"]
        assert moved["total"] == pytest.approx(sum(value for name, value in moved.items() if name != "total"), abs=0.05)
        assert row["tokens_per_s_at_copy_rate"] == pytest.approx(row["tokens_per_s"] / row["share_of_copy"], rel=0.2)
    assert report["decode"][1]["step_mb"]["keys_values"] > report["decode"][0]["step_mb"]["keys_values"]
    assert report["copy_gb_per_s"] > 0.1
    assert [row["prompt_tokens"] for row in report["prefill"]] == [64, 96]
    for row in report["prefill"]:
        assert row["kept_tokens"] == 0  # never a prompt that was seen before
        assert row["tokens_per_s"] == pytest.approx(row["prompt_tokens"] / row["first_token_ms"] * 1e3, rel=0.02)


def test_first_tokens_with_picture_and_kept_beginnings(report):
    first = report["first_token"]
    picture, unseen, text, seed = (first[name] for name in ("picture", "unseen", "text_changed", "seed_changed"))
    assert 0 < picture["encode_ms"] < picture["ms"]
    assert picture["prompt_tokens"] > QUICK.text_tokens + 4  # a 64 px picture is 4 tokens
    assert unseen["prompt_tokens"] == text["prompt_tokens"] == seed["prompt_tokens"] > QUICK.system_tokens
    assert unseen["kept_tokens"] == 0
    assert 64 <= text["kept_tokens"] < text["prompt_tokens"] == seed["kept_tokens"]


def test_grammar_is_compared_with_the_same_run_without(report):
    grammar = report["grammar"]
    assert grammar["tokens"] >= QUICK.repeat * QUICK.grammar_tokens
    assert grammar["share_of_free"] == pytest.approx(grammar["tokens_per_s"] / grammar["free_tokens_per_s"], abs=2e-3)
    assert grammar["first_token_ms"] > 0 and grammar["first_use_ms"] > 0


def test_load_memory_model_and_machine(report):
    config = model_config(TINY)
    weights = RandomWeights(config).device_bytes(torch.float32, True)
    memory = report["memory"]
    assert memory["weights_gb"] == report["model"]["weights_gb"] == round(weights / 1e9, 3)
    assert memory["tiers"]["weights"] == weights and memory["tiers"]["sequence"] > 0
    assert memory["peak_above_weights_gb"] is None  # nobody counts on a CPU
    assert memory["context"] == 120 and memory["engine_context"] < 1024
    assert report["load"]["weights_s"] >= 0 and report["load"]["first_answer_s"] > 0
    assert report["model"]["layers"] == 4 and report["model"]["vocabulary"] == [3033, 3072]
    facts = report["machine"]
    assert facts["torch"] == torch.__version__ and facts["type"] == "cpu" and facts["date"].endswith("UTC")
    assert report["kernels"]["target"] is None


def test_profiles_name_the_operations(report):
    for name in ("decode_step", "prefill"):
        profile = report["profile"][name]
        assert profile["us"] > 0 and profile["launches"] > 10
        assert 0 < len(profile["top"]) <= 15
        times = [row["us"] for row in profile["top"]]
        assert times == sorted(times, reverse=True) and sum(times) <= profile["us"] + 0.2
        assert all(row["name"] and row["count"] > 0 for row in profile["top"])
    decode = report["profile"]["decode_step"]["top"]
    assert any(row["name"].startswith("aten::") for row in decode)


def test_the_table_holds_the_figures_in_ascii(report):
    text = table(report)
    assert text.isascii()
    for figure in (report["decode"][1]["tokens_per_s"], report["first_token"]["text_changed"]["ms"], report["grammar"]["tokens_per_s"]):
        assert str(figure) in text
    assert "one decode step" in text and "the plain path runs" in text
    bare = {**report, "grammar": None, "profile": None, "first_token": {**report["first_token"], "picture": None}}
    shorter = table(bare)
    assert "grammar" not in shorter and "new picture" not in shorter and "one decode step" not in shorter


def test_what_is_measured_is_said(report):
    text = "\n".join(report["said"])
    assert "GB of weights +" in text and "GB free on cpu" in text
    assert all(word in text for word in ("decode at 64", "prefill of 96", "grammar", "profile"))


# The command


def test_the_command_prints_a_table_or_an_object_for_scripts(capsys, monkeypatch):
    monkeypatch.setattr(command, "_settings", lambda options, most: replace(QUICK, contexts=(64,), grammar=False, image=False, repeat=1))
    assert command.run(parsed("--device", "cpu"), TINY) == 0
    out, err = capsys.readouterr()
    assert out.startswith("device") and "decode, 64 tokens" in out and "\n{" not in out
    assert "bench: on a CPU" in err
    assert command.run(parsed("--device", "cpu", "--json", "--no-profile"), TINY) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["contexts"] == [64] and report["model"]["source"] == "random" and report["model"]["whole"] is False
    assert report["grammar"] is None and report["first_token"]["picture"] is None


def test_a_checkpoint_folder_is_measured_too(random_checkpoint, capsys, monkeypatch):
    quick = replace(QUICK, contexts=(64,), grammar=False, profile=False, repeat=1, picture_px=64)
    monkeypatch.setattr(command, "_settings", lambda options, most: quick)
    assert main(["bench", "--model", str(random_checkpoint), "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["source"] == str(random_checkpoint) and report["model"]["whole"] is True
    assert report["decode"][0]["tokens"] >= QUICK.new - 1 and report["first_token"]["picture"]["ms"] > 0


def test_options_become_settings():
    given = parsed("--context", "900", "700", "900", "--prompt", "300", "--new", "40", "--repeat", "5", "--seed", "7", "--no-image", "--no-grammar", "--no-profile")
    settings = command._settings(given, 100_000)
    assert (settings.contexts, settings.prompt, settings.new, settings.repeat, settings.seed) == ((700, 900), 300, 40, 5, 7)
    assert not (settings.image or settings.grammar or settings.profile)


def test_lengths_that_were_not_asked_for_shrink_to_the_model():
    assert command._settings(parsed(), 262_144).contexts == (512, 8192, 32768)
    small = command._settings(parsed("--new", "36"), 1000)
    assert small.contexts == (512, 900) and small.prompt == 900 and small.image and small.grammar and small.profile


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--device", "cpu", "--new", "1"], "--new: found 1"),
        (["--device", "cpu", "--layers", "0"], "--layers: found 0"),
        (["--device", "cpu", "--repeat", "0"], "--repeat: found 0"),
        (["--device", "cpu", "--seed", "-1"], "--seed: found -1"),
        (["--device", "cpu", "--format", "int2"], "--format: found 'int2'"),
        (["--device", "cpu", "--vram-gb", "nan"], "--vram-gb: found nan"),
        (["--device", "cpu", "--vram-gb", "1e300"], "--vram-gb: found 1e+300"),
        (["--device", "cpu", "--context", "0"], "--context: found 0"),
        (["--device", "cpu", "--context", "999999999"], "--context: found 999999999, expected 1 to 261952"),
        (["--device", "cpu", "--prompt", "300000"], "--prompt: found 300000"),
        (["--device", "cpu", "--vram-gb", "1"], "needs at least"),
        (["--device", "cpu", "--routing", "even"], "--routing: found 'even', expected one of model, uniform, skewed"),
        (["--device", "cpu", "--files", "new"], "--files: found new"),
        (["--device", "nowhere"], "device: found 'nowhere'"),
        (["--model", "no such folder", "--device", "cpu"], "no such folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, problem):
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("bench: ")]
    assert out == "" and len(lines) == 1 and problem in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA card")
def test_no_card_is_one_clear_line(capsys):
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == (
        "a3b_engine: --device: torch sees no CUDA card here. For a quick look, without meaning for a card: --model demo_model/a3b-drawn-scenes-demo --device cpu --context 512 --repeat 1 --new 32\n"
    )


def test_what_does_not_fit_is_refused_before_anything_is_made(monkeypatch, capsys):
    monkeypatch.setattr(bench_module, "free_bytes", lambda device: 8_000_000_000)
    monkeypatch.setattr(RandomWeights, "load", lambda *arguments: pytest.fail("weights were made"))
    assert main(["bench", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    # 34.7 GB of FP8 and its scales, head and embedding in float32
    assert "8.0 GB are free" in said and "--layers" in said and "GB of weights" in said
    assert said.count("a3b_engine: ") == 1


def test_the_published_shape_takes_what_the_official_files_take():
    """36.6 GB were measured on a card in bfloat16, vision included."""
    weights = RandomWeights(model_config(ModelShape()))
    assert weights.device_bytes(torch.bfloat16, False) == pytest.approx(36.6e9, rel=0.003)


def test_lengths_the_model_cannot_take_are_named():
    with pytest.raises(PromptError, match="--context: found 5000, expected 1 to 948"):
        Bench(made_up_parts(TINY), CPU, replace(QUICK, contexts=(5000,)))
    with pytest.raises(PromptError, match="--prompt: found 5000"):
        Bench(made_up_parts(TINY), CPU, replace(QUICK, prompt=5000))


def test_a_budget_too_small_for_the_longest_context_is_said_at_once(monkeypatch):
    engine = Engine.from_parts(made_up_parts(TINY))
    budget = engine.weight_bytes + engine.working_bytes(1) + 1000  # enough to open it
    monkeypatch.setattr(RandomWeights, "load", lambda *arguments: pytest.fail("weights were made"))
    with pytest.raises(MemoryBudgetError, match="needs at least .* lower context"):
        Bench(made_up_parts(TINY), replace(CPU, vram_budget=budget), QUICK).run()


def test_answers_that_end_early_are_taken_until_they_are_enough(tiny, monkeypatch):
    """A real model may stop after a few tokens: rates come from all of its answers, no interval is made up."""
    subject, seeds = Subject(tiny, QUICK), []

    def run(prompt, new, seed, schema=None, on_token=None):
        seeds.append(seed)
        usage = Usage(prompt_tokens=64, image_tokens=0, completion_tokens=5, thinking_tokens=0)
        return Answer("", "", "stop", usage, Timings(0.1, 0.4, 0.1, 10.0), seed, True), 0.1

    monkeypatch.setattr(subject, "run", run)
    figures = subject.decode(Prompt(user="x"), 13)
    assert figures == {"prompt_tokens": 64, "tokens_per_s": 10.0, "runs": [10.0, 10.0], "tokens": 24, "answers": 6}
    assert len(set(seeds[1:])) == 6  # never the same answer twice


def test_an_answer_of_one_token_has_no_rate(tiny, monkeypatch):
    subject = Subject(tiny, QUICK)
    usage = Usage(prompt_tokens=64, image_tokens=0, completion_tokens=1, thinking_tokens=0)
    monkeypatch.setattr(subject, "run", lambda *given: (Answer("", "", "stop", usage, Timings(0.1, 0.0, 0.1, 0.0), 0, True), 0.1))
    assert subject.decode(Prompt(user="x"), 13)["tokens_per_s"] == 0.0


def test_what_the_engine_logs_is_heard_and_nothing_else():
    own = logging.getLogger("a3b_engine")
    before = own.level, list(own.handlers)
    with heard_log() as heard:
        for _ in range(2):
            logging.getLogger("a3b_engine.kernels.support").warning("kernel %s is not used on %s", "router", "cuda:0")
        logging.getLogger("a3b_engine.runtime.runner").info("decoded without kernels")
        logging.getLogger("somebody.else").warning("not ours")
    assert heard == ["kernel router is not used on cuda:0", "decoded without kernels"]
    assert (own.level, own.handlers) == before


def test_kernels_of_this_pack_are_told_from_others():
    pytest.importorskip("triton")
    importlib.import_module("a3b_engine.kernels.moe_decode")
    names = own_kernel_names()
    assert {"expert_up_kernel", "expert_down_kernel"} <= names and "aten::mm" not in names
