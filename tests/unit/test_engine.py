"""The engine's public face on a small random checkpoint made on the spot."""

import json
import re
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from a3b_engine import Engine, Prompt, SamplingParams
from a3b_engine.errors import ConfigError, GrammarError, ImageError, MemoryBudgetError, NotLoadedError, PromptError
from a3b_engine.runtime.forward import forward_chunks, locate_images

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
LIVELY = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24, seed=11)


@pytest.fixture(scope="module")
def engine(random_checkpoint):
    engine = Engine.load(random_checkpoint, context=1024)
    yield engine
    engine.close()


def picture(height=64, width=64, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def greedy_by_logits(engine, prompt, count):
    """Oracle for the cached loop: argmax over a fresh full pass for every token."""
    rendered = engine.render(prompt)
    ids, images = list(rendered.token_ids), [prompt.images[s.image_index] for s in rendered.image_spans]
    out = []
    for _ in range(count):
        row = engine.logits(ids, images)[-1]
        row[engine.tokenizer.size :] = -torch.inf
        token = int(row.argmax())
        if token in engine.config.eos_token_ids:
            break
        out.append(token)
        ids.append(token)
    return out


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_cached_decoding_equals_full_passes(engine, pictures):
    images = [f for i in range(pictures) for f in engine.encode_image(picture(64, 96, i))]
    prompt = Prompt(user="A fox " + "[[IMG]] and " * pictures + "a castle", images=images)
    expected = greedy_by_logits(engine, prompt, GREEDY.max_new_tokens)
    answer = engine.generate(prompt, GREEDY)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.text == engine.tokenizer.decode(expected)
    assert answer.usage.image_tokens == sum(i.n_tokens for i in images)


def test_same_seed_same_answer_and_other_seed_another(engine):
    prompt = Prompt(user="Tell me")
    first, second = engine.generate(prompt, LIVELY), engine.generate(prompt, LIVELY)
    other = engine.generate(prompt, SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24, seed=12))
    assert first.text == second.text != other.text


def test_N07_other_users_of_torch_random_do_not_matter(engine):
    prompt = Prompt(user="Tell me")
    before = engine.generate(prompt, LIVELY).text
    torch.manual_seed(1)
    torch.rand(100)
    state = torch.get_rng_state()
    assert engine.generate(prompt, LIVELY).text == before
    assert torch.equal(state, torch.get_rng_state())


def test_streamed_pieces_make_the_answer(engine):
    events = []
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, on_token=events.append)
    assert "".join(e.text for e in events if not e.thinking) == answer.text
    assert [e.count for e in events] == sorted(e.count for e in events)
    assert events[-1].count == answer.usage.completion_tokens and events[-1].limit == 24


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_stops_within_a_token(engine, after):
    seen = []
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, on_token=seen.append, cancel=lambda: len(seen) >= after)
    assert answer.finish_reason == "cancelled" and answer.usage.completion_tokens <= after + 1
    assert engine.memory()["sequence"] == 0


def test_N01_an_exception_from_cancel_passes_and_leaves_the_engine_usable(engine):
    class Interrupt(BaseException):
        pass

    seen = []

    def cancel():
        if len(seen) >= 3:
            raise Interrupt
        return False

    before = engine.generate(Prompt(user="Tell me"), LIVELY).text
    with pytest.raises(Interrupt):
        engine.generate(Prompt(user="Tell me"), LIVELY, on_token=seen.append, cancel=cancel)
    assert engine.memory()["sequence"] == 0
    assert engine.generate(Prompt(user="Tell me"), LIVELY).text == before


def test_stop_text_ends_the_answer(engine):
    text = engine.generate(Prompt(user="Tell me"), LIVELY).text
    stop = text[3:6]
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24, seed=11, stop=(stop,)))
    assert answer.finish_reason == "stop_string" and answer.text == text[: text.index(stop)]


SCHEMA = {
    "type": "object",
    "properties": {"shot": {"enum": ["close", "medium", "wide"]}, "line": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["shot", "line", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_after_the_thinking(engine, thinking, seed):
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=200, seed=seed, thinking_budget=7)
    answer = engine.generate(Prompt(user="Tell me"), sampling, schema=SCHEMA, thinking=thinking)
    value = json.loads(answer.text)
    assert answer.finish_reason == "stop" and set(value) == {"shot", "line", "n"} and value["shot"] in ("close", "medium", "wide")
    assert bool(answer.thinking) == thinking
    if thinking:
        assert answer.usage.thinking_tokens <= 7 + 2


def test_a_regex_holds(engine):
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, regex=r"(red|blue) [a-z]{2,5}!")
    assert re.fullmatch(r"(red|blue) [a-z]{2,5}!", answer.text)


def test_schema_and_regex_together_are_refused(engine):
    with pytest.raises(GrammarError, match="not both"):
        engine.generate(Prompt(user="x"), GREEDY, schema=SCHEMA, regex="a")


def test_T03_a_budget_spent_thinking_is_said(engine):
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(temperature=1.0, max_new_tokens=5), thinking=True)
    assert answer.text == "" and answer.finish_reason == "length"
    assert "while thinking" in answer.status


def test_a_thinking_budget_closes_the_block(engine):
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(temperature=1.0, max_new_tokens=30, thinking_budget=4), thinking=True)
    assert answer.ended_thinking and answer.usage.thinking_tokens <= 6


def test_a_prompt_longer_than_the_context_is_refused_with_its_size(engine):
    with pytest.raises(PromptError, match="1024"):
        engine.generate(Prompt(user="word " * 3000), GREEDY)


def test_the_context_bounds_the_answer(random_checkpoint):
    small = Engine.load(random_checkpoint, context=48)
    answer = small.generate(Prompt(user="Hi"), SamplingParams(temperature=1.0, max_new_tokens=500))
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens <= 48


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
    held = sum(w.nbytes for w in engine._weights.values())
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
