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
from a3b_engine.errors import CheckpointError, ConfigError, GrammarError, ImageError, MemoryBudgetError, NotLoadedError, PromptError
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
    stream = engine.tokenizer.stream()
    assert answer.text == "".join(map(stream.push, expected))  # without a character that is cut at the end
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


def edited(source, folder, name, change):
    """A copy of a checkpoint whose JSON file `name` went through `change`."""
    shutil.copytree(source, folder)
    value = json.loads((folder / name).read_text(encoding="utf-8"))
    change(value)
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


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


def with_template(source, folder, template):
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Engine.load(folder, context=1024)


def test_ids_that_the_model_does_not_have_are_refused(random_checkpoint, tmp_path):
    add = {"added_tokens_decoder": {"5000": {"content": "<beyond>"}}}
    folder = edited(random_checkpoint, tmp_path / "copy", "tokenizer_config.json", lambda c: c.update(add))
    (folder / "chat_template.jinja").write_text("<beyond>{{ messages[0].content }}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="5000"):
        Engine.load(folder).generate(Prompt(user="x"), GREEDY)


def test_a_template_that_writes_nothing_is_refused(random_checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="no token at all"):
        with_template(random_checkpoint, tmp_path / "copy", "").generate(Prompt(user="x"), GREEDY)


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def test_T01_thinking_off_closes_the_block_that_a_template_always_opens(random_checkpoint, tmp_path):
    engine = with_template(random_checkpoint, tmp_path / "copy", TURNS + "<think>\n")
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, thinking=False)
    assert answer.ended_thinking and not answer.thinking and answer.text
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, thinking=False, schema={"type": "boolean"})
    assert answer.text in ("true", "false")


def test_T02_thinking_on_with_a_template_that_opens_no_block_keeps_the_answer(random_checkpoint, tmp_path):
    answer = with_template(random_checkpoint, tmp_path / "copy", TURNS).generate(Prompt(user="Tell me"), LIVELY, thinking=True)
    assert answer.text and not answer.thinking and "while thinking" not in answer.status


def test_T03_an_end_token_inside_the_thinking_ends_only_the_thinking(random_checkpoint):
    engine = Engine.load(random_checkpoint, context=1024)
    head = engine._text.logits
    end, steps = engine.config.eos_token_ids[0], []

    def logits(hidden):
        steps.append(1)
        row = head(hidden)
        if len(steps) == 3:
            row[:, end] = 1e4
        return row

    engine._text.logits = logits
    answer = engine.generate(Prompt(user="Tell me"), LIVELY, thinking=True, regex="yes|no")
    assert answer.thinking and answer.text in ("yes", "no") and answer.finish_reason == "stop"


@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_that_is_whole_at_the_limit_was_not_cut(engine, thinking):
    def ask(limit):
        sampling = SamplingParams(max_new_tokens=limit, thinking_budget=2)
        return engine.generate(Prompt(user="Tell me"), sampling, regex="abc,abc", thinking=thinking)

    whole = ask(200)
    assert whole.text == "abc,abc" and whole.finish_reason == "stop"
    assert ask(whole.usage.completion_tokens).finish_reason == "stop"
    short = ask(whole.usage.completion_tokens - 1)
    assert short.finish_reason == "length" and short.text == "abc,ab"


@pytest.mark.parametrize("limit", range(1, 9))
def test_N05_a_character_cut_by_the_limit_is_left_out(engine, limit):
    events = []
    answer = engine.generate(Prompt(user="Tell me"), SamplingParams(max_new_tokens=limit), regex="\U0001f62d{2}", on_token=events.append)
    assert answer.text == "\U0001f62d" * len(answer.text)
    assert "".join(e.text for e in events) == answer.text


def test_an_answer_cut_by_the_context_says_so(random_checkpoint):
    small = Engine.load(random_checkpoint, context=40)
    for thinking in (False, True):
        answer = small.generate(Prompt(user="Hi"), SamplingParams(temperature=0.0, max_new_tokens=500), regex="x{300}", thinking=thinking)
        assert answer.finish_reason == "length" and "context" in answer.status and "max_new_tokens" not in answer.status


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
