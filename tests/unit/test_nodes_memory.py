"""What the nodes say about memory: the loader's `memory` output, stats, refusals and out-of-memory messages."""

import json
import sys
import types

import pytest
import torch
from fake_comfy import comfy, engine_class, part  # noqa: F401
from node_runs import errors, run, widgets

advice = part("nodes.memory_advice")
residency = part("nodes.residency")
sockets = part("nodes.sockets")
host = part("nodes.host")
Prompt = part("a3b_engine.prompt").Prompt

GB = 10**9


def load(comfy, **inputs):
    if not (comfy.models_dir / "LLM" / "q").exists():
        comfy.add_checkpoint(comfy.models_dir / "LLM", "q")
    return run("A3BLoadModel", **{**widgets("A3BLoadModel"), "checkpoint": "q", **inputs})


def generate(model, **inputs):
    out = run("A3BGenerate", **{**widgets("A3BGenerate"), "model": model, "prompt": Prompt(user="hi"), **inputs})
    return json.loads(out["result"][2])


# The memory output


def test_the_loader_says_what_is_where_before_and_after(comfy, engine_class):
    comfy.free, comfy.total = 21 * GB, 24 * GB
    model, text = load(comfy)
    assert text.splitlines()[:2] == ["not loaded", "cpu: 21.0 of 24.0 GB are free; vram_gb = 0: ComfyUI decides how much the model takes."]
    assert "when this node ran" in text and "last used" not in text
    generate(model)
    assert load(comfy)[1].splitlines()[0] == "all there"
    residency._residents[model].patcher.detach(True)
    assert "When it was last used: all there" in load(comfy)[1]
    assert "vram_gb = 12.5 is the most" in load(comfy, vram_gb=12.5)[1]


def test_the_text_runs_nothing_again(comfy, engine_class):
    """Where things are is no part of what ComfyUI compares: else everything behind the loader ran at every press of Run."""
    changed = part("nodes.load_model").A3BLoadModel.IS_CHANGED
    model, _ = load(comfy)
    before = changed(checkpoint="q")
    generate(model)
    assert changed(checkpoint="q") == before


def test_stats_have_the_figures_and_the_sentences(comfy, engine_class):
    memory = generate(load(comfy)[0])["memory"]
    assert memory["weights"] == 5.0 and memory["experts_on_device"] == 8 and memory["report"] == ["all there"]


# Widgets


def test_widgets_reach_the_engine(comfy, engine_class):
    model, _ = load(comfy, keep_in_ram=True, cache_experts=True, expert_format="int4")
    assert residency.open_engine(model).options["park"] is True and residency.open_engine(model).options["cache_experts"] is True
    plain, _ = load(comfy)
    assert plain == load(comfy, cache_experts=True)[0], "nothing is made smaller, so nothing is kept: the same engine"
    assert residency.open_engine(plain).options["park"] is False


# A CPU that nobody chose


def test_a_big_model_goes_on_a_cpu_only_on_purpose(comfy, engine_class):
    engine_class.weight_bytes = engine_class.most_bytes = 36 * GB
    comfy.total = comfy.free = 64 * GB
    with pytest.raises(errors.MemoryBudgetError) as caught:
        load(comfy)
    for said in ("device: auto is the CPU here", "36.0 GB of weights", "at most 8.0 GB", "60 % of the 64.0 GB", "device = cpu"):
        assert said in str(caught.value)
    assert load(comfy, device="cpu")[0].device == "cpu"
    engine_class.weight_bytes = 7 * GB
    assert load(comfy)[0].device == "cpu"
    comfy.total = 10 * GB
    with pytest.raises(errors.MemoryBudgetError, match="at most 6.0 GB"):
        load(comfy)


def test_a_card_that_is_not_here_counts_as_nobody_s_choice(comfy, engine_class):
    engine_class.weight_bytes = 36 * GB
    with pytest.raises(errors.MemoryBudgetError, match="device: auto is the CPU here"):
        load(comfy, device="cuda:1")


# Out of memory


def big_engine(**facts):
    """36 GB of weights, 32 GB of them experts that other formats make smaller; 1 GB to work in at the whole context of 8192."""

    class Parts:
        def __init__(self, experts, rest):
            self.weights = types.SimpleNamespace(tier_bytes=lambda dtype, dequantize: {"experts": experts, "rest": rest})

        def with_experts(self, name):
            if name == "int3":
                raise errors.CheckpointError("sizes that groups do not divide")
            return Parts(16 * GB, 3 * GB)  # the head is rounded too

    fields = {
        "name": "q", "weight_bytes": 36 * GB, "loaded_bytes": 20 * GB, "smallest_bytes": 7 * GB, "least_room": 7 * GB, "least_bytes": 8 * GB, "context": 8192,
        "experts_may_shrink": True, "dtype": None, "device": torch.device("cuda", 0), "parts": Parts(32 * GB, 4 * GB),
        "working_bytes": lambda tokens: tokens * GB // 8192, "memory": lambda: {"total": 21 * GB, "weights": 20 * GB},
    }  # fmt: skip
    return types.SimpleNamespace(**{**fields, **facts})


HANDLE = sockets.ModelHandle(path="q", device="cuda:0")


def test_levers_are_named_with_what_they_save_the_strongest_first():
    texts = advice.levers(big_engine(), HANDLE, 20 * GB)
    assert texts[0].startswith("vram_gb = 20 (now 0, ComfyUI decides) takes 1.0 GB less, down to vram_gb = 8 with 13.0 GB less")
    assert texts[1:] == ["expert_format = int4 takes 9.0 GB less", "context = 4096 (now 8192) takes 0.50 GB less"]


def test_a_smaller_format_saves_of_the_smallest_part_too():
    """4 of 7 GB are no experts; of the other three int4 takes half, and the head becomes smaller."""
    texts = advice.levers(big_engine(), HANDLE, 7 * GB)
    assert "expert_format = int4 takes 2.5 GB less" in texts
    whole = advice.levers(big_engine(weight_bytes=38 * GB), HANDLE, 38 * GB)  # with 2 GB that leave before any expert does
    assert any(text.startswith("expert_format = int4 takes 17.0 GB less") for text in whole)


def test_levers_that_do_nothing_are_not_named():
    smallest = advice.levers(big_engine(experts_may_shrink=False, context=512), HANDLE, 7 * GB)
    assert smallest == []
    assert [text[:13] for text in advice.levers(big_engine(device=torch.device("cpu")), HANDLE, 7 * GB)] == ["context = 409"]


def test_the_message_has_the_figures_the_levers_and_the_cause():
    error = advice.out_of_memory(big_engine(), HANDLE, torch.cuda.OutOfMemoryError("Tried to\n allocate"), GB // 2)
    assert isinstance(error, (errors.A3BError, torch.cuda.OutOfMemoryError)) and isinstance(error, errors.A3BError)
    for said in ("q ran out of memory on cuda:0", "held 21.0 GB", "20.0 GB of it weights", "0.5 GB were free", "vram_gb = 20", "Tried to allocate"):
        assert said in str(error)


@pytest.mark.parametrize(
    "problem, short",
    [
        (torch.cuda.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
        (errors.PromptError("a story about being out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(comfy, problem, short):
    assert host.is_out_of_memory(problem) is short


def test_generate_out_of_memory_frees_everything_and_works_again(comfy, engine_class):
    model, _ = load(comfy)

    def fail(index):
        tensor = torch.zeros(3)  # in the frame of the failure
        raise torch.cuda.OutOfMemoryError(f"Tried to allocate {tensor.nbytes} bytes")

    engine_class.before_token = staticmethod(fail)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="q ran out of memory on cpu.*Tried to allocate 12 bytes") as caught:
        generate(model)
    assert isinstance(caught.value, sys.modules["comfy.model_management"].OOM_EXCEPTION)
    assert comfy.loaded == [] and residency.open_engine(model).loaded_bytes == 0
    engine_class.before_token = staticmethod(lambda index: None)
    assert generate(model)["finish_reason"] == "stop" and residency.open_engine(model).loads == 2
    traced = caught.value.__context__.__traceback__
    while traced is not None:
        assert "tensor" not in traced.tb_frame.f_locals, "a frame holds what the device has no room for"
        traced = traced.tb_next


def test_encoding_asks_for_what_seeing_takes(comfy, engine_class):
    engine_class.seeing_bytes = 77 * GB
    model, _ = load(comfy)
    run("A3BEncodeImage", model=model, image=torch.zeros(1, 8, 8, 3), size=384, fit="crop")
    assert comfy.memory_requests == [77 * GB]


@pytest.mark.parametrize("vram_gb", [float("nan"), float("inf"), -1.0, "12"])
def test_a_cap_that_is_no_number_is_named(vram_gb):
    with pytest.raises(errors.ConfigError, match="vram_gb: found"):
        residency._budget(vram_gb)
    assert residency._budget(0.0) is None and residency._budget(1.5) == 1_500_000_000
