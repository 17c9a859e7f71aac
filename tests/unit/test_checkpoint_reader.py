"""Reading weights: the right bytes, dtypes and places; progress, cancelling, and nothing left behind."""

import gc
import json

import pytest
import torch
from checkpoint_samples import canonical_weights, load, official_weights, plan_of, tiny_config, write_raw, write_sample

from a3b_engine.checkpoint import pipeline, reader, scaled
from a3b_engine.checkpoint.names import stack_names
from a3b_engine.checkpoint.reader import LoadCancelled, load_weights
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.checkpoint.write import quantize_fp8_block
from a3b_engine.errors import CheckpointError

FLOAT32 = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight", "linear_attn.norm.weight",
           "A_log", "dt_bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "merger.norm.weight", "merger.norm.bias")  # fmt: skip


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 1000 bytes: every path that splits or joins reads is taken by tiny files."""
    for module in (pipeline, reader):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(pipeline, "_DIRECT_BYTES", 300)
    monkeypatch.setattr(pipeline, "_GAP_BYTES", 50)


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", ["usual", "small"])
def test_dense_weights_arrive_exactly(tmp_path, request, format, dtype, chunks):
    if chunks == "small":
        request.getfixturevalue("small_chunks")
    weights = load(write_sample(tmp_path, format=format, max_shard_bytes=50_000), dtype)
    for name, expected in canonical_weights(tiny_config()).items():
        wanted = torch.float32 if name.endswith(FLOAT32) or name == "norm.weight" else dtype
        assert weights[name].dtype == wanted, name
        assert torch.equal(weights[name], expected.to(wanted)), name


@pytest.mark.parametrize("stored", [torch.float16, torch.float64])
def test_other_float_types_are_read(tmp_path, stored):
    tensors = {name: tensor.to(stored) for name, tensor in official_weights(tiny_config()).items()}
    weights = load(write_raw(tmp_path, tensors))
    assert all(torch.equal(weights[name], tensor.to(stored).float()) for name, tensor in canonical_weights(tiny_config()).items())


def test_elements_at_odd_addresses(tmp_path):
    # 3 value heads: A_log is 6 bytes of bfloat16, so that every float32 tensor read along with it begins inside a word.
    config = tiny_config(linear_num_value_heads=3)
    tensors = {name: tensor.bfloat16() if name.endswith("A_log") else tensor for name, tensor in official_weights(config).items()}
    order = sorted(tensors, key=lambda name: not name.endswith("A_log"))
    header, end = {}, 0
    for name in order:
        code = "BF16" if tensors[name].dtype == torch.bfloat16 else "F32"
        header[name] = {"dtype": code, "shape": list(tensors[name].shape), "data_offsets": [end, end + tensors[name].nbytes]}
        end += tensors[name].nbytes
    raw = json.dumps(header).encode()
    data = b"".join(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in order)
    (write_raw(tmp_path, {}, config) / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    weights = load(tmp_path, torch.bfloat16)
    assert all(torch.equal(weights[name].float(), tensor) for name, tensor in canonical_weights(config).items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunks", ["usual", "small"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_cuda_gets_the_same_weights(tmp_path, request, chunks, dequantize):
    if chunks == "small":
        request.getfixturevalue("small_chunks")
    plan = plan_of(write_sample(tmp_path, format="fp8"))
    expected = load_weights(plan, "cpu", torch.bfloat16, dequantize=dequantize)
    def keep(layer, stacks):
        taken.update(zip(stack_names(layer), (stacks.gate, stacks.up, stacks.down)))

    def on_host(name):
        return name.startswith(("embed", "visual."))

    taken = {}
    weights = load_weights(plan, "cuda:0", torch.bfloat16, dequantize=dequantize, take_experts=keep, on_host=on_host)
    assert taken and not weights.keys() & taken.keys()
    weights.update(taken)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.device.type == ("cpu" if on_host(name) else "cuda")
        if isinstance(weight, ScaledWeight):
            assert torch.equal(weight.data.view(torch.uint8).cpu(), expected[name].data.view(torch.uint8)), name
            assert torch.equal(weight.scale.cpu(), expected[name].scale) and weight.block == expected[name].block, name
        else:
            assert torch.equal(weight.cpu(), expected[name]), name


@pytest.mark.parametrize("chunks", ["usual", "small"])
@pytest.mark.parametrize("experts", ["fused", "per_expert"])
def test_fp8_stays_stored_or_is_multiplied_out(tmp_path, request, chunks, experts):
    if chunks == "small":
        request.getfixturevalue("small_chunks")
    config = tiny_config(hidden_size=320, moe_intermediate_size=256)
    config["vision_config"]["out_hidden_size"] = 320
    folder = write_sample(tmp_path, config, format="fp8", experts=experts)
    stored, plain = load(folder, torch.bfloat16), load(folder, torch.bfloat16, dequantize=True)
    scaled = [name for name, weight in stored.items() if isinstance(weight, ScaledWeight)]
    # one DeltaNet layer 3, one attention layer 4, and in each 3 shared and 3 expert stacks
    assert len(scaled) == 3 + 4 + 2 * 6
    for name, original in canonical_weights(config).items():
        if name in scaled:
            codes, scale = quantize_fp8_block(original)
            assert torch.equal(stored[name].data.view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(stored[name].scale, scale.float()), name
            assert torch.equal(plain[name], stored[name].dequantize(torch.bfloat16)), name
            assert (plain[name].float() - original).abs().max() <= original.abs().max() / 16
        else:
            assert torch.equal(plain[name], stored[name]), name


def test_progress_reaches_the_total_and_counts_what_is_included(tmp_path, small_chunks, monkeypatch):
    monkeypatch.setattr(reader, "_PROGRESS_SECONDS", 0.0)
    plan = plan_of(write_sample(tmp_path, format="fp8"))
    calls = []
    load_weights(plan, "cpu", torch.float32, progress=lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, plan.stored_bytes) and calls[-1] == (plan.stored_bytes, plan.stored_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls) and len(calls) > 10
    calls.clear()
    weights = load_weights(plan, "cpu", torch.float32, progress=lambda *call: calls.append(call), include=lambda n: n.startswith("visual."))
    assert set(weights) == {name for name in plan.entries if name.startswith("visual.")}
    assert calls[-1][0] == calls[-1][1] == 2 * sum(weight.numel() for weight in weights.values())


class Interrupt(Exception):
    pass


def tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("dequantize", [False, True])
def test_cancel_may_raise_and_nothing_stays_in_memory(tmp_path, small_chunks, dequantize):
    plan = plan_of(write_sample(tmp_path, format="fp8"))
    scaled._table(torch.float8_e4m3fn)  # made once, kept for good
    before = tensor_bytes()
    calls = 0

    def cancel():
        nonlocal calls
        calls += 1
        if calls == 60:
            raise Interrupt

    with pytest.raises(Interrupt) as caught:
        load_weights(plan, "cpu", torch.float32, dequantize=dequantize, cancel=cancel)
    # The exception and its traceback are still held here, as a debugger or ComfyUI's log would.
    assert caught.value.__traceback__ is not None and calls == 60
    assert tensor_bytes() == before


def test_cancel_that_returns_true(tmp_path):
    plan = plan_of(write_sample(tmp_path))
    with pytest.raises(LoadCancelled):
        load_weights(plan, "cpu", torch.float32, cancel=lambda: True)
    assert load_weights(plan, "cpu", torch.float32, cancel=lambda: False).keys() == plan.entries.keys()


def test_progress_that_raises_stops_the_reading(tmp_path):
    def progress(done, total):
        raise Interrupt

    with pytest.raises(Interrupt):
        load(write_sample(tmp_path), progress=progress)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_file_that_changes_between_plan_and_reading(tmp_path, damage):
    folder = write_sample(tmp_path)
    plan = plan_of(folder)
    path = folder / "model.safetensors"
    if damage == "cut":
        with open(path, "r+b") as stream:
            stream.truncate(path.stat().st_size // 2)
    else:
        path.unlink()
    before = tensor_bytes()
    with pytest.raises(CheckpointError, match="model.safetensors") as caught:
        load_weights(plan, "cpu", torch.float32)
    assert ("ends at byte" if damage == "cut" else "cannot be read") in str(caught.value)
    assert tensor_bytes() == before


def test_reader_threads_end(tmp_path):
    import threading

    load(write_sample(tmp_path))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("a3b-read")]


def test_global_state_is_untouched(tmp_path):
    state, threads, dtype = torch.random.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    load(write_sample(tmp_path, format="fp8"), torch.bfloat16)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)


# ScaledWeight


def stack() -> ScaledWeight:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(3, 200, 300, generator=generator).to(torch.float8_e4m3fn)
    return ScaledWeight(data, torch.rand(3, 2, 3, generator=generator) + 0.5, (128, 128))


def reference(weight: ScaledWeight) -> torch.Tensor:
    rows, columns = weight.shape[-2:]
    scale = weight.scale.repeat_interleave(weight.block[0], -2).repeat_interleave(weight.block[1], -1)
    return weight.data.float() * scale[..., :rows, :columns]


def test_scaled_weight_is_indexed_by_expert():
    weight = stack()
    assert weight.ndim == 3 and tuple(weight.shape) == (3, 200, 300) and weight.nbytes == 3 * (200 * 300 + 4 * 6)
    full = weight.dequantize(torch.float32)
    assert torch.equal(full, reference(weight))
    assert torch.equal(weight[2].dequantize(torch.float32), full[2])
    assert torch.equal(weight[1:].dequantize(torch.float32), full[1:])
    chosen = torch.tensor([2, 0, 2])
    assert torch.equal(weight[chosen].dequantize(torch.bfloat16), full[chosen].bfloat16())
    assert weight[chosen[:0]].dequantize(torch.bfloat16).shape == (0, 200, 300)
    assert weight[1].data.data_ptr() == weight.data[1].data_ptr()  # a view, no copy
    with pytest.raises(IndexError):
        weight[1][0]


@pytest.mark.parametrize("elements", [1, 1000, 10**9])
@pytest.mark.parametrize("block", [(128, 128), (1, 300), (200, 300), (64, 32), (256, 512)])
def test_multiplying_out_does_not_depend_on_the_step(monkeypatch, elements, block):
    monkeypatch.setitem(scaled._ELEMENTS_AT_ONCE, "cpu", elements)
    data = stack().data[0]
    scale = torch.rand(-(-200 // block[0]), -(-300 // block[1]), generator=torch.Generator().manual_seed(1))
    weight = ScaledWeight(data, scale, block)
    assert torch.equal(weight.dequantize(torch.float32), reference(weight))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_has_its_value(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(2, 128)
    plain = ScaledWeight(codes, torch.ones(1, 1), (2, 128)).dequantize(torch.float32)
    assert torch.equal(plain.isnan(), codes.float().isnan()) and torch.equal(plain.nan_to_num(), codes.float().nan_to_num())


def test_rounding_happens_once():
    weight = ScaledWeight(torch.full((2, 2), 0.9375).to(torch.float8_e4m3fn), torch.full((1, 1), 1.0009), (2, 2))
    assert torch.equal(weight.dequantize(torch.bfloat16), torch.full((2, 2), 0.9375 * 1.0009).bfloat16())


def test_scale_of_the_wrong_shape_is_a_programming_error():
    with pytest.raises(ValueError, match=r"expected \[2, 3\]"):
        ScaledWeight(stack().data[0], torch.ones(3, 2), (128, 128))


def test_moving_keeps_the_blocks():
    weight = stack().to("meta")
    assert weight.device.type == "meta" and weight.scale.device.type == "meta" and weight.block == (128, 128)
