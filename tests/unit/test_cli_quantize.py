"""`python -m a3b_engine quantize`, the folder it writes, and experts rounded while they are loaded."""

import gc
import json
import math
import shutil
import weakref
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import load, plan_of
from engine_samples import GREEDY

from a3b_engine import Engine, Prompt
from a3b_engine.__main__ import main
from a3b_engine.checkpoint.discover import find_checkpoint_folders
from a3b_engine.checkpoint.index import CheckpointIndex
from a3b_engine.checkpoint.names import is_expert_stack
from a3b_engine.checkpoint.packed import PackedWeight
from a3b_engine.checkpoint.quantize import convert as module
from a3b_engine.checkpoint.quantize import head
from a3b_engine.checkpoint.quantize import source as source_module
from a3b_engine.checkpoint.quantize.convert import RECORD, UNFINISHED, convert
from a3b_engine.checkpoint.quantize.head import HEAD, load_head
from a3b_engine.checkpoint.quantize.steps import FewBits
from a3b_engine.checkpoint.reader import LoadCancelled
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.checkpoint.write import quantize_fp8_block, to_official, write_checkpoint
from a3b_engine.config import ModelConfig
from a3b_engine.errors import CheckpointError, ConfigError, UnsupportedFormatError
from a3b_engine.parts import parts_of_folder

PROMPT = Prompt(user="Tell me")


@pytest.fixture(scope="module")
def bf16(random_checkpoint, tmp_path_factory):
    """The random checkpoint as plain bfloat16 with fused experts, as the official BF16 files have them."""
    folder = tmp_path_factory.mktemp("bf16") / "model"
    config = ModelConfig.from_folder(random_checkpoint)
    raw = json.loads((random_checkpoint / "config.json").read_text(encoding="utf-8"))
    weights = load(random_checkpoint, torch.bfloat16, dequantize=True)
    write_checkpoint(folder, to_official(weights, config), raw, format="bf16", experts="fused")
    for path in random_checkpoint.iterdir():
        if path.suffix != ".safetensors" and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    return folder


@pytest.fixture(scope="module")
def int4(random_checkpoint, tmp_path_factory):
    return convert(random_checkpoint, tmp_path_factory.mktemp("int4") / "model", "int4").folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("to, bits", [("int4", 4), ("int3", 3)])
@pytest.mark.parametrize("source", ["random_checkpoint", "bf16"])
def test_the_command_makes_a_folder_that_loads_and_answers(request, tmp_path, capsys, source, to, bits):
    source, target = request.getfixturevalue(source), tmp_path / "small"
    assert main(["quantize", str(source), str(target), "--to", to, "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["made"] and Path(facts["folder"]) == target and "100 %" in err
    told = json.loads((target / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (told["quant_method"], told["version"], told["bits"], told["group_size"]) == ("a3b", 1, bits, 64)
    assert find_checkpoint_folders(tmp_path) == [target]
    assert facts["weight_bytes"] == CheckpointIndex.open(target).total_bytes < CheckpointIndex.open(source).total_bytes
    engine = Engine.load(target)
    answer = engine.generate(PROMPT, GREEDY)
    assert answer.usage.completion_tokens and engine.weight_bytes == sum(weight.nbytes for weight in engine._residence.weights.values())
    weights = load(target)
    stacks = {name: weight for name, weight in weights.items() if is_expert_stack(name)}
    assert all(isinstance(weight, PackedWeight) and weight.bits == bits for weight in stacks.values())
    assert plan_of(target).device_bytes(torch.float32, False) == sum(weight.nbytes for weight in weights.values())
    exact = load(source, dequantize=True)
    for name, weight in stacks.items():
        error = (weight.dequantize(torch.float32) - exact[name]).norm() / exact[name].norm()
        assert error < (0.1 if bits == 4 else 0.2), name


def data(info):
    with open(info.file, "rb") as stream:
        stream.seek(info.offset)
        return info.dtype, info.shape, stream.read(info.nbytes)


def test_all_but_routed_experts_and_head_is_copied_byte_for_byte(random_checkpoint, int4):
    before, after = CheckpointIndex.open(random_checkpoint), CheckpointIndex.open(int4)
    kept = [name for name in before.tensors if ".mlp.experts." not in name and name != HEAD]
    others = {name for name in after.tensors if ".mlp.experts." not in name}
    assert len(kept) > 100 and others == {*kept, HEAD, "lm_head.weight_scale_inv"}
    assert all(data(before.tensors[name]) == data(after.tensors[name]) for name in kept)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (int4 / name).read_bytes() == (random_checkpoint / name).read_bytes()


@pytest.mark.parametrize("source", ["random_checkpoint", "bf16"])
def test_the_head_becomes_fp8_in_blocks(request, tmp_path, source, monkeypatch):
    """Whole, in bands, and while the model is loaded: the same bits."""
    source = request.getfixturevalue(source)
    exact = load(source, torch.bfloat16)[HEAD]
    codes, scale = quantize_fp8_block(exact)
    monkeypatch.setattr(head, "ROWS_AT_ONCE", 128)
    assert exact.shape[0] > 2 * 128  # so there are bands
    target = convert(source, tmp_path / "int3", "int3").folder
    told = json.loads((target / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert told["fp8_modules"] == ["lm_head"] and told["weight_block_size"] == [128, 128]
    loaded = parts_of_folder(source).with_experts("int3").weights.load(torch.device("cpu"), torch.float32, False)[HEAD]
    for found in (load(target, torch.bfloat16)[HEAD], loaded):
        assert isinstance(found, ScaledWeight)
        assert torch.equal(found.data.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(found.scale, scale.float())
    lost = (loaded.dequantize(torch.float32) - exact.float()).norm() / exact.float().norm()
    assert 0.01 < lost < 0.04
    multiplied_out = parts_of_folder(source).with_experts("int3").weights.load(torch.device("cpu"), torch.float32, True)[HEAD]
    assert torch.equal(multiplied_out, loaded.dequantize(torch.float32))


def test_a_head_that_is_the_embedding_or_fp8_already_stays(int4, tmp_path):
    tied = plan_of(int4)
    assert not head.rounds_head(tied)  # FP8 since it was rounded
    plan = replace(tied, entries={name: entry for name, entry in tied.entries.items() if name != HEAD}, aliases={HEAD: "embed_tokens.weight"})
    assert not head.rounds_head(plan)


def test_a_load_that_fails_behind_the_head_holds_nothing_of_it(random_checkpoint, monkeypatch):
    """Even for whoever keeps the exception."""
    made = []

    def watched(*arguments):
        weight = load_head(*arguments)
        made.append(weakref.ref(weight.data))
        return weight

    def fails(*arguments, **options):
        raise OSError("the disk is gone")

    monkeypatch.setattr(source_module, "load_head", watched)
    monkeypatch.setattr(source_module, "load_weights", fails)
    with pytest.raises(OSError, match="gone") as kept:
        parts_of_folder(random_checkpoint).with_experts("int4").weights.load(torch.device("cpu"), torch.float32, False)
    gc.collect()
    assert kept.value.__traceback__ is not None and len(made) == 1 and made[0]() is None


def test_a_head_takes_values_that_float16_does_not_have():
    plain = torch.full((128, 128), 3.0)
    plain[5, 5] = 1e6
    assert head.fp8_head(plain, torch.device("cpu")).dequantize(torch.float32)[5, 5] == pytest.approx(1e6, rel=0.01)


def test_rounding_the_head_can_be_cancelled_at_any_band(monkeypatch):
    monkeypatch.setattr(head, "ROWS_AT_ONCE", 128)
    calls = []
    with pytest.raises(LoadCancelled):
        head.fp8_head(torch.ones(1024, 128), torch.device("cpu"), lambda: calls.append(0) or len(calls) > 3)
    assert len(calls) == 4


def test_a_result_of_a_version_that_left_the_head_alone_is_told_apart(random_checkpoint, tmp_path, caplog):
    target = convert(random_checkpoint, tmp_path / "small", "int4").folder
    record = json.loads((target / RECORD).read_text(encoding="utf-8"))
    assert record.pop("head") == "fp8"
    (target / RECORD).write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CheckpointError, match="an earlier version made it .* can be used as it is; delete it"):
        convert(random_checkpoint, target, "int4")
    unfinished = tmp_path / f"other{UNFINISHED}"
    unfinished.mkdir()
    (unfinished / RECORD).write_text(json.dumps(record), encoding="utf-8")
    assert convert(random_checkpoint, tmp_path / "other", "int4").resumed == 0
    assert any("by another version; it is begun anew" in record.getMessage() for record in caplog.records)


def test_a_damaged_head_is_named(random_checkpoint):
    plain = torch.zeros(300, 128)
    plain[299, 5] = math.nan
    with pytest.raises(CheckpointError, match="lm_head.weight.*NaN"):
        head.fp8_head(plain, torch.device("cpu"))


def test_rounded_while_loading_is_the_same_as_the_file(random_checkpoint, int4):
    engine = Engine.load(random_checkpoint, expert_format="int4")
    assert engine.weight_bytes == sum(weight.nbytes for weight in engine._residence.weights.values())
    ids = engine.render(PROMPT).token_ids
    logits = engine.logits(ids)
    assert torch.equal(logits, Engine.load(int4).logits(ids))
    stored = Engine.load(random_checkpoint)
    assert not torch.equal(logits, stored.logits(ids))
    assert engine.parts.identity != stored.parts.identity  # kept prompts of one are not those of the other
    assert engine.parts.identity != Engine.open(random_checkpoint, expert_format="int3").parts.identity


@pytest.mark.parametrize("expert_format, bits", [("int4", 4), ("int3", 3)])
def test_experts_stay_in_few_bits_and_their_bytes_are_told_before(random_checkpoint, expert_format, bits):
    source = parts_of_folder(random_checkpoint).with_experts(expert_format).weights
    seen = []
    weights = source.load(torch.device("cpu"), torch.bfloat16, False, progress=lambda done, total: seen.append((done, total)))
    stacks = [weight for name, weight in weights.items() if is_expert_stack(name)]
    assert stacks and all(isinstance(weight, PackedWeight) and weight.bits == bits for weight in stacks)
    assert source.device_bytes(torch.bfloat16, False) == sum(weight.nbytes for weight in weights.values())
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and len(seen) > 4
    assert set(weights) == set(parts_of_folder(random_checkpoint).weights.load(torch.device("cpu"), torch.bfloat16, False))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_loading_can_be_cancelled_at_any_piece(random_checkpoint, share):
    source, calls = parts_of_folder(random_checkpoint).with_experts("int4").weights, []
    source.load(torch.device("cpu"), torch.float32, False, cancel=lambda: calls.append(0))
    piece, again = int(share * len(calls)), iter(range(10**9))
    assert len(calls) > 15
    with pytest.raises(LoadCancelled):
        source.load(torch.device("cpu"), torch.float32, False, cancel=lambda: next(again) >= piece)


def test_few_bits_are_not_made_of_few_bits(int4, tmp_path, random_checkpoint):
    for expert_format in ("int4", "int3"):
        with pytest.raises(UnsupportedFormatError, match="few bits already"):
            Engine.open(int4, expert_format=expert_format)
    with pytest.raises(UnsupportedFormatError, match="few bits already"):
        convert(int4, tmp_path / "again", "int3")
    with pytest.raises(UnsupportedFormatError, match="BF16"):
        convert(random_checkpoint, tmp_path / "again", "fp8")
    assert not list(tmp_path.iterdir())


def test_fp8_is_the_official_layout(bf16, random_checkpoint, tmp_path):
    target = convert(bf16, tmp_path / "fp8", "fp8", shard_bytes=400_000).folder
    made, official = CheckpointIndex.open(target), CheckpointIndex.open(random_checkpoint)
    assert {name: (info.dtype, info.shape) for name, info in made.tensors.items()} == {
        name: (info.dtype, info.shape) for name, info in official.tensors.items()
    }
    assert len(made.files) > 3
    quantization = [json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"] for folder in (target, random_checkpoint)]
    assert quantization[0] == quantization[1]
    exact = load(bf16)
    for name, weight in load(target, dequantize=True).items():
        assert (weight - exact[name]).norm() <= 0.03 * exact[name].norm(), name
    assert Engine.load(target).generate(PROMPT, GREEDY).usage.completion_tokens


def test_an_interrupted_run_leaves_nothing_that_looks_whole_and_goes_on(random_checkpoint, tmp_path, monkeypatch):
    whole = convert(random_checkpoint, tmp_path / "whole", "int4", shard_bytes=150_000)
    target, unfinished = tmp_path / "out", tmp_path / f"out{UNFINISHED}"

    def stop(done, total):
        if done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(random_checkpoint, target, "int4", shard_bytes=150_000, progress=stop)
    assert not target.exists() and find_checkpoint_folders(tmp_path) == [whole.folder]
    kept = {path.name: path.stat().st_mtime_ns for path in unfinished.glob("*.safetensors")}
    assert kept and not list(unfinished.glob("*.part"))
    (unfinished / "model-00099-of-00099.safetensors.part").write_bytes(b"left by a power cut")
    rounded = []
    run = FewBits.run
    monkeypatch.setattr(FewBits, "run", lambda step, *arguments: (rounded.append(step.layer), run(step, *arguments)))
    again = convert(random_checkpoint, target, "int4", shard_bytes=150_000)
    assert again.resumed == len(kept) and rounded and 0 not in rounded
    assert not unfinished.exists()
    assert {name: (target / name).stat().st_mtime_ns for name in kept} == kept
    assert contents(target) == contents(whole.folder)


def test_an_interrupted_run_of_something_else_is_cleaned_away(random_checkpoint, tmp_path):
    def stop(done, total):
        if done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(random_checkpoint, tmp_path / "out", "int3", shard_bytes=150_000, progress=stop)
    assert convert(random_checkpoint, tmp_path / "out", "int4", shard_bytes=150_000).resumed == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]["bits"] == 4


def test_interrupting_the_command_says_what_is_kept(random_checkpoint, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(FewBits, "run", interrupted)
    assert main(["quantize", str(random_checkpoint), str(tmp_path / "out"), "--to", "int4", "--device", "cpu"]) == 2
    assert f"out{UNFINISHED} keeps what is finished" in capsys.readouterr().err


def test_the_same_again_is_there_already_and_anything_else_is_refused(random_checkpoint, bf16, int4, tmp_path, capsys):
    before = contents(int4)
    assert not convert(random_checkpoint, int4, "int4").made
    assert main(["quantize", str(random_checkpoint), str(int4), "--to", "int4", "--device", "cpu"]) == 0
    assert "already" in capsys.readouterr().out
    for source, to, group in ((random_checkpoint, "int3", 32), (random_checkpoint, "int4", 32), (bf16, "int4", None)):
        with pytest.raises(CheckpointError, match="holds something else"):
            convert(source, int4, to, group=group)
    assert contents(int4) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds something else"):
        convert(random_checkpoint, tmp_path / "mine", "int4")
    (tmp_path / f"new{UNFINISHED}").mkdir()
    (tmp_path / f"new{UNFINISHED}" / "notes.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not made by this command"):
        convert(random_checkpoint, tmp_path / "new", "int4")
    assert [path.read_text(encoding="utf-8") for path in tmp_path.rglob("notes.txt")] == ["keep"] * 2
    (tmp_path / "empty").mkdir()
    assert convert(random_checkpoint, tmp_path / "empty", "int4").made


def test_room_on_the_disk_is_asked_for_first(random_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(10**9, 10**9, 1000))
    with pytest.raises(CheckpointError, match="are free on this disk"):
        convert(random_checkpoint, tmp_path / "out", "int4")
    assert not list(tmp_path.iterdir())


def test_bad_places_and_choices_are_named(random_checkpoint, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="inside the source"):
        convert(random_checkpoint, random_checkpoint / "small", "int4")
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(random_checkpoint, tmp_path / "a" / "b", "int4")
    with pytest.raises(ConfigError, match="int2"):
        convert(random_checkpoint, tmp_path / "out", "int2")
    for option, words in ((["--group", "48"], "--group"), (["--device", "cuda:99"], "cuda:99")):
        assert main(["quantize", str(random_checkpoint), str(tmp_path / "out"), "--to", "int4", "--device", "cpu", *option]) == 2
        assert words in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "none"), str(tmp_path / "out"), "--to", "int4", "--device", "cpu"]) == 2
    assert not (tmp_path / "out").exists()


def test_damaged_experts_are_named_and_no_folder_appears(random_checkpoint, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(random_checkpoint, damaged)
    info = next(info for name, info in CheckpointIndex.open(damaged).tensors.items() if name.endswith("layers.1.mlp.experts.2.up_proj.weight"))
    with open(info.file, "r+b") as stream:
        stream.seek(info.offset + 7)
        stream.write(b"\x7f")  # the NaN of e4m3
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.up\.weight: holds values that are not finite"):
        convert(damaged, tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_a_newer_record_is_refused(int4, tmp_path):
    folder = tmp_path / "newer"
    shutil.copytree(int4, folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        plan_of(folder)


@pytest.mark.parametrize("change, words", [
    (lambda tensors: tensors.pop(next(name for name in tensors if name.endswith("up.scale"))), "tensor|expected codes and scale"),
    (lambda tensors: tensors.update({n: t.float() for n, t in tensors.items() if n.endswith("0.mlp.experts.up.scale")}), "expected F16"),
    (lambda tensors: tensors.update({n: t[:, :, :-1].contiguous() for n, t in tensors.items() if n.endswith("0.mlp.experts.up.codes")}), "expected U8 codes"),
])  # fmt: skip
def test_a_damaged_record_is_refused_by_name(int4, tmp_path, change, words):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "damaged"
    shutil.copytree(int4, folder)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        plan_of(folder)


def test_the_record_of_the_work_is_in_the_folder(random_checkpoint, int4):
    job = json.loads((int4 / RECORD).read_text(encoding="utf-8"))
    assert job["made_by"] == "a3b" and set(job["files"]) == {path.name for path in random_checkpoint.glob("*.safetensors")}
    assert all(math.isfinite(size) and size > 0 for size, _ in job["files"].values())
