"""Quantised experts kept beside the checkpoint: written whole or not at all, read the next time, made again when in doubt."""

import json
import logging
import os
import shutil
from collections import namedtuple

import pytest
import torch
from test_checkpoint_experts import parts_of, same

from a3b_engine.checkpoint.discover import find_checkpoint_folders
from a3b_engine.checkpoint.names import is_expert_stack, stack_names
from a3b_engine.checkpoint.quantize import cache as module
from a3b_engine.checkpoint.quantize import source as source_module
from a3b_engine.checkpoint.quantize.cache import FILE, RECORD, UNFINISHED
from a3b_engine.checkpoint.reader import LoadCancelled
from a3b_engine.parts import parts_of_folder

CPU = torch.device("cpu")
NAME = "a3b-experts-int4-g64"


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    monkeypatch.setattr(source_module, "TOKENS", 64)


@pytest.fixture
def checkpoint(random_checkpoint, tmp_path):
    return shutil.copytree(random_checkpoint, tmp_path / "model")


@pytest.fixture
def rounded(monkeypatch):
    """The layers that were rounded since the last look."""
    layers, rounding = [], source_module.quantize_experts

    def counted(weights, *arguments):
        layers.append(next(name for name in weights if is_expert_stack(name)))
        return rounding(weights, *arguments)

    monkeypatch.setattr(source_module, "quantize_experts", counted)

    def since():
        found = len(layers)
        layers.clear()
        return found

    return since


def source_of(folder, expert_format="int4", cache=True):
    return parts_of_folder(folder).with_experts(expert_format, cache).weights


def load(source, **options):
    return source.load(CPU, torch.bfloat16, False, **options)


def lines(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO and "a3b-experts" in record.getMessage()]
    caplog.clear()
    return found


def test_the_next_load_reads_what_this_one_rounded(checkpoint, rounded, caplog):
    caplog.set_level(logging.INFO)
    first = load(source_of(checkpoint))
    layers = rounded()
    assert layers and {path.name for path in (checkpoint / NAME).iterdir()} == {FILE, RECORD}
    assert len(lines(caplog)) == 1 and find_checkpoint_folders(checkpoint) == [checkpoint]
    again = source_of(checkpoint)
    second, taken, steps = load(again), {}, []
    assert set(second) == set(first) and all(same(second[name], first[name]) for name in first)
    rest = load(again, take_experts=lambda layer, stacks: taken.update({layer: stacks}), progress=lambda *step: steps.append(step))
    assert not rounded() and not lines(caplog) and len(taken) == layers and steps[-1][0] == steps[-1][1]
    assert not any(map(is_expert_stack, rest))
    shapes = again.expert_shapes(torch.bfloat16, False)
    some = again.read_experts(1, [3, 0], torch.bfloat16, False)
    for which, name in zip(("gate", "up", "down"), stack_names(1), strict=True):
        assert same(getattr(taken[1], which), first[name]) and same(getattr(some, which), first[name][torch.tensor([3, 0])])
        assert [(part.dtype, part.shape) for part in parts_of(getattr(shapes, which))] == [(part.dtype, part.shape) for part in parts_of(first[name])]
    for dequantize in (False, True):
        tiers = again.tier_bytes(torch.bfloat16, dequantize)
        assert tiers == source_of(checkpoint, cache=False).tier_bytes(torch.bfloat16, dequantize)
        assert sum(tiers.values()) == sum(weight.nbytes for weight in again.load(CPU, torch.bfloat16, dequantize).values())


def test_the_engine_that_wrote_it_reads_single_experts_from_it(checkpoint):
    source = source_of(checkpoint)
    assert source.read_experts(0, [1], torch.bfloat16, False) is None
    weights = load(source)
    assert same(source.read_experts(0, [1], torch.bfloat16, False).up, weights[stack_names(0)[1]][torch.tensor([1])])


def test_each_form_has_its_own_and_nothing_is_kept_unasked(checkpoint, rounded):
    load(source_of(checkpoint, cache=False))
    assert not [path for path in checkpoint.iterdir() if path.is_dir()] and rounded()
    load(source_of(checkpoint, "int4"))
    load(source_of(checkpoint, "int3"))
    assert {path.name for path in checkpoint.iterdir() if path.is_dir()} == {NAME, "a3b-experts-int3-g64"} and rounded()
    load(source_of(checkpoint, "int3"))
    assert not rounded()
    load(source_of(checkpoint, cache=False))
    assert rounded()  # what the user does not allow is not read either


def touch(folder):
    path = next(folder.glob("*.safetensors"))
    os.utime(path, ns=(1, 1))


def cut(folder):
    with open(folder / NAME / FILE, "r+b") as stream:
        stream.truncate((folder / NAME / FILE).stat().st_size - 1)


def no_file(folder):
    (folder / NAME / FILE).unlink()


def no_json(folder):
    (folder / NAME / RECORD).write_text("{", encoding="utf-8")


def older_way(folder):
    path = folder / NAME / RECORD
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "rounding": 0}), encoding="utf-8")


def other_tensors(folder):
    module.ShardWriter(folder / NAME / FILE, [module.Output("x", "U8", (4,))]).finish()


@pytest.mark.parametrize("change", [touch, cut, no_file, no_json, older_way, other_tensors])
def test_a_stale_or_damaged_one_is_made_again_with_one_line(checkpoint, rounded, caplog, change):
    weights = load(source_of(checkpoint))
    change(checkpoint)
    rounded()
    caplog.set_level(logging.INFO)
    source = source_of(checkpoint)
    caplog.clear()
    again = load(source)
    assert rounded() and all(same(again[name], weights[name]) for name in weights)
    told = lines(caplog)
    assert len(told) == 2 and "it is made again" in told[0] and "are kept for the next time" in told[1]
    load(source_of(checkpoint))
    assert not rounded() and sorted(path.name for path in checkpoint.iterdir() if path.is_dir()) == [NAME]


def unfinished(folder):
    return [path for path in folder.iterdir() if path.name.endswith(UNFINISHED)]


def test_cancelling_leaves_no_folder(checkpoint):
    calls = []
    load(source_of(checkpoint, cache=False), cancel=lambda: calls.append(0))
    again = iter(range(10**9))
    with pytest.raises(LoadCancelled):
        load(source_of(checkpoint), cancel=lambda: next(again) > 0.9 * len(calls))
    assert not (checkpoint / NAME).exists() and not unfinished(checkpoint)


def no_room(monkeypatch, folder):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(10**9, 10**9, 1000))


def disk_full(monkeypatch, folder):
    writes, write = [], module.ShardWriter.write

    def fails(writer, *arguments):
        writes.append(0)
        if len(writes) > 4:
            raise OSError(28, "No space left on device")
        write(writer, *arguments)

    monkeypatch.setattr(module.ShardWriter, "write", fails)


def read_only(monkeypatch, folder):
    def fails(path, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.Path, "mkdir", fails)


def occupied(monkeypatch, folder):
    (folder / NAME).mkdir()
    (folder / NAME / "notes.txt").write_text("mine", encoding="utf-8")


@pytest.mark.parametrize("change", [no_room, disk_full, read_only, occupied])
def test_where_it_cannot_be_kept_one_line_says_so_and_loading_goes_on(checkpoint, rounded, caplog, monkeypatch, change):
    expected = load(source_of(checkpoint, cache=False))
    source = source_of(checkpoint)
    change(monkeypatch, checkpoint)
    caplog.set_level(logging.INFO)
    weights = load(source)
    assert all(same(weights[name], expected[name]) for name in expected)
    assert len(lines(caplog)) == 1 and not unfinished(checkpoint)
    if change is occupied:
        assert [path.name for path in (checkpoint / NAME).iterdir()] == ["notes.txt"]
    else:
        assert not (checkpoint / NAME).exists()
    assert source.read_experts(0, [0], torch.bfloat16, False) is None


def test_leftovers_of_a_power_cut_are_cleared_away_after_hours(checkpoint):
    for name, hours in (("old", 8), ("young", 1), ("foreign", 8)):
        folder = checkpoint / f"{NAME}.{name}{UNFINISHED}"
        folder.mkdir()
        path = folder / ("notes.txt" if name == "foreign" else f"{FILE}.part")
        path.write_bytes(b"x")
        for each in (path, folder):
            time = each.stat().st_mtime - 3600 * hours
            os.utime(each, (time, time))
    load(source_of(checkpoint))
    assert {path.name.split(".")[1] for path in unfinished(checkpoint)} == {"young", "foreign"}


def test_the_engine_takes_the_option(checkpoint, rounded):
    from engine_samples import GREEDY

    from a3b_engine import Engine, Prompt

    texts = []
    for _ in range(2):
        engine = Engine.load(checkpoint, expert_format="int4", cache_experts=True)
        texts.append(engine.generate(Prompt(user="Tell me"), GREEDY).text)
        engine.close()
    assert rounded() == engine.config.text.num_hidden_layers and texts[0] == texts[1] and (checkpoint / NAME).is_dir()
