"""float32 logits of the engine against the reference: text, pictures, every length, every form of file."""

from __future__ import annotations

import pytest
import torch
from compare import LIMIT, encode, largest
from small_files import write_folder
from small_models import ALL, WITH_VISION, random_tensors
from small_prompts import layouts, picture, prompt, random_ids

CASES = [(name, layout) for name in ALL for layout in layouts(name)]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_equal_the_reference(models, differences, name, layout):
    ids, pictures = prompt(name, layout)
    engine = models.engine(name)
    ours = engine.logits(ids, images=encode(engine, pictures))
    theirs = models.oracle(name).logits(ids, pictures)
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    difference = differences.note(f"fp32 logits, {layout}", largest(ours, theirs), name, LIMIT)
    assert difference <= LIMIT


@pytest.mark.parametrize("name", ALL)
def test_every_prompt_length(models, differences, name):
    """All lengths 1..130 for the first model; for the others those around the edges of a chunk of 64."""
    lengths = range(1, 131) if name == "base" else (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 130)
    ids = random_ids(130, name, "lengths")
    engine, oracle = models.engine(name), models.oracle(name)
    for length in lengths:
        ours, theirs = engine.logits(ids[:length]), oracle.logits(ids[:length])
        assert ours.shape == theirs.shape
        difference = differences.note("fp32 logits, prompt lengths 1..130", largest(ours, theirs),
                                      f"{name}, {length} tokens", LIMIT)
        assert difference <= LIMIT, length


def test_a_prompt_longer_than_the_first_cache_buffer(models, differences):
    """600 tokens: keys and values grow several times, in one go, in chunks and step by step."""
    name = "base"
    ids = random_ids(600, name, "long")
    theirs = models.oracle(name).logits(ids)
    for size in (4096, 97, 1):
        difference = largest(models.engine(name).logits(ids, chunk_size=size), theirs)
        differences.note("fp32 logits, 600 tokens", difference, f"{name}, chunks of {size}", LIMIT)
        assert difference <= LIMIT, size


# The weights of "ragged" are chosen so that BF16 cannot hold them.
FORMS = [(name, form) for name in ALL for form in ("fp32 per_expert", "fp32 transformers", "bf16 fused",
                                                   "bf16 per_expert", "bf16 transformers")
         if name != "ragged" or form.startswith("fp32")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_every_form_of_file_gives_the_same_numbers(models, name, form):
    """Fused or per expert, from our writer or from transformers, BF16 or FP32: the same weights, the same logits."""
    layout = "two images" if name in WITH_VISION else "text"
    ids, pictures = prompt(name, layout)
    plain, other = models.engine(name), models.engine(name, form)
    expected = plain.logits(ids, images=encode(plain, pictures))
    torch.testing.assert_close(other.logits(ids, images=encode(other, pictures)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_left_behind_by_another_prompt(models, name):
    """The same prompt gives the same bits again, also after another prompt, and after one that failed."""
    from a3b_engine.errors import PromptError

    layout = "two images" if name in WITH_VISION else "text"
    ids, pictures = prompt(name, layout)
    engine = models.engine(name)
    images = encode(engine, pictures)
    first = engine.logits(ids, images=images)
    again = engine.logits(ids, images=images)
    engine.logits(random_ids(90, name, "another"))
    if pictures:
        with pytest.raises(PromptError):
            engine.logits(ids, images=images[:1])
    after = engine.logits(ids, images=images)
    assert torch.equal(first, again) and torch.equal(first, after)


@pytest.mark.parametrize("name", ALL)
def test_bf16_stays_close(models, differences, name):
    layout = "two images" if name in WITH_VISION else "text"
    ids, pictures = prompt(name, layout)
    engine = models.engine(name, "fp32 fused", torch.bfloat16)
    ours = engine.logits(ids, images=encode(engine, pictures))
    theirs = models.oracle(name).logits(ids, pictures)
    cosine = float(torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0))
    assert differences.note("bf16 logits, cosine to fp32 reference", cosine, name, 0.99, smallest=True) > 0.99


def test_text_only_export_of_a_vision_model(models, tmp_path):
    """Without the vision tensors the same configuration still reads text, and says that it cannot see."""
    from a3b_engine import Engine
    from a3b_engine.errors import ImageError

    tensors = {key: value for key, value in random_tensors("base").items() if ".visual." not in key}
    engine = Engine.load(write_folder(tmp_path / "export", "base", tensors), device="cpu", dtype=torch.float32)
    ids, _ = prompt("base", "text")
    assert not engine.has_vision
    assert torch.equal(engine.logits(ids), models.engine("base").logits(ids))
    with pytest.raises(ImageError):
        engine.encode_image(picture(64, 64), size=64)


@pytest.mark.parametrize("renamed", [
    {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
     "model.visual.": "visual."},
    {"model.language_model.": "model."},
], ids=["language_model.model", "model"])
def test_other_prefixes_people_have(models, tmp_path, renamed):
    """The same weights under other prefixes, with tensors of the MTP head beside them, which no one needs."""
    from a3b_engine import Engine

    tensors = {}
    for key, value in random_tensors("base").items():
        old = next((prefix for prefix in renamed if key.startswith(prefix)), None)
        tensors[key if old is None else renamed[old] + key.removeprefix(old)] = value
    tensors["mtp.fc.weight"] = torch.ones(64, 128)
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(64)
    engine = Engine.load(write_folder(tmp_path / "renamed", "base", tensors), device="cpu", dtype=torch.float32)
    ids, pictures = prompt("base", "one image")
    expected = models.engine("base").logits(ids, images=encode(models.engine("base"), pictures))
    assert torch.equal(engine.logits(ids, images=encode(engine, pictures)), expected)
