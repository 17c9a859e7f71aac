"""Routed experts handed over layer by layer, read alone, and known by layout before anything is read."""

import json

import pytest
import torch
from checkpoint_samples import canonical_weights, load, official_weights, plan_of, tiny_config, write_raw, write_sample
from packed_samples import DECLARED_BY_SCHEME, packed_checkpoint

from a3b_engine.bench.weights import RandomWeights, RecordedWeights
from a3b_engine.checkpoint import reader
from a3b_engine.checkpoint.experts import expert_shapes
from a3b_engine.checkpoint.names import is_expert_stack, stack_names
from a3b_engine.checkpoint.packed import PackedWeight
from a3b_engine.checkpoint.reader import LoadCancelled, load_weights
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.config import ModelConfig
from a3b_engine.errors import CheckpointError
from a3b_engine.parts import FolderWeights, parts_of_folder

CPU = torch.device("cpu")
FORMS = ["bf16", "bf16 fused", "fp32", "fp8", "fp8 fused", "fp8 tensor", "int4 own", "int3 own", *DECLARED_BY_SCHEME]


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch):
    monkeypatch.setattr("a3b_engine.checkpoint.quantize.convert.TOKENS", 64)


def source_of(form, folder, random_checkpoint) -> FolderWeights:
    if form in DECLARED_BY_SCHEME:
        packed_checkpoint(folder, form)
    elif form.endswith("own"):
        from a3b_engine.checkpoint.quantize.convert import convert

        return parts_of_folder(convert(random_checkpoint, folder / "model", form.split()[0]).folder).weights
    elif form == "fp8 tensor":  # one scale for all experts of a fused tensor
        tensors = official_weights(tiny_config())
        for name in [name for name in tensors if ".mlp.experts." in name]:
            codes = tensors[name].to(torch.float8_e4m3fn)
            tensors[name], tensors[name.removesuffix(".weight") + ".weight_scale"] = codes, torch.rand(()) + 0.5
        write_raw(folder, tensors)
    else:
        # Halves of the fused tensor that meet inside a block of scales: 160 rows of gate, then those of up.
        config = tiny_config(hidden_size=192, moe_intermediate_size=160)
        config["vision_config"]["out_hidden_size"] = 192
        write_sample(folder, config, format=form.split()[0], experts="fused" if "fused" in form else "per_expert")
    return FolderWeights(plan_of(folder))


def parts_of(weight) -> list[torch.Tensor]:
    if isinstance(weight, ScaledWeight):
        return [weight.data.view(torch.uint8), weight.scale]
    if isinstance(weight, PackedWeight):
        parts = [part for part in (weight.codes, weight.scale, weight.zero, weight.factor) if part is not None]
        return [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]
    return [weight]


def same(one, other) -> bool:
    pairs = list(zip(parts_of(one), parts_of(other), strict=True))
    return type(one) is type(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_the_experts_gives_the_same_bits(tmp_path, pieces, random_checkpoint, form, dequantize):
    source = source_of(form, tmp_path, random_checkpoint)
    whole = source.load(CPU, torch.bfloat16, dequantize)
    taken = {}
    rest = source.load(CPU, torch.bfloat16, dequantize, take_experts=lambda layer, stacks: taken.update({layer: stacks}))
    stacks = [name for name in whole if is_expert_stack(name)]
    assert stacks and not any(map(is_expert_stack, rest)) and set(rest) == set(whole) - set(stacks)
    assert all(same(rest[name], whole[name]) for name in rest)
    assert list(taken) == sorted({int(name.split(".")[1]) for name in stacks})
    shapes = source.expert_shapes(torch.bfloat16, dequantize)
    for layer, experts in taken.items():
        count = experts.gate.shape[0]
        ids = [count - 1, 0, 2]
        some = source.read_experts(layer, ids, torch.bfloat16, dequantize)
        for which, name in zip(("gate", "up", "down"), stack_names(layer), strict=True):
            stack, shape = getattr(experts, which), getattr(shapes, which)
            assert same(stack, whole[name]), name
            assert same(getattr(some, which), stack[torch.tensor(ids)]), name
            for part, planned in zip(parts_of(stack), parts_of(shape), strict=True):
                assert planned.device.type == "meta" and (part.dtype, part.shape) == (planned.dtype, planned.shape)
            if isinstance(stack, ScaledWeight):
                assert shape.block == stack.block
            if isinstance(stack, PackedWeight):
                kind = ("values", "group", "bits", "factor_divides")
                assert [getattr(shape, key) for key in kind] == [getattr(stack, key) for key in kind]


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_tiers_add_up(tmp_path, random_checkpoint, form, dequantize):
    source = source_of(form, tmp_path, random_checkpoint)
    tiers, weights = source.tier_bytes(torch.bfloat16, dequantize), source.load(CPU, torch.bfloat16, dequantize)
    assert sum(tiers.values()) == source.device_bytes(torch.bfloat16, dequantize)
    assert tiers["experts"] == sum(weight.nbytes for name, weight in weights.items() if is_expert_stack(name))
    assert tiers["embedding"] == weights["embed_tokens.weight"].nbytes
    assert tiers["vision"] == sum(weight.nbytes for name, weight in weights.items() if name.startswith("visual."))
    shapes, layers = source.expert_shapes(torch.bfloat16, dequantize), len({name.split(".")[1] for name in weights if is_expert_stack(name)})
    assert tiers["experts"] == layers * (shapes.gate.nbytes + shapes.up.nbytes + shapes.down.nbytes)


def test_an_embedding_that_is_the_head_stays_with_the_rest(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = official_weights(config)
    del tensors["lm_head.weight"]
    source = FolderWeights(plan_of(write_raw(tmp_path, tensors, config)))
    tiers = source.tier_bytes(torch.bfloat16, False)
    assert tiers["embedding"] == 0 and sum(tiers.values()) == source.device_bytes(torch.bfloat16, False)
    weights = source.load(torch.device("meta"), torch.bfloat16, False, on_host=lambda name: name == "embed_tokens.weight")
    assert weights["embed_tokens.weight"].device.type == "cpu" and weights["lm_head.weight"].device.type == "meta"
    assert torch.equal(weights["embed_tokens.weight"].float(), canonical_weights(config)["embed_tokens.weight"])


def test_names_that_stay_on_the_host(tmp_path, pieces):
    plan = plan_of(write_sample(tmp_path, format="fp8"))
    expected = load(tmp_path, torch.bfloat16)
    # The device is the one of no memory: what is on it has no content, what is not must be whole.
    weights = load_weights(plan, "meta", torch.bfloat16, on_host=lambda name: name.startswith(("embed", "visual.", "layers.1.")))
    for name, weight in weights.items():
        on_host = name.startswith(("embed", "visual.", "layers.1."))
        assert weight.device.type == ("cpu" if on_host else "meta"), name
        assert not on_host or same(weight, expected[name]), name


class Watched:
    """Counts the layers of experts whose tensors exist at the same time."""

    def __init__(self, monkeypatch):
        self.now, self.most = set(), 0
        prepare, finish = reader._Loading._prepare_all, reader._Loading._finish

        def prepared(loading, entries):
            self.now.update(entry.name.split(".")[1] for entry in entries if is_expert_stack(entry.name))
            self.most = max(self.most, len(self.now))
            return prepare(loading, entries)

        def finished(loading, entries, layer, take):
            finish(loading, entries, layer, take)
            self.now.discard(str(layer))

        monkeypatch.setattr(reader._Loading, "_prepare_all", prepared)
        monkeypatch.setattr(reader._Loading, "_finish", finished)


def test_two_layers_at_a_time_and_reading_goes_on_meanwhile(tmp_path, monkeypatch, pieces):
    watched = Watched(monkeypatch)
    plan = plan_of(write_sample(tmp_path, tiny_config(num_hidden_layers=6), format="fp8"))
    order = []

    def take(layer, stacks):
        order.append(layer)
        assert layer == 5 or str(layer + 1) in watched.now  # the next one is on its way

    load_weights(plan, "cpu", torch.float32, take_experts=take)
    assert order == list(range(6)) and watched.most == 2


def test_progress_and_cancel_go_through_all_layers(tmp_path, pieces):
    source = FolderWeights(plan_of(write_sample(tmp_path, tiny_config(num_hidden_layers=4), format="fp8")))
    steps, taken = [], []
    source.load(CPU, torch.bfloat16, False, lambda *step: steps.append(step), take_experts=lambda layer, _: taken.append(layer))
    assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] and taken == [0, 1, 2, 3]
    taken.clear()
    with pytest.raises(LoadCancelled):
        source.load(CPU, torch.bfloat16, False, cancel=lambda: len(taken) == 2, take_experts=lambda layer, _: taken.append(layer))
    assert taken == [0, 1]


def test_a_taker_that_raises_leaves_nothing(tmp_path):
    from test_checkpoint_reader import Interrupt, tensor_bytes

    plan = plan_of(write_sample(tmp_path, tiny_config(num_hidden_layers=4), format="fp8"))
    before = tensor_bytes()

    def take(layer, stacks):
        if layer == 1:
            raise Interrupt

    with pytest.raises(Interrupt) as caught:
        load_weights(plan, "cpu", torch.float32, take_experts=take)
    assert caught.value.__traceback__ is not None and tensor_bytes() == before


def test_a_file_that_is_cut_after_planning_is_named_while_layers_are_taken(tmp_path):
    plan = plan_of(write_sample(tmp_path, tiny_config(num_hidden_layers=4), format="fp8"))
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as stream:
        stream.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="ends at byte"):
        load_weights(plan, "cpu", torch.float32, take_experts=lambda layer, stacks: None)


def test_layers_stored_otherwise_are_named(tmp_path):
    write_sample(tmp_path / "a", format="fp8")
    write_sample(tmp_path / "b", format="bf16")
    plan, other = plan_of(tmp_path / "a"), plan_of(tmp_path / "b")
    for name in stack_names(1):
        plan.entries[name] = other.entries[name]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate\.weight are stored otherwise than those of layer 0"):
        expert_shapes(plan, torch.bfloat16, False)
    assert expert_shapes(plan, torch.bfloat16, True).gate.dtype == torch.bfloat16


# Sources without files


@pytest.mark.parametrize("experts", ["stored", "int4", "int3", "nvfp4"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_random_weights_do_the_same(random_checkpoint, experts, dequantize):
    source = RecordedWeights(RandomWeights(ModelConfig.from_folder(random_checkpoint), 3, experts))
    whole, taken = source.load(CPU, torch.bfloat16, dequantize), {}
    sizes = dict(source.sizes)
    rest = source.load(
        CPU, torch.bfloat16, dequantize, take_experts=lambda layer, stacks: taken.update({layer: stacks}), on_host=lambda name: name.startswith("embed")
    )
    assert source.sizes == sizes == {name: weight.nbytes for name, weight in whole.items()}
    assert all(same(rest[name], whole[name]) for name in rest) and not any(map(is_expert_stack, rest))
    shapes = source.expert_shapes(torch.bfloat16, dequantize)
    for layer, stacks in taken.items():
        for which, name in zip(("gate", "up", "down"), stack_names(layer), strict=True):
            assert same(getattr(stacks, which), whole[name])
            assert [part.shape for part in parts_of(getattr(shapes, which))] == [part.shape for part in parts_of(whole[name])]
    assert sum(source.tier_bytes(torch.bfloat16, dequantize).values()) == source.device_bytes(torch.bfloat16, dequantize)
    assert source.read_experts(0, [1], torch.bfloat16, dequantize) is None


def test_experts_are_read_without_reading_the_rest(tmp_path, monkeypatch):
    source = FolderWeights(plan_of(write_sample(tmp_path, format="fp8")))
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert len(files) > 50
    read = []
    run = reader.run_batches

    def counted(batches, device, report, total):
        read.append(total)
        run(batches, device, report, total)

    monkeypatch.setattr(reader, "run_batches", counted)
    experts = source.read_experts(1, [2], torch.bfloat16, False)
    assert read == [sum(part.nbytes for stack in (experts.gate, experts.up, experts.down) for part in (stack.data,)) + 3 * 2]  # bfloat16 scales
