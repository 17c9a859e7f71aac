"""The nodes run one by one with a fake engine and a fake ComfyUI; JSON Parse Panels has a file of its own."""

import inspect
import json
import re
import sys
import types

import pytest
import torch
from fake_comfy import Interrupted, comfy, engine_class, part  # noqa: F401
from node_runs import NODES, errors, parse, run, widgets

Prompt = part("a3b_engine.prompt").Prompt


@pytest.fixture
def model(comfy, engine_class):
    comfy.add_checkpoint(comfy.models_dir / "LLM", "Qwen/q")
    return run("A3BLoadModel", **widgets("A3BLoadModel"), checkpoint="Qwen\\q")[0]


def engine_of(handle):
    return part("nodes.residency").open_engine(handle)


def generate(model, prompt=None, **inputs):
    return run("A3BGenerate", **{**widgets("A3BGenerate"), "model": model, "prompt": prompt or Prompt(user="hi"), **inputs})


# Load A3B Model


def test_loading_opens_and_reads_no_weights(comfy, model):
    assert engine_of(model).loads == 0 and comfy.memory_requests == []
    assert (model.device, model.vram_gb, model.context) == ("cpu", 0.0, 8192)


def test_equal_loaders_give_equal_handles(model):
    assert run("A3BLoadModel", **widgets("A3BLoadModel"), checkpoint="Qwen/q")[0] == model


def test_a_bad_checkpoint_fails_in_the_loader(comfy, engine_class):
    comfy.add_checkpoint(comfy.models_dir / "LLM", "bad")
    problem = errors.CheckpointError("bad/model.safetensors: incomplete download?")

    def refuse(folder, **options):
        raise problem

    engine_class.open = refuse
    with pytest.raises(errors.CheckpointError, match="incomplete download"):
        run("A3BLoadModel", **widgets("A3BLoadModel"), checkpoint="bad")


def test_validation_accepts_what_runs_and_explains_the_rest(comfy):
    """F20, V10"""
    comfy.add_checkpoint(comfy.models_dir / "LLM", "Qwen/q")
    check = NODES["A3BLoadModel"].VALIDATE_INPUTS
    assert check(checkpoint="Qwen\\q") is True
    assert check(checkpoint=None) is True
    assert check(checkpoint="other").startswith("'other' is not")  # core writes the widget's name before it
    devices = NODES["A3BLoadModel"].INPUT_TYPES()["required"]["device"][0]
    assert isinstance(devices, list) and list(devices) == ["auto", "cpu"]  # what browsers get
    assert "cuda:7" in devices and "gpu0" not in devices and None not in devices  # how core asks


def test_only_the_wrong_widget_is_reported():
    """Core repeats what VALIDATE_INPUTS returns for every input that it names."""
    assert inspect.getfullargspec(NODES["A3BLoadModel"].VALIDATE_INPUTS).args == ["checkpoint"]


def test_fingerprint_follows_the_files(comfy):
    folder = comfy.add_checkpoint(comfy.models_dir / "LLM", "q")
    changed = NODES["A3BLoadModel"].IS_CHANGED
    before = changed(checkpoint="q", device="auto", context=512)
    assert changed(checkpoint="q", device="cpu", context=1024) == before  # options are part of ComfyUI's own key
    (folder / "model.safetensors").write_bytes(b"new")
    assert changed(checkpoint="q", device="auto") != before
    assert changed(checkpoint="gone") == "not found"
    assert changed(checkpoint=None) == "linked"


# Values nobody has checked: over links of other packs, from hand-written API prompts


@pytest.mark.parametrize(
    "node_id, widget, value",
    [
        ("A3BLoadModel", "vram_gb", "abc"),
        ("A3BLoadModel", "vram_gb", [1]),
        ("A3BLoadModel", "vram_gb", float("nan")),
        ("A3BLoadModel", "context", 10**30),
        ("A3BLoadModel", "checkpoint", ["Qwen/q"]),
        ("A3BLoadModel", "checkpoint", "../../etc\x00"),
        ("A3BLoadModel", "expert_format", "int0"),
        ("A3BParsePanels", "text", ["{}"]),
        ("A3BParsePanels", "base_seed", -1),
        ("A3BParsePanels", "panel_count", 1.5),
        ("A3BParsePanels", "on_error", "ignore"),
        ("A3BBuildPrompt", "label_images", "perhaps"),
    ],
)
def test_a_wrong_value_is_named_with_its_widget(comfy, engine_class, node_id, widget, value):
    """U14"""
    comfy.add_checkpoint(comfy.models_dir / "LLM", "Qwen/q")
    inputs = {**widgets(node_id), **({"checkpoint": "Qwen/q"} if node_id == "A3BLoadModel" else {"text": "x"}), widget: value}
    with pytest.raises(errors.A3BError, match=f"^{widget}: "):
        run(node_id, **inputs)


@pytest.mark.parametrize("blank", ["", "  ", None])
def test_a_blank_number_is_its_default(model, blank):
    """U14"""
    generate(model, max_new_tokens=blank, seed="18446744073709551615", thinking="false")
    sampling = engine_of(model).calls[-1][2]
    assert (sampling.max_new_tokens, sampling.seed) == (4096, 2**64 - 1)


def test_a_foreign_object_on_our_sockets_is_named(model):
    with pytest.raises(errors.ConfigError, match="^prompt: str came over the link"):
        generate(model, prompt="hi")
    with pytest.raises(errors.ConfigError, match="^model: dict"):
        generate({}, prompt=Prompt(user="hi"))
    for pictures in ("hello", 5, True, {"a": 1}):
        with pytest.raises(errors.ConfigError, match="^images: .* came over the link, but A3B_IMAGES is expected"):
            run("A3BBuildPrompt", **{**widgets("A3BBuildPrompt"), "text": "x", "images": pictures})


def test_a_cached_handle_whose_folder_is_gone(comfy, model):
    folder = comfy.models_dir / "LLM" / "Qwen" / "q"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(errors.CheckpointError, match="Load A3B Model"):
        generate(model)


def test_half_a_surrogate_pair_does_not_reach_the_tokenizer():
    assert "\ud83d" not in build(text="a\ud83db")[0].user


# Encode Image 384px


def test_the_whole_batch_is_encoded_and_appended(comfy, model):
    first, count = run("A3BEncodeImage", model=model, image=torch.zeros(3, 8, 8, 3), size=384, fit="crop")
    assert (len(first), count) == (3, 36)
    both, count = run("A3BEncodeImage", model=model, image=torch.zeros(1, 8, 8, 3), size=384, fit="keep", images=first)
    assert both[:3] == first and (len(both), count) == (4, 48)
    assert len(first) == 3  # shared with other consumers: never changed in place
    assert engine_of(model).calls == [("encode", 384, "crop"), ("encode", 384, "keep")]
    assert engine_of(model).loads == 1 and comfy.memory_requests[0] > 0


# Build [[IMG]] Prompt


def picture(rows=3, columns=4):
    return types.SimpleNamespace(grid=(rows, columns), n_tokens=rows * columns)


def build(**inputs):
    return run("A3BBuildPrompt", **{**widgets("A3BBuildPrompt"), **inputs})


def test_markers_show_in_the_preview_where_pictures_go():
    prompt, preview = build(text="before [[IMG:2]] after", system="be brief", images=(picture(), picture(5, 6)))
    assert prompt.user == "before [[IMG:2]] after" and prompt.system == "be brief" and len(prompt.images) == 2
    assert preview == "[system]\nbe brief\n\n[user]\n[picture 1: 4x3 tokens]before [picture 2: 6x5 tokens] after"


def test_pictures_can_be_labelled():
    _, preview = build(text="[[IMG]] and [[IMG]]", images=(picture(), picture()), label_images=True)
    assert "Picture 1: [picture 1" in preview and "Picture 2: [picture 2" in preview


def test_braces_and_comments_arrive_intact():
    """U06, U08"""
    text = 'see https://a.test/x /* keep me */ {"panels":[]} {a|b}'
    prompt, preview = build(text=text)
    assert prompt.user == text and text in preview


def test_too_few_pictures_are_an_error_before_the_model():
    with pytest.raises(errors.PromptError, match="2 markers, 1 image"):
        build(text="[[IMG]] [[IMG]]", images=(picture(),))


@pytest.mark.parametrize("inputs", [{}, {"language": "English"}, {"preset": "manga"}, {"preset": "manga", "system": "x"}])
def test_an_empty_prompt_is_refused_whatever_the_other_widgets_say(inputs):
    with pytest.raises(errors.PromptError, match="^text: is empty"):
        build(text="  ", **inputs)


def test_a_picture_or_instructions_alone_are_enough():
    assert "picture 1" in build(text="", images=(picture(),), preset="manga")[1]
    assert build(text="", system="Say hello.")[0].system == "Say hello."


def test_language_and_preset_join_the_instructions():
    plain, _ = build(text="x", system="mine")
    assert plain.system == "mine"
    named, _ = build(text="x", system="mine", language="Chinese")
    assert named.system.startswith("mine") and "Chinese" in named.system


COMICS, JOBS = part("a3b_engine.script.presets").PRESETS, part("a3b_engine.script.presets").JOBS


def test_presets_are_comics_and_jobs():
    assert NODES["A3BBuildPrompt"].INPUT_TYPES()["optional"]["preset"][0] == ["none", *COMICS, *JOBS]


@pytest.mark.parametrize("preset", COMICS)
def test_comic_presets_carry_language_and_open_counts(preset, model):
    english, _ = build(text="x", system="mine", language="Japanese", preset=preset)
    assert english.system.endswith("mine") and "Japanese" in english.system and "Answer in" not in english.system
    chinese, _ = build(text="x", language="Chinese", preset=preset)
    assert "\u4e2d\u6587" in chinese.system and chinese.user == "x"
    for prompt in (english, chinese):
        assert "{{panels}}" in prompt.system and "{{rounds}}" in prompt.system
        generate(model, prompt, panels=17, rounds=29)
        told = engine_of(model).calls[-1][1].system
        assert "17" in told and "29" in told and "{{" not in told


def test_the_language_of_image_prompts_is_chosen_apart():
    japanese, _ = build(text="x", language="English", preset="manga", prompt_language="Japanese")
    assert "title: English." in japanese.system and "style): Japanese." in japanese.system
    both, _ = build(text="x", language="Chinese", preset="manga", prompt_language="Chinese")
    assert "\u82f1\u6587\u3002" not in both.system and both.system.count("\uff1a\u4e2d\u6587\u3002") == 2


@pytest.mark.parametrize("preset", JOBS)
def test_jobs_are_answered_as_text_in_the_chosen_language(preset, model):
    """Generate's own default must not press the answer of a plain job into a comic script."""
    unchosen, _ = build(text="x", preset=preset)
    japanese, _ = build(text="x", language="Japanese", preset=preset)
    chinese, _ = build(text="x", language="Chinese", preset=preset)
    assert ("Japanese" in japanese.system) == (preset != "read_text")  # text is copied as it stands there
    assert re.search("[\u4e00-\u9fff]", chinese.system) and not re.search("[\u4e00-\u9fff]", japanese.system)
    for prompt in (unchosen, japanese, chinese):
        assert "{{" not in prompt.system and prompt.user == "x"
        generate(model, prompt)
        assert engine_of(model).calls[-1][3:5] == (None, None)


def test_format_follows_the_preset_unless_chosen(model):
    comic, plain = build(text="x", preset="manga")[0], build(text="x")[0]
    schema = part("a3b_engine.script.grammar").comic_json_schema
    generate(model, comic, panels=2, rounds=1)
    generate(model, plain, panels=2, rounds=1)
    generate(model, comic, panels=2, rounds=1, format="text")
    generate(model, plain, panels=2, rounds=1, format="comic script")
    assert [call[3] for call in engine_of(model).calls] == [schema(2, 1), None, None, schema(2, 1)]


def test_the_model_is_told_which_form_the_grammar_will_hold_it_to(model):
    prompt, _ = build(text="x", preset="manga")
    told = []
    for kind in ("comic script", "short comic script", "text"):
        generate(model, prompt, format=kind)
        told.append(engine_of(model).calls[-1][1].system)
    assert told[0] == told[2] and "hort form" not in told[0]
    assert told[1].startswith(told[0]) and "Short form" in told[1]
    assert all("{{" not in text for text in told)


def test_counts_touch_nothing_else(model):
    """U06: only the two names, only in the system text."""
    typed = 'Return {"panels":[]} {{other}} {panels} {{ panels }}'
    generate(model, Prompt(user="{{panels}}", system=typed), panels=3)
    told = engine_of(model).calls[-1][1]
    assert told.system == typed and told.user == "{{panels}}"


# Generate


def test_answer_thinking_and_stats(comfy, model, engine_class):
    engine_class.script = (("hm", True), ("Hel", False), ("lo", False))
    out = generate(model, seed=2**64 - 1)  # U01
    text, thinking, stats = out["result"]
    assert (text, thinking) == ("Hello", "hm") and type(text) is str  # U22
    assert out["ui"] == {"text": ("Hello",)}
    facts = json.loads(stats)
    assert facts["seed"] == 2**64 - 1 and facts["finish_reason"] == "stop" and facts["model"] == "q"
    assert facts["sampling"]["temperature"] == 0.4 and "text" not in facts
    assert comfy.bars[-3:] == [(1, 4096), (2, 4096), (3, 4096)]
    assert comfy.texts[-1] == ("Hello", "17", "browser-1")


def test_room_for_prompt_and_answer_is_asked_first(comfy, model):
    generate(model, max_new_tokens=50)
    generate(model, max_new_tokens=30000)
    generate(model, max_new_tokens=50)
    assert comfy.memory_requests == [8192_000, 8192_000, 150_000]  # never more than the context; the usual length when weights arrive


def test_presets_win_unless_custom(model):
    generate(model, preset="free (instruct)", temperature=0.123)
    generate(model, preset="custom", temperature=0.123, top_k=7)
    first, second = (call[2] for call in engine_of(model).calls)
    assert (first.temperature, first.top_p, first.presence_penalty) == (0.7, 0.8, 1.5)
    assert (second.temperature, second.top_k) == (0.123, 7)


def test_every_format_becomes_its_constraint(model):
    schema = '{"type": "object"}'
    for kind in ("text", "comic script", "JSON schema", "regex", "short comic script"):
        generate(model, format=kind, schema=schema, regex="a+b", panels=3, rounds=1)
    found = [(call[3], call[4]) for call in engine_of(model).calls]
    assert found[0] == (None, None)
    assert found[1][0] == part("a3b_engine.script.grammar").comic_json_schema(3, 1)
    assert found[2] == ({"type": "object"}, None)
    assert found[3] == (None, "a+b")
    assert found[4][0] == part("a3b_engine.script.grammar").comic_json_schema(3, 1, brief=True)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"format": "JSON schema"}, "^schema: is empty"),
        ({"format": "JSON schema", "schema": "{oops"}, "^schema: '{oops' is not JSON"),
        ({"format": "JSON schema", "schema": "[" * 100000}, "^schema: .* is not JSON"),
        ({"format": "JSON schema", "schema": "[1]"}, "^schema: expected a JSON object"),
        ({"format": "regex", "regex": " "}, "^regex: is empty"),
    ],
)
def test_an_unusable_format_names_its_widget_before_loading(comfy, model, inputs, message):
    with pytest.raises(errors.GrammarError, match=message):
        generate(model, **inputs)
    assert comfy.memory_requests == []


def test_stop_texts_one_a_line(model):
    generate(model, stop="END\n\n\\n\\n\na b")
    assert engine_of(model).calls[-1][2].stop == ("END", "\n\n", "a b")


def test_thinking_and_budget(model):
    generate(model, thinking=True, thinking_budget=0)
    generate(model, thinking=False, thinking_budget=9)
    (first, second) = engine_of(model).calls
    assert first[5] is True and first[2].thinking_budget is None
    assert second[5] is False and second[2].thinking_budget == 9


def test_cancel_stops_and_the_next_run_is_normal(comfy, model, engine_class):
    """N01"""

    def cancel_at_five(index):
        comfy.interrupt = index == 5

    engine_class.script = tuple((str(n), False) for n in range(100))
    engine_class.before_token = staticmethod(cancel_at_five)
    with pytest.raises(Interrupted):
        generate(model)
    assert comfy.bars[-1][0] == 5
    engine_class.before_token = staticmethod(lambda index: None)
    assert len(generate(model)["result"][0]) == 190 and engine_of(model).loads == 1


def test_unloading_between_two_runs_reloads_by_itself(model):
    """V03"""
    generate(model)
    engine_of(model).unload_weights()
    generate(model)
    assert engine_of(model).loads == 2


def test_unknown_errors_are_not_swallowed(model, engine_class):
    def explode(index):
        raise ZeroDivisionError("inside")

    engine_class.before_token = staticmethod(explode)
    with pytest.raises(ZeroDivisionError, match="inside"):
        generate(model)


def test_a_budget_spent_thinking_is_shown_and_reaches_the_parser(model, engine_class):
    """T03"""
    engine_class.script = (("step one, step two", True),)
    out = generate(model, thinking=True)
    text, thinking, stats = out["result"]
    assert text == "" and thinking == "step one, step two"
    assert "token limit reached while thinking" in out["ui"]["text"][0]
    with pytest.raises(errors.ScriptError, match="token limit reached while thinking"):
        parse(text=text, stats=stats)


def test_nothing_of_the_fakes_is_left_behind():
    assert "comfy" not in sys.modules and "folder_paths" not in sys.modules
