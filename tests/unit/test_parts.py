"""`EngineParts`: a folder gives them, and an engine runs on parts that come from anywhere."""

from dataclasses import replace

import pytest
import torch
from engine_samples import GREEDY, LIVELY, edited, picture

from a3b_engine import Engine, Prompt
from a3b_engine.checkpoint.names import TIERS, is_expert_stack, stack_names, tier_of
from a3b_engine.checkpoint.reader import no_weight
from a3b_engine.errors import CheckpointError, ConfigError, MemoryBudgetError, PromptError
from a3b_engine.model.moe import ExpertWeights
from a3b_engine.options import EngineOptions
from a3b_engine.parts import parts_of_folder


@pytest.fixture(scope="module")
def parts(random_checkpoint):
    return parts_of_folder(random_checkpoint)


class WeightsInMemory:
    """A weight source without files; keeps what it was asked for."""

    def __init__(self, weights, has_vision=True):
        self.weights, self.has_vision, self.asked = weights, has_vision, []
        self.layers = sum(map(is_expert_stack, weights)) // 3

    def device_bytes(self, dtype, dequantize):
        return sum(self.tier_bytes(dtype, dequantize).values())

    def tier_bytes(self, dtype, dequantize):
        tiers = dict.fromkeys(TIERS, 0)
        for name, weight in self.weights.items():
            tiers[tier_of(name, False)] += weight.nbytes
        return tiers

    def passing_bytes(self, dtype, dequantize):
        return 0

    def expert_shapes(self, dtype, dequantize):
        return ExpertWeights(*(self.weights[name].to("meta") for name in stack_names(0)))

    def load(self, device, dtype, dequantize, progress=None, cancel=None, *, take_experts=None, on_host=no_weight):
        self.asked.append((device, dtype, dequantize))
        if cancel is not None:
            cancel()
        weights = dict(self.weights)
        for layer in range(self.layers if take_experts is not None else 0):
            take_experts(layer, ExpertWeights(*map(weights.pop, stack_names(layer))))
        return weights

    def read_experts(self, layer, ids, dtype, dequantize):
        return None


def test_a_folder_and_its_parts_make_the_same_engine(random_checkpoint, parts):
    opened, made = Engine.load(random_checkpoint), Engine.from_parts(parts)
    made.load_weights()
    assert made.name == opened.name == random_checkpoint.name
    assert made.weight_bytes == opened.weight_bytes and made.has_vision
    prompt = Prompt(user="[[IMG]] Tell me", images=opened.encode_image(picture()))
    assert made.generate(prompt, LIVELY).text == opened.generate(prompt, LIVELY).text
    # Same folder and dtype: the features count as its own and are not made again.
    assert made.encode_image(picture())[0].source == prompt.images[0].source


def test_weights_may_come_from_anywhere_and_as_often_as_wanted(parts):
    weights = parts.weights.load(torch.device("cpu"), torch.float32, True)
    source = WeightsInMemory(weights)
    engine = Engine.from_parts(replace(parts, name="made up", identity="made up", weights=source))
    assert not source.asked and engine.weight_bytes == parts.weights.device_bytes(torch.float32, True)
    engine.load_weights()
    text = engine.generate(Prompt(user="Tell me"), GREEDY).text
    engine.unload_weights()
    engine.load_weights()
    assert engine.generate(Prompt(user="Tell me"), GREEDY).text == text
    assert source.asked == [(torch.device("cpu"), torch.float32, True)] * 2


def test_a_source_that_raises_leaves_nothing(parts):
    engine = Engine.from_parts(replace(parts, weights=WeightsInMemory(parts.weights.load(torch.device("cpu"), torch.float32, True))))

    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.load_weights(cancel=cancel)
    assert not engine.is_loaded and engine.memory()["total"] == 0


def test_a_source_without_vision_makes_a_blind_engine(parts):
    blind = Engine.from_parts(replace(parts, weights=WeightsInMemory(parts.weights.load(torch.device("cpu"), torch.float32, True), has_vision=False)))
    blind.load_weights()
    assert not blind.has_vision and blind.generate(Prompt(user="Tell me"), GREEDY).usage.completion_tokens


def test_options_of_parts_are_checked_like_those_of_a_folder(parts):
    with pytest.raises(ConfigError, match="device: found 'gpu'"):
        Engine.from_parts(parts, "gpu")
    with pytest.raises(PromptError, match="context: found 0"):
        Engine.from_parts(parts, context=0)
    with pytest.raises(MemoryBudgetError, match="vram_gb"):
        Engine.from_parts(parts, vram_budget=1000)
    with pytest.raises(TypeError, match="experts"):
        Engine.from_parts(parts, experts="stored")


def test_bad_options_are_named_before_a_folder_is_read(tmp_path):
    with pytest.raises(ConfigError, match="device: found 'gpu'"):
        Engine.open(tmp_path / "nothing here", "gpu")


def test_defaults_of_the_options():
    checked = EngineOptions.checked()
    assert (checked.device, checked.dtype, checked.expert_format) == (torch.device("cpu"), torch.float32, "stored")
    assert checked.vram_budget is None and checked.context == 8192 and not checked.cache_experts
    assert EngineOptions.checked(dtype="bfloat16").dtype == torch.bfloat16


def test_parts_of_a_folder_without_end_tokens_are_refused(random_checkpoint, tmp_path):
    folder = edited(random_checkpoint, tmp_path / "copy", "tokenizer.json", lambda c: c.update(added_tokens=[]))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="end token"):
        parts_of_folder(folder)
