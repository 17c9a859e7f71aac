"""What the benchmark makes up: shape, weights, template, vocabulary and texts; and how it counts bytes and memory."""

import math
import random
from dataclasses import replace

import pytest
import torch
from bench_samples import QUICK, TINY, tiny  # noqa: F401

from a3b_engine.bench import machine
from a3b_engine.bench.bandwidth import copy_rate, step_bytes
from a3b_engine.bench.measure import Subject
from a3b_engine.bench.shape import CONTROL_TOKENS, ModelShape, model_config
from a3b_engine.bench.vocabulary import synthetic_tokenizer
from a3b_engine.bench.weights import RandomWeights, RecordedWeights
from a3b_engine.bench.words import sentences, text_of
from a3b_engine.checkpoint.names import expected_tensors
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.errors import ConfigError
from a3b_engine.prompt import Prompt
from a3b_engine.sampling import SamplingParams


# The made-up model


def test_the_published_config_has_the_published_ids():
    config = model_config(ModelShape())
    assert config.eos_token_ids == (248046, 248044) and config.image_token_id == 248056 and config.video_token_id == 248057
    assert (config.vision_start_token_id, config.vision_end_token_id) == (248053, 248054)
    assert config.text.num_hidden_layers == 40 and len(config.text.full_attention_layers) == 10 and config.text.conv_dim == 8192
    assert config.vision.patch_dim == 1536


def test_random_weights_have_the_announced_sizes_and_names():
    config = model_config(TINY)
    source = RecordedWeights(RandomWeights(config))
    for dequantize in (False, True):
        steps = []
        weights = source.load(torch.device("cpu"), torch.bfloat16, dequantize, lambda done, total: steps.append((done, total)))
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected_tensors(config)
        held = sum(weight.nbytes for weight in weights.values())
        assert held == source.device_bytes(torch.bfloat16, dequantize) == sum(source.sizes.values())
        assert steps[-1] == (held, held) and len(steps) == len(weights)
        assert any(isinstance(weight, ScaledWeight) for weight in weights.values()) is not dequantize
        assert not isinstance(weights["lm_head.weight"], ScaledWeight)  # bfloat16 in the official files too
    plain = weights["layers.0.mlp.experts.gate.weight"]
    assert plain.isfinite().all() and 0.005 < float(plain.float().std()) < 0.05


def test_random_weights_are_the_same_for_one_seed_and_other_for_another():
    config, cpu = model_config(TINY), torch.device("cpu")
    state = torch.get_rng_state()
    first, again, other = (RandomWeights(config, seed).load(cpu, torch.float32, True) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    name = "layers.1.mlp.experts.up.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_making_weights_can_be_cancelled():
    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RandomWeights(model_config(TINY)).load(torch.device("cpu"), torch.float32, True, cancel=cancel)


def test_a_random_answer_never_ends_by_itself(tiny):
    """The head's rows of the end tokens are zero: their logit of 0 is never among the 20 best."""
    for seed in range(4):
        answer = tiny.generate(Prompt(user="Tell me"), SamplingParams(max_new_tokens=200, seed=seed))
        assert answer.finish_reason == "length" and answer.usage.completion_tokens == 200
    rows = tiny.logits([5, 6, 7])
    assert (rows[:, list(tiny.config.eos_token_ids)] == 0).all()
    assert (rows.topk(20).values > 0).all()


def test_a_grammar_can_still_end_its_answer(tiny):
    answer = tiny.generate(Prompt(user="Tell me"), SamplingParams(max_new_tokens=50), regex="(ab){3}")
    assert answer.text == "ababab" and answer.finish_reason == "stop"


def test_the_made_up_template_speaks_as_the_published_one(tiny):
    features = tiny.encode_image(torch.zeros(64, 64, 3), size=64)
    rendered = tiny.render(Prompt(system="Be brief.", user="What is it?", images=features))
    assert rendered.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert rendered.token_ids.count(tiny.config.image_token_id) == 4 and not rendered.opens_thinking
    assert tiny.render(Prompt(user="x"), thinking=True).opens_thinking


# The made-up vocabulary and texts


@pytest.fixture(scope="module")
def full_vocabulary():
    return synthetic_tokenizer(ModelShape())


def test_the_vocabulary_has_the_published_size_and_control_tokens(full_vocabulary):
    assert full_vocabulary.size == 248_077
    published = {
        "<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<|vision_start|>": 248053, "<|vision_end|>": 248054,
        "<|image_pad|>": 248056, "<|video_pad|>": 248057, "<think>": 248068, "</think>": 248069, "<|audio_pad|>": 248076,
    }  # fmt: skip
    assert {literal: full_vocabulary.token_to_id(literal) for literal in published} == published
    assert len(CONTROL_TOKENS) == 33 and full_vocabulary.control_ids == set(range(248_044, 248_077))
    assert 248_068 not in full_vocabulary.special_ids and 248_046 in full_vocabulary.special_ids


def test_the_vocabulary_has_lengths_of_the_published_kind(full_vocabulary):
    """The published one: 7.4 bytes on average, a quarter of 6 bytes, a tenth of 9, few of more than 15."""
    lengths = [len(full_vocabulary.token_bytes(number)) for number in range(248_044)]
    assert lengths.count(1) == 256 and min(lengths) == 1 and max(lengths) <= 30
    assert 7.0 < sum(lengths) / len(lengths) < 8.3
    assert 0.15 < lengths.count(6) / len(lengths) < 0.35
    assert sum(length > 15 for length in lengths) / len(lengths) < 0.02


@pytest.mark.parametrize("text", ["the fox finds a map", '{"title": "x", "panels": [{"index": 12}]}', "\u4e00\u53ea\u72d0\u72f8\u3002", "\U0001f98a e\u0301 \x00\n\n"])
def test_the_vocabulary_reads_any_text(full_vocabulary, text):
    import unicodedata

    ids = full_vocabulary.encode_plain(text)
    assert full_vocabulary.decode(ids) == unicodedata.normalize("NFC", text)
    if text.startswith("the fox"):
        assert len(ids) == 5  # common words are single tokens, the space before them included


def test_texts_have_exactly_the_asked_number_of_tokens(full_vocabulary):
    def count(text):
        return len(full_vocabulary.encode_plain(text))

    for tokens in (1, 2, 63, 64, 1000):
        text = text_of(count, tokens, seed=9)
        assert count(text) == tokens and text == text_of(count, tokens, seed=9)
    assert text_of(count, 300, seed=1) != text_of(count, 300, seed=2)
    assert text_of(count, 0, seed=1) == ""
    assert len(set(full_vocabulary.encode_plain(text_of(count, 1000, seed=3)))) > 300  # many different rows of the embedding


def test_sentences_do_not_depend_on_the_version_of_python():
    source = sentences(random.Random(1))
    assert "".join(next(source) for _ in range(5)) == "Cheesgash noutcap this that those"


def test_prompts_are_exact_and_unlike_each_other(tiny):
    subject = Subject(tiny, QUICK)
    for tokens in (64, 65, 300):
        assert len(tiny.render(subject.prompt(tokens, 1)).token_ids) == tokens
    assert subject.prompt(64, 1) != subject.prompt(64, 2)
    first, second = subject.picture(), subject.picture()
    assert first.shape == (64, 64, 3) and (first != second).any()


# Bytes and machine


def test_bytes_of_a_step_by_hand():
    config = model_config(TINY)
    source = RecordedWeights(RandomWeights(config))
    source.load(torch.device("cpu"), torch.bfloat16, False)
    moved = step_bytes(config, source.sizes, 100, torch.bfloat16)
    one_matrix = 32 * 64 + 4  # FP8 codes and one scale
    assert moved["experts"] == 4 * 3 * 2 * one_matrix  # layers, gate/up/down, experts a token
    assert moved["head"] == 3072 * 64 * 2
    conv = (2 * 2 * 16 + 4 * 16) * 3 * 2
    assert moved["states"] == 2 * 3 * (4 * 4 * 16 * 16 + conv)  # three DeltaNet layers, read and written
    assert moved["keys_values"] == 2 * 1 * 100 * 2 * 32 * 2  # one attention layer
    assert moved["total"] == sum(value for name, value in moved.items() if name != "total")
    assert step_bytes(config, {"visual.pos_embed.weight": 999}, 0, torch.bfloat16)["dense"] == 0


def test_a_step_of_the_published_shape_reads_three_and_a_half_gigabytes():
    config = model_config(ModelShape())
    weights = RandomWeights(config)
    sizes = {name: weights._nbytes(name, shape, torch.bfloat16, False) for name, shape in expected_tensors(config).items()}
    assert 3.3e9 < step_bytes(config, sizes, 512, torch.bfloat16)["total"] < 3.8e9


def test_the_copy_rate_is_a_rate():
    rate = copy_rate(torch.device("cpu"), 1 << 22)
    assert math.isfinite(rate) and 1e8 < rate < 1e13


def test_free_memory_is_known_or_none(monkeypatch):
    free = machine.free_bytes(torch.device("cpu"))
    assert free is None or 0 < free < 1e15

    def broken():
        raise OSError

    monkeypatch.setattr(machine, "_free_ram", broken)
    assert machine.free_bytes(torch.device("cpu")) is None


def test_unknown_sizes_are_refused():
    with pytest.raises(ConfigError):
        model_config(replace(TINY, heads=3))
