"""The benchmark of a part of the weights: experts of few bits, budgets that the allocator enforces, fetched experts, goals."""

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench_samples import CPU, QUICK, TINY

from a3b_engine.bench import table6
from a3b_engine.bench.bench import Bench
from a3b_engine.bench.cap import MemoryCap
from a3b_engine.bench.files import model_in_files
from a3b_engine.bench.goals import GOALS, RUNS, Run, compared
from a3b_engine.bench.made_up import made_up_parts
from a3b_engine.bench.packed import FORMATS, FORMS, SPREAD, packed_bytes, random_packed
from a3b_engine.bench.residency import expert_bytes, fetches
from a3b_engine.bench.routing import HIT_RATES, MODEL, SKEWED, UNIFORM, expected_hit_rate
from a3b_engine.bench.shape import ModelShape, model_config
from a3b_engine.bench.table import goals_table, table
from a3b_engine.bench.table6 import Table6
from a3b_engine.bench.weights import RandomWeights, RecordedWeights
from a3b_engine.checkpoint.names import is_expert_stack
from a3b_engine.checkpoint.packed import PackedWeight
from a3b_engine.cli import bench as command
from a3b_engine.engine import Engine
from a3b_engine.errors import CheckpointError, ConfigError, MemoryBudgetError
from a3b_engine.prompt import Prompt
from a3b_engine.sampling import SamplingParams

ON_CPU = torch.device("cpu")


# Experts of few bits


@pytest.mark.parametrize("name", FORMS)
def test_packed_experts_have_the_announced_bytes_and_the_spread_of_weights(name):
    form, generator = FORMS[name], torch.Generator().manual_seed(3)
    weight = random_packed(form, (3, 64, 256), generator)
    assert weight.shape == (3, 64, 256) and weight.group == form.group and weight.bits == form.bits
    assert weight.nbytes == packed_bytes(form, (3, 64, 256))
    dense = weight.dequantize(torch.float32)
    assert float(dense.std()) == pytest.approx(SPREAD, rel=0.1) and abs(float(dense.mean())) < SPREAD / 20
    again = random_packed(form, (3, 64, 256), torch.Generator().manual_seed(3))
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.scale.float(), weight.scale.float())


def test_short_rows_have_smaller_groups():
    weight = random_packed(FORMS["int3"], (2, 4, 96), torch.Generator().manual_seed(0))
    assert weight.group == 32 and weight.nbytes == packed_bytes(FORMS["int3"], (2, 4, 96)) == 2 * 4 * (36 + 3 * 2)


@pytest.mark.parametrize("name, bits_each", [("int4", 4.25), ("int3", 3.25), ("nvfp4", 4.5)])
def test_the_published_shape_in_few_bits(name, bits_each):
    """32.2 billion weights of routed experts. Beside those that the engine rounds by itself the head is FP8; all else weighs the same in every form."""
    config = model_config(ModelShape())
    few, stored = (RandomWeights(config, experts=form).device_bytes(torch.bfloat16, False) for form in (name, "stored"))
    experts = 40 * 256 * 3 * 512 * 2048
    factors = 40 * 256 * 3 * 4 if name == "nvfp4" else 0
    head = 0 if name == "nvfp4" else 248320 * 2048
    assert stored - few == experts + experts // 128**2 * 4 - int(experts * bits_each / 8) - factors + head - head // 128**2 * 4


@pytest.mark.parametrize("name", FORMS)
def test_random_weights_keep_only_routed_experts_in_few_bits(name):
    source = RecordedWeights(RandomWeights(model_config(TINY), experts=name))
    weights = source.load(ON_CPU, torch.bfloat16, False)
    packed = {key for key, weight in weights.items() if isinstance(weight, PackedWeight)}
    assert packed == {key for key in weights if is_expert_stack(key)} and packed
    assert sum(weight.nbytes for weight in weights.values()) == source.device_bytes(torch.bfloat16, False)
    assert expert_bytes(model_config(TINY).text, source.sizes) == sum(weights[key].nbytes for key in packed) / (4 * 8)
    plain = RandomWeights(model_config(TINY), experts=name).load(ON_CPU, torch.float32, True)
    assert not any(isinstance(weight, PackedWeight) for weight in plain.values())


def test_an_engine_of_packed_experts_answers(monkeypatch):
    monkeypatch.setattr("a3b_engine.resident.CPU_DEQUANTIZE_BELOW", 0)  # as the published shape, kept as stored
    engine = Engine.from_parts(made_up_parts(TINY, experts="int4"))
    engine.load_weights()
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(max_new_tokens=6))
    assert answer.usage.completion_tokens == 6
    engine.close()


def test_forms_are_told_apart_by_the_engine():
    assert len({made_up_parts(TINY, experts=name).identity for name in FORMATS}) == len(FORMATS)


# Budgets


@pytest.fixture
def card(monkeypatch):
    """A card whose allocator is asked what it holds: numbers that a test sets."""
    state = SimpleNamespace(fraction=0.75, allocated=0, reserved=0, now=0, calls=[])
    fakes = {
        "empty_cache": lambda: state.calls.append("emptied"),
        "reset_peak_memory_stats": lambda device: state.calls.append("reset"),
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1000),
        "get_per_process_memory_fraction": lambda device: state.fraction,
        "set_per_process_memory_fraction": lambda fraction, device: setattr(state, "fraction", fraction),
        "max_memory_allocated": lambda device: state.allocated,
        "max_memory_reserved": lambda device: state.reserved,
        "memory_reserved": lambda device: state.now,
        "mem_get_info": lambda device: (300, 1000),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake, raising=False)
    return state


def test_the_allocator_is_bound_while_measuring_and_free_again_after(card):
    with MemoryCap(torch.device("cuda", 0), 400):
        assert card.fraction == 0.4
    assert card.fraction == 0.75
    with pytest.raises(ZeroDivisionError), MemoryCap(torch.device("cuda", 0), 5000):
        assert card.fraction == 1.0  # more than there is
        raise ZeroDivisionError
    assert card.fraction == 0.75
    with MemoryCap(torch.device("cuda", 0), None):
        assert card.fraction == 0.75


def test_peaks_are_the_largest_of_all_parts(card):
    with MemoryCap(torch.device("cuda", 0), 400_000_000) as cap:
        card.allocated, card.reserved = 300_000_000, 390_000_000
        assert cap.since_here() == (300_000_000, 390_000_000)
        card.allocated, card.reserved, card.now = 310_000_000, 350_000_000, 100
        found = cap.figures()
    assert (found["cap_gb"], found["peak_allocated_gb"], found["peak_reserved_gb"], found["cap_kept"]) == (0.4, 0.31, 0.39, True)
    assert found["in_use_gb"] == found["outside_allocator_gb"] == 0.0 and card.calls.count("reset") == 3
    with MemoryCap(torch.device("cuda", 0), 389_999_999) as cap:
        card.reserved = 390_000_000
        assert cap.figures()["cap_kept"] is False
    with MemoryCap(torch.device("cuda", 0), None) as cap:
        assert cap.figures()["cap_kept"] is None


def test_nobody_counts_on_a_cpu():
    with MemoryCap(ON_CPU, 4_000_000_000) as cap:
        assert cap.since_here() == (0, 0)
        found = cap.figures()
    assert found.pop("cap_gb") == 4.0 and set(found.values()) == {None}


# Fetched experts


def engine_with_counts(asked, fetched, on_device=16):
    text = SimpleNamespace(num_hidden_layers=4, num_experts=8, num_experts_per_tok=2)
    memory = {"experts_on_device": on_device, "experts_pinned": 32, "experts_on_disk": 0}
    return SimpleNamespace(expert_counts=lambda: (asked, fetched), memory=lambda: memory, config=SimpleNamespace(text=text))


def test_what_was_fetched_is_the_difference_of_the_counts():
    found = fetches(engine_with_counts(1080, 254), (280, 54), UNIFORM, 100.0, 2e6, 10e9)
    assert (found["asked"], found["fetched"], found["hit_rate"], found["expected_hit_rate"]) == (800, 200, 0.75, 0.5)
    assert found["fetched_per_token"] == 2.0  # a quarter of four layers' two experts
    assert found["fetched_gb_per_s"] == pytest.approx(0.4) and found["share_of_host_copy"] == pytest.approx(0.04)
    assert fetches(engine_with_counts(1, 0), None, MODEL, 1.0, 1.0, None) is None
    assert fetches(engine_with_counts(7, 1), (7, 1), MODEL, 1.0, 1.0, None) is None  # no step was taken
    bare = fetches(engine_with_counts(80, 8), (0, 0), MODEL, 100.0, 2e6, None)
    assert bare["expected_hit_rate"] is None and bare["share_of_host_copy"] is None


def test_expected_hit_rates():
    assert expected_hit_rate(MODEL, 0.3) is None and expected_hit_rate(UNIFORM, 0.3) == 0.3
    assert [expected_hit_rate(SKEWED, share) for share, _ in HIT_RATES] == pytest.approx([found for _, found in HIT_RATES])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA card")
def test_a_prescribed_routing_needs_kernels():
    with pytest.raises(ConfigError, match="--routing: found skewed"):
        Bench(made_up_parts(TINY), CPU, replace(QUICK, routing=SKEWED))


# Goals


def test_goals_are_found_in_the_runs_that_they_name():
    names = {run.name: run for run in RUNS}
    for goal in GOALS:
        name, kind = goal.where[:2]
        if name == "files":
            continue
        run = names[name]
        assert (kind == "peak") <= run.peak and (kind == "prefill") <= run.prefill
        if kind == "decode":
            assert goal.where[2] in run.decode
        if kind == "from_parked_s":  # not the first of its form, and everything it wants
            assert [other.name for other in RUNS if other.form == run.form][0] != name and run.budget is None
        assert (goal.aim < goal.must) == goal.less


def test_goals_beside_figures():
    runs = {"fp8_24": {"decode": {UNIFORM: {"tokens_per_s": 95.0}}}, "int4_all": {"peak": {"reserved_gb": 18.9}}, "fp8_16": {"error": "x"}}
    rows = {row["row"]: row for row in compared(runs)}
    by_where = dict(zip((goal.where for goal in GOALS), rows.values()))
    assert by_where["fp8_24", "decode", UNIFORM, "tokens_per_s"]["reached"] == "must"
    assert by_where["fp8_24", "decode", SKEWED, "tokens_per_s"] | {"row": ""} == {
        "row": "", "unit": "tok/s", "must": 120, "aim": 200, "measured": None, "reached": "not measured"
    }  # fmt: skip
    assert by_where["int4_all", "peak", "reserved_gb"]["reached"] == "aim"
    assert by_where["fp8_16", "prefill", "tokens_per_s"]["reached"] == "not measured"
    parked = next(goal for goal in GOALS if goal.where[-1] == "from_parked_s")
    assert [parked.reached(value) for value in (1.2, 1.3, 3.0, 3.1)] == ["aim", "must", "must", "missed"]


# All of it


TWO = (Run("first", "stored", None, (MODEL,), prefill=True), Run("again", "stored", None, (SKEWED,), peak=True), Run("few", "int4", None, (MODEL,)))
SMALL = replace(QUICK, prompt=96, new=8, repeat=1, settle=6)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "files"
    with model_in_files(folder, TINY) as parts:
        lines = []
        found = Table6(lambda form: made_up_parts(TINY, 0, form), CPU, SMALL, lines.append, runs=TWO, from_files=parts).run()
    return {**found, "said": lines, "folder": folder}


def test_every_run_is_measured(report):
    runs = report["runs"]
    assert list(runs) == ["files", "first", "again", "few"]
    assert runs["files"]["warm_s"] > 0 and not report["folder"].exists()
    assert "made_s" in runs["first"] and "from_parked_s" in runs["again"] and "made_s" in runs["few"]
    assert runs["first"]["prefill"]["prompt_tokens"] == 96 and "peak" not in runs["first"]
    assert runs["again"]["peak"]["tokens"] == 1024  # all that the tiny model takes, with a picture and the answer
    for run in list(runs.values())[1:]:
        assert run["experts"] == {"on_device": 32, "share": 1.0, "in_pinned_ram": 0, "on_disk": 0, "of": 32}
        assert run["cap"]["cap_gb"] is None and run["cap"]["cap_kept"] is None
        (row,) = run["decode"].values()
        assert row["routing"] == MODEL and row["tokens_per_s"] > 0 and row["experts"] is None  # no kernels, nothing to fetch
    assert any("peak with" in line for line in report["said"])


def test_the_table_of_goals_in_ascii(report):
    text = goals_table(report)
    assert text.isascii() and "from parked RAM in" in text and "not measured" in text
    broken = goals_table({**report, "runs": {**report["runs"], "few": {"error": "it broke"}}, "log": ["a kernel is not used"]})
    assert "failed: it broke" in broken and "a kernel is not used" in broken


def test_a_run_that_fails_does_not_keep_the_others_from_running(monkeypatch):
    measure = Table6._measure

    def fails_first(self, run, *given):
        if run.name == "first":
            raise RuntimeError("no memory")
        return measure(self, run, *given)

    monkeypatch.setattr(Table6, "_measure", fails_first)
    monkeypatch.setattr(table6, "DECODE_CONTEXT", 64)
    runs = Table6(lambda form: made_up_parts(TINY, 0, form), CPU, SMALL, runs=(TWO[0], replace(TWO[1], peak=False))).run()["runs"]
    assert runs["first"] == {"error": "RuntimeError: no memory"} and "made_s" in runs["again"]


def test_the_command_needs_a_card_for_the_goals():
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with pytest.raises(ConfigError, match="--table6: found --device cpu"):
        command.run(parser.parse_args(["bench", "--table6", "--device", "cpu"]))


# Files


def test_made_up_files_are_the_whole_model(tmp_path):
    folder = tmp_path / "new"
    with model_in_files(folder, TINY, shard_bytes=400_000) as parts:
        assert len(list(folder.glob("*.safetensors"))) > 1
        weights = parts.weights.load(ON_CPU, torch.bfloat16, False)
        assert sum(weight.nbytes for weight in weights.values()) == RandomWeights(model_config(TINY)).device_bytes(torch.bfloat16, False)
    assert not folder.exists()


def test_a_folder_of_somebody_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not empty"), model_in_files(tmp_path, TINY):
        pass
    assert (tmp_path / "mine.txt").exists()


# A budget for part of the experts, on a CPU


@pytest.fixture(scope="module")
def part():
    shape = replace(TINY, experts=16)

    def opens(budget):
        try:
            return Engine.from_parts(made_up_parts(shape), context=1024, vram_budget=budget).most_bytes
        except MemoryBudgetError:
            return 0

    whole = Engine.from_parts(made_up_parts(shape))
    low, high = 0, 10**9
    while high - low > 1000:  # the least with which it opens
        middle = (low + high) // 2
        low, high = (low, middle) if opens(middle) else (middle, high)
    assert opens(high) < whole.weight_bytes
    settings = replace(QUICK, contexts=(64,), grammar=False, profile=False, image=False, settle=10)
    lines = []
    report = Bench(made_up_parts(shape), replace(CPU, vram_budget=high, park=True), settings, lines.append).run()
    return {**report, "said": lines, "budget": high}


def test_what_is_fetched_under_a_budget_is_counted(part):
    experts, (row,) = part["experts"], part["decode"]
    assert experts["of"] == 4 * 16 and experts["on_device"] == 4 * 6  # three times the experts of a token
    found = row["experts"]
    assert found["asked"] % (4 * 2) == 0 and 0 < found["fetched"] < found["asked"]
    assert found["fetched_per_token"] == pytest.approx((1 - found["hit_rate"]) * 8, abs=0.01)
    assert part["cap"]["cap_gb"] == round(part["budget"] / 1e9, 3) and part["load"]["from_parked_s"] >= 0
    assert row["step_mb"]["experts"] == pytest.approx(4 * 3 * 2 * 32 * 64 * 4 / 1e6, abs=0.01)  # sizes of experts that were handed over are known
    assert part["memory"]["tiers"]["experts_on_device"] == 4 * 6


def test_the_table_tells_what_was_fetched(part):
    text = table(part)
    assert "experts on the device" in text and "24 of 64 (38%)" in text and "experts fetched a token" in text
    assert "back from RAM after" in text and "not counted on this device" in text and "experts_on_device" not in text
    assert any("GB of weights at least" in line for line in part["said"])


def test_budgets_follow_each_other_on_one_engine(part, monkeypatch):
    monkeypatch.setattr(table6, "DECODE_CONTEXT", 64)
    shape, made = replace(TINY, experts=16), []
    load = RandomWeights.load
    monkeypatch.setattr(RandomWeights, "load", lambda self, *given, **options: made.append(1) or load(self, *given, **options))
    runs = (Run("small", "stored", part["budget"], (MODEL,)), Run("all", "stored", None, (MODEL,)), Run("again", "stored", part["budget"], (MODEL,)))
    found = Table6(lambda form: made_up_parts(shape, 0, form), CPU, SMALL, runs=runs).run()["runs"]
    assert [run["experts"]["on_device"] for run in found.values()] == [24, 64, 24] and len(made) == 1
    assert [list(run)[1] for run in found.values()] == ["made_s", "from_parked_s", "from_parked_s"]
    hits = [run["decode"][MODEL]["experts"] for run in found.values()]
    assert hits[1] is None and 0 < hits[0]["hit_rate"] < 1 and 0 < hits[2]["hit_rate"] < 1
