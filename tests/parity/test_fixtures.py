"""The fixtures can tell right from wrong: the reference reacts to every weight and every position, and nothing it
decides hangs on rounding. Without this a parity test could pass on a model that ignores half of itself."""

from __future__ import annotations

import re

import pytest
import torch
from small_models import ALL, SHAPES, TOKENIZER_SIZE, WITH_VISION, model_config, random_tensors
from small_prompts import layouts, prompt, random_ids

TOLERANCE = 2e-4


@pytest.mark.parametrize("name", ALL)
def test_expert_choice_is_not_decided_by_rounding(models, name):
    oracle = models.oracle(name)
    prompts = [prompt(name, layout) for layout in layouts(name)] + [
        (random_ids(130, name, "lengths"), [])]
    if name == "base":
        prompts.append((random_ids(600, name, "long"), []))
    leads = [oracle.router_lead(ids, pictures) for ids, pictures in prompts]
    assert min(leads) > 5e-5, leads


@pytest.mark.parametrize("name", ALL)
def test_every_kind_of_weight_matters(models, name):
    from oracle import Oracle

    ids, pictures = prompt(name, "two images" if SHAPES[name]["vision"] else "text")
    plain = models.oracle(name).logits(ids, pictures)
    changed = Oracle(name)
    kinds = {re.sub(r"\.\d+\.", ".N.", key): key for key in random_tensors(name)}
    unmoved = []
    for key in kinds.values():
        weight = changed.model.get_parameter(key)
        # A sign flip keeps every magnitude, so that only the use of the weight can show.
        weight.neg_()
        if float((changed.logits(ids, pictures) - plain).abs().max()) < 100 * TOLERANCE:
            unmoved.append(key)
        weight.neg_()
    assert unmoved == []


@pytest.mark.parametrize("name", WITH_VISION)
def test_image_positions_matter(models, name):
    oracle = models.oracle(name)
    ids, pictures = prompt(name, "mixed images")
    right = oracle.logits(ids, pictures)
    text_like = torch.arange(len(ids)).view(1, 1, -1).expand(3, 1, -1)
    with torch.no_grad():
        wrong = oracle.model(input_ids=torch.tensor([ids]), position_ids=text_like, use_cache=False,
                             **oracle.picture_inputs(pictures)).logits[0]
    assert float((wrong - right).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("name", WITH_VISION)
def test_rows_and_columns_are_not_interchangeable(models, name):
    from small_prompts import merged_grid

    oracle = models.oracle(name)
    ids, pictures = prompt(name, "large image")
    right = oracle.logits(ids, pictures)
    positions, _ = oracle.positions(ids, [merged_grid(p) for p in pictures])
    with torch.no_grad():
        swapped = oracle.model(input_ids=torch.tensor([ids]), position_ids=positions[[0, 2, 1]][:, None],
                               use_cache=False, **oracle.picture_inputs(pictures)).logits[0]
    assert float((swapped - right).abs().max()) > 100 * TOLERANCE


def test_the_models_differ_in_what_formulas_depend_on():
    texts = [config.get("text_config", config) for config in map(model_config, ALL)]

    def values(key):
        return {text[key] for text in texts}

    ratios = {text["linear_num_value_heads"] // text["linear_num_key_heads"] for text in texts}
    groups = {text["num_attention_heads"] // text["num_key_value_heads"] for text in texts}
    assert len(texts) >= 5
    assert ratios == {1, 2, 3, 4}
    assert len(groups) >= 3
    for key in ("num_experts", "num_experts_per_tok", "num_hidden_layers", "head_dim", "vocab_size", "hidden_size"):
        assert len(values(key)) >= 4, key
    assert {tuple(text["layer_types"][:2]) for text in texts} >= {
        ("linear_attention", "linear_attention"), ("linear_attention", "full_attention"),
        ("full_attention", "linear_attention")}
    assert any(text["moe_intermediate_size"] > 128 and text["moe_intermediate_size"] % 128 for text in texts)
    assert any(text["vocab_size"] > TOKENIZER_SIZE for text in texts)
    assert any(config["tie_word_embeddings"] for config in map(model_config, ALL))
