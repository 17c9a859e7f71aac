"""The nodes over the real engine and a small random checkpoint; only ComfyUI is a fake."""

import json
import logging

import pytest
import torch
from fake_comfy import Interrupted, comfy, load_pack, part  # noqa: F401

NODES = load_pack().NODE_CLASS_MAPPINGS
REGEX = {"format": "regex", "regex": "[a-z]{12}"}


def run(node_id, **inputs):
    node = NODES[node_id]
    required = node.INPUT_TYPES()["required"]
    defaults = {name: options["default"] for name, (_, options) in required.items() if "default" in options}
    out = node().execute(**{**defaults, **inputs})
    return out["result"] if isinstance(out, dict) else out


@pytest.fixture
def model(comfy, random_checkpoint):
    comfy.folders["LLM"][0].append(str(random_checkpoint.parent))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    handle, _ = run("A3BLoadModel", checkpoint=random_checkpoint.name)
    yield handle
    part("nodes.residency").open_engine(handle).close()
    torch.set_num_threads(threads)


@pytest.fixture
def prompt(comfy):
    return run("A3BBuildPrompt", text="Say something.")[0]


def test_picture_to_answer(comfy, model, caplog):
    with caplog.at_level(logging.INFO):
        images, tokens = run("A3BEncodeImage", model=model, image=torch.rand(2, 64, 96, 4), size=128)
        assert len(images) == 2 and tokens == sum(image.n_tokens for image in images) > 0
        prompt, preview = run("A3BBuildPrompt", text="A [[IMG]] and B [[IMG]]", system="Be brief.", images=images)
        text, thinking, stats = run("A3BGenerate", model=model, prompt=prompt, **REGEX)
    assert "[picture 2:" in preview and len(text) == 12 and text.isalpha() and thinking == ""
    facts = json.loads(stats)
    assert facts["usage"]["image_tokens"] == tokens and facts["finish_reason"] == "stop"
    assert sum(line.startswith("Loaded random on cpu") for line in caplog.messages) == 1
    assert all(need > 0 for need in comfy.memory_requests)


def test_the_seed_alone_decides(model, prompt):
    """N07: whatever else draws random numbers."""
    first = run("A3BGenerate", model=model, prompt=prompt, seed=7, preset="free (instruct)", **REGEX)[0]
    torch.manual_seed(123)
    torch.rand(1000)
    assert run("A3BGenerate", model=model, prompt=prompt, seed=7, preset="free (instruct)", **REGEX)[0] == first
    others = {run("A3BGenerate", model=model, prompt=prompt, seed=s, preset="free (instruct)", **REGEX)[0] for s in (8, 2**64 - 1)}
    assert len(others | {first}) == 3


def test_weights_come_back_after_an_unload(model, prompt):
    """V03"""
    engine = part("nodes.residency").open_engine(model)
    first = run("A3BGenerate", model=model, prompt=prompt, **REGEX)[0]
    part("nodes.residency")._residents[model].patcher.detach(True)
    assert not engine.is_loaded
    assert run("A3BGenerate", model=model, prompt=prompt, **REGEX)[0] == first


def test_cancel_within_a_token(comfy, model, prompt, monkeypatch):
    """N01"""
    progress = part("nodes.host").TokenProgress
    seen = []

    def interrupted_at_five(self, event):
        seen.append(event.count)
        comfy.interrupt = event.count >= 5
        return call(self, event)

    call = progress.__call__
    monkeypatch.setattr(progress, "__call__", interrupted_at_five)
    with pytest.raises(Interrupted):
        run("A3BGenerate", model=model, prompt=prompt, format="regex", regex="[a-z]{400}")
    assert seen[-1] == 5
    monkeypatch.setattr(progress, "__call__", call)
    assert len(run("A3BGenerate", model=model, prompt=prompt, **REGEX)[0]) == 12


def test_thinking_is_kept_apart_and_can_eat_the_budget(model, prompt):
    """T02, T03"""
    text, thinking, stats = run("A3BGenerate", model=model, prompt=prompt, thinking=True, format="text", max_new_tokens=8)
    assert text == "" and "while thinking" in json.loads(stats)["status"]
    text, _, _ = run("A3BGenerate", model=model, prompt=prompt, thinking=True, thinking_budget=4, max_new_tokens=40, **REGEX)
    assert len(text) == 12 and "think>" not in text


def test_a_limit_below_the_need_is_refused_with_numbers(comfy, model, random_checkpoint):
    with pytest.raises(part("a3b_engine.errors").MemoryBudgetError, match="vram_gb"):
        run("A3BLoadModel", checkpoint=random_checkpoint.name, vram_gb=0.001)


def test_a_damaged_checkpoint_fails_in_the_loader(comfy, random_checkpoint, tmp_path):
    import shutil

    broken = comfy.models_dir / "LLM" / "broken"
    shutil.copytree(random_checkpoint, broken)
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(part("a3b_engine.errors").CheckpointError, match=shard.name):
        run("A3BLoadModel", checkpoint="broken")


@pytest.fixture
def part_of_the_model(comfy, random_checkpoint):
    """A handle whose vram_gb has no room for all experts."""
    residency, sockets = part("nodes.residency"), part("nodes.sockets")
    engine = residency.open_engine(sockets.ModelHandle(path=str(random_checkpoint), device="cpu", context=512, vram_gb=1.0))
    caps = {}
    for quarters in range(240, 0, -1):
        engine.vram_budget = quarters * 250_000
        caps[engine.most_bytes] = quarters / 4000
    least = min(size for size in caps if size > engine.smallest_bytes)
    found = sockets.ModelHandle(path=str(random_checkpoint), device="cpu", context=512, vram_gb=caps[least])
    yield found
    residency.open_engine(found).close()


def test_a_part_of_the_model_answers_the_same_while_it_shrinks_and_grows(comfy, model, prompt, part_of_the_model):
    residency = part("nodes.residency")
    whole = run("A3BGenerate", model=model, prompt=prompt, **REGEX)[0]
    text, _, stats = run("A3BGenerate", model=part_of_the_model, prompt=prompt, **REGEX)
    memory = json.loads(stats)["memory"]
    engine, patcher = residency.open_engine(part_of_the_model), residency._residents[part_of_the_model].patcher
    assert 0 < memory["experts_on_device"] < memory["experts"] and len(memory["report"]) > 2
    assert patcher.loaded_size() == engine.loaded_bytes <= patcher.model_size() < engine.weight_bytes
    before = engine.loaded_bytes
    freed = patcher.partially_unload(patcher.offload_device, engine.cached_bytes + 1)
    assert freed > 0 and engine.smallest_bytes <= engine.loaded_bytes < before
    comfy.free = 0  # and no room to grow
    assert run("A3BGenerate", model=part_of_the_model, prompt=prompt, **REGEX)[0] == text == whole
    comfy.free = 10**12
    assert run("A3BGenerate", model=part_of_the_model, prompt=prompt, **REGEX)[0] == text
    assert engine.loaded_bytes == before == patcher.model_size()
    patcher.detach(True)
    assert engine.loaded_bytes == 0 and engine.memory()["total"] == 0
