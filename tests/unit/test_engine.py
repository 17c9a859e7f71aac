"""The engine's public face on a small random checkpoint: opening, loading, bad folders and options, logits."""

from concurrent.futures import ThreadPoolExecutor
import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from engine_samples import GREEDY, LIVELY, edited, picture, with_template

from a3b_engine import Engine, Prompt
from a3b_engine.errors import (
    CheckpointError,
    ConfigError,
    ImageError,
    MemoryBudgetError,
    NotLoadedError,
    PromptError,
)
from a3b_engine.runtime.forward import forward_chunks, locate_images


def test_unloading_frees_and_loading_brings_the_same_answer_back(engine):
    before = engine.generate(Prompt(user="Tell me"), LIVELY).text
    features = engine.encode_image(picture())
    engine.unload_weights()
    assert engine.loaded_bytes == 0 and engine.memory()["total"] == 0
    with pytest.raises(NotLoadedError):
        engine.generate(Prompt(user="Tell me"), LIVELY)
    with pytest.raises(NotLoadedError):
        engine.encode_image(picture())
    steps = []
    engine.load_weights(progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] > 0
    assert engine.loaded_bytes == engine.weight_bytes > 0
    assert engine.generate(Prompt(user="Tell me"), LIVELY).text == before
    assert torch.equal(engine.encode_image(picture())[0].features, features[0].features)


def test_weight_bytes_are_what_loading_takes(engine):
    held = sum(w.nbytes for w in engine._residence.weights.values())
    tied = engine.config.text.tie_word_embeddings
    assert engine.weight_bytes == held and not tied


def test_a_load_that_is_cancelled_leaves_nothing(random_checkpoint):
    other = Engine.open(random_checkpoint)

    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        other.load_weights(cancel=cancel)
    assert other.memory()["total"] == 0 and not other.is_loaded
    other.load_weights()
    assert other.is_loaded


def test_pictures_of_another_engine_are_encoded_again(engine, random_checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(random_checkpoint, copy)
    foreign = Engine.load(copy).encode_image(picture(96, 64))
    own = engine.encode_image(picture(96, 64))
    foreign = [replace(foreign[0], features=foreign[0].features * 0 + 99)]  # if these were used, the answers would differ
    answers = [engine.generate(Prompt(user="[[IMG]] what", images=images), GREEDY).text for images in (own, foreign)]
    assert answers[0] == answers[1]


def test_logits_do_not_depend_on_the_chunks(engine):
    ids = engine.render(Prompt(user="A long walk home through the rain, at night.")).token_ids
    whole = engine.logits(ids)
    for size in (1, 3, len(ids) - 1):
        assert torch.allclose(engine.logits(ids, chunk_size=size), whole, atol=1e-4)
    assert whole.dtype == torch.float32 and whole.shape == (len(ids), engine.config.text.vocab_size)


@pytest.mark.parametrize("ids", [[], [-1], [10**9]])
def test_bad_ids_are_refused(engine, ids):
    with pytest.raises(PromptError):
        engine.logits(ids)


def test_image_tokens_and_features_must_agree(engine):
    image = engine.encode_image(picture())[0]
    pad = engine.config.image_token_id
    assert [p.start for p in locate_images([1] + [pad] * 2 * image.n_tokens, [image, image], pad)] == [1, 1 + image.n_tokens]
    for ids in ([pad] * (image.n_tokens - 1), [pad] * (image.n_tokens + 1), [1, 2, 3]):
        with pytest.raises(PromptError):
            locate_images(ids, [image], pad)


def test_a_model_that_writes_an_image_token_goes_on(engine):
    """Random weights do; nothing but the prompt's own image tokens stands for a picture."""
    pad = engine.config.image_token_id
    assert engine.logits([5, pad, 6]).isfinite().all()
    state = engine._new_state()
    with torch.no_grad():
        hidden = [h for token in (5, pad, 6) for h in forward_chunks(engine._text, engine.config, state, [token])]
    assert state.length == state.next_position == len(hidden) == 3


def test_I01_more_markers_than_pictures(engine):
    image = engine.encode_image(picture())
    with pytest.raises(PromptError, match="2.*1"):
        engine.generate(Prompt(user="[[IMG]] and [[IMG]]", images=image), GREEDY)


def test_a_budget_too_small_says_what_would_help(random_checkpoint):
    with pytest.raises(MemoryBudgetError, match="vram_gb"):
        Engine.open(random_checkpoint, vram_budget=1000)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"expert_format": "int2"}])
def test_unknown_options_are_named(random_checkpoint, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Engine.open(random_checkpoint, **options)


def test_two_threads_take_turns(engine):
    expected = engine.generate(Prompt(user="Tell me"), LIVELY).text
    results = []
    threads = [threading.Thread(target=lambda: results.append(engine.generate(Prompt(user="Tell me"), LIVELY).text)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected, expected]


def test_a_text_only_checkpoint_says_that_it_cannot_see(random_checkpoint, tmp_path):
    copy = tmp_path / "text-only"
    shutil.copytree(random_checkpoint, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps({**config, "language_model_only": True}), encoding="utf-8")
    _drop_visual_tensors(copy)
    blind = Engine.load(copy)
    assert not blind.has_vision
    with pytest.raises(ImageError, match="no vision part"):
        blind.encode_image(picture())
    assert blind.generate(Prompt(user="Tell me"), GREEDY).usage.completion_tokens


def _drop_visual_tensors(folder):
    from safetensors.torch import load_file, save_file

    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text(encoding="utf-8"))
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if ".visual." not in k}
    index_path.write_text(json.dumps(index), encoding="utf-8")
    for shard in folder.glob("*.safetensors"):
        tensors = {k: v for k, v in load_file(shard).items() if ".visual." not in k}
        if tensors:
            save_file(tensors, shard)
        else:
            shard.unlink()


@pytest.mark.parametrize("device", ["gpu", "", None, "cuda:99", "meta"])
def test_V10_a_device_that_is_not_there_is_named(random_checkpoint, device):
    with pytest.raises(ConfigError, match="device: found"):
        Engine.open(random_checkpoint, device)


@pytest.mark.parametrize("context", [0, -1, None, "8192", 10.5, True])
def test_a_context_that_is_no_count_is_named(random_checkpoint, context):
    with pytest.raises(PromptError, match="context: found"):
        Engine.open(random_checkpoint, context=context)


def test_a_folder_given_as_a_dot_still_has_a_name(random_checkpoint, monkeypatch):
    monkeypatch.chdir(random_checkpoint)
    assert Engine.open(".").name == random_checkpoint.name


@pytest.mark.parametrize("key, value", [("patch_size", 14), ("merge_size", 1), ("merge_size", 4), ("temporal_patch_size", 1)])
def test_F24_a_processor_of_another_tower_is_refused_before_reading(random_checkpoint, tmp_path, key, value):
    folder = edited(random_checkpoint, tmp_path / "copy", "preprocessor_config.json", lambda c: c.update({key: value}))
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {key} is {value}"):
        Engine.open(folder)


def test_a_tokenizer_without_the_end_tokens_is_refused(random_checkpoint, tmp_path):
    folder = edited(random_checkpoint, tmp_path / "copy", "tokenizer.json", lambda c: c.update(added_tokens=[]))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="end token"):
        Engine.open(folder)


def test_ids_that_the_model_does_not_have_are_refused(random_checkpoint, tmp_path):
    add = {"added_tokens_decoder": {"5000": {"content": "<beyond>"}}}
    folder = edited(random_checkpoint, tmp_path / "copy", "tokenizer_config.json", lambda c: c.update(add))
    (folder / "chat_template.jinja").write_text("<beyond>{{ messages[0].content }}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="5000"):
        Engine.load(folder).generate(Prompt(user="x"), GREEDY)


def test_a_template_that_writes_nothing_is_refused(random_checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="no token at all"):
        with_template(random_checkpoint, tmp_path / "copy", "").generate(Prompt(user="x"), GREEDY)


def test_pictures_that_were_not_encoded_are_refused(engine):
    with pytest.raises(PromptError, match="encode_image"):
        engine.generate(Prompt(user="x", images=[torch.zeros(8, 8, 3)]), GREEDY)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_works_from_picture_to_answer(random_checkpoint, dtype):
    half = Engine.load(random_checkpoint, dtype=dtype)
    images = half.encode_image(picture(96, 64))
    assert str(images[0].features.dtype) == f"torch.{dtype}" and images[0].features.isfinite().all()
    assert half.generate(Prompt(user="x", images=images), LIVELY, schema={"type": "boolean"}).text in ("true", "false")


def test_a_default_dtype_set_by_others_does_not_matter(engine):
    expected = engine.encode_image(picture(64, 96))[0].features
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(engine.encode_image(picture(64, 96))[0].features, expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_picture_is_copied_before_another_thread_may_encode(random_checkpoint, monkeypatch):
    """On a card the features stand in a graph's buffer until the next picture."""
    engine = Engine.load(random_checkpoint, context=256)
    held = []

    class Features:
        def cpu(self):
            with ThreadPoolExecutor(1) as pool:
                held.append(not pool.submit(lambda: engine._lock.acquire(blocking=False) and engine._lock.release() is None).result())
            return torch.zeros(4, 8)

    monkeypatch.setattr(engine._vision, "encode", lambda patches, grid: Features())
    engine.encode_image(picture())
    assert held == [True]
    engine.close()


def test_unloading_while_a_token_is_reported(random_checkpoint):
    engine = Engine.load(random_checkpoint, context=256)
    answer = engine.generate(Prompt(user="Tell me"), GREEDY, on_token=lambda event: engine.unload_weights())
    assert answer.usage.completion_tokens and not engine.is_loaded
