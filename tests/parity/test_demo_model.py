"""The trained demo model that ships: what it sees and tells, and that transformers reads the same from its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import largest
from PIL import Image

from a3b_engine import Engine, Prompt, SamplingParams
from a3b_engine.checkpoint.write import to_official, write_checkpoint
from a3b_engine.script.grammar import comic_json_schema
from a3b_engine.script.panels import panel_lists
from a3b_engine.script.parse import parse_script
from tools.demo_model.training.store import read_weights
from tools.demo_model.world import PICTURE_FACTS, add, sample, score
from tools.demo_model.world.facts import read_look
from tools.runner.paths import ASSETS, DEMO_MODEL

GREEDY = SamplingParams(max_new_tokens=1200, temperature=0.0)
FIRST_SEED = 3 << 41  # apart from the seeds of training, of its evaluation and of the demo's pictures
PICTURES = 10


@pytest.fixture(scope="module")
def engine():
    model = Engine.load(DEMO_MODEL, device="cpu")
    yield model
    model.close()


def answer(engine, lesson) -> str:
    prompt = Prompt(user=lesson.user, system=lesson.system, images=engine.encode_image(lesson.picture))
    schema = None
    if lesson.panels:
        schema = comic_json_schema(lesson.panels, lesson.rounds, brief=lesson.kind == "script_short")
    return engine.generate(prompt, GREEDY, schema=schema).text



def test_files_are_small_and_in_the_official_layout():
    files = [path for path in DEMO_MODEL.iterdir() if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    assert sum(sizes.values()) <= 32_000_000 and max(sizes.values()) < 15_000_000
    index = json.loads((DEMO_MODEL / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = {*index["weight_map"].values()}
    assert len(shards) >= 2 and shards == {name for name in sizes if name.endswith(".safetensors")}
    assert "model.language_model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv" in index["weight_map"]
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= set(sizes)
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    assert config["quantization_config"]["quant_method"] == "fp8"


def test_the_card_says_what_it_is():
    """Nobody may take it for a small Qwen."""
    card = " ".join((DEMO_MODEL / "README.md").read_text(encoding="utf-8").split())
    assert "**demonstration model**" in card and "not a small Qwen" in card
    run = json.loads((DEMO_MODEL / "run.json").read_text(encoding="utf-8"))
    assert run["done"] and str(run["recipe"]["seed"]) and run["final_loss"] < 0.1
    assert (DEMO_MODEL / "train.log").stat().st_size > 1000


def test_panels_name_the_colours_and_kinds_that_are_drawn(engine):
    """Ten pictures whose hero's colour, kind, place and event never stood together in training, as prompts of panels."""
    wrong = []
    for number in range(PICTURES):
        lesson = sample(FIRST_SEED + number, True, "script_full", "zh" if number % 3 == 2 else "en")
        result = parse_script(answer(engine, lesson), expected_panels=lesson.panels)
        assert result.status == "ok"
        prompts = panel_lists(result).prompt
        assert len(prompts) == lesson.panels
        people = lesson.facts["people"]
        # Who a panel is about comes first, behind shot and number; with the first panels everybody had a turn.
        looks = [read_look(prompt.split(", ")[2]) for prompt in prompts[: len(people)]]
        named = {(look["kind"], look["colour"]) for look in looks}
        drawn = {(person["kind"], person["colour"]) for person in people}
        wrong += [(number, named, drawn)] * (named != drawn)
    assert not wrong


def test_lists_of_what_is_seen(engine):
    total: dict = {}
    for number in range(30):
        lesson = sample(FIRST_SEED + 100 + number, True, "inventory")
        total = add(total, score(answer(engine, lesson), lesson.facts))
    for name in PICTURE_FACTS:
        right, asked = total[name]
        assert right >= 0.9 * asked, (name, total)
    assert sum(total[name][0] for name in PICTURE_FACTS) >= 0.97 * sum(total[name][1] for name in PICTURE_FACTS), total


def test_another_picture_gives_another_answer(engine):
    """The words come from the picture, not from the question."""
    first, second = (np.asarray(Image.open(ASSETS / f"demo_picture.{name}.png")) for name in ("en", "zh"))
    question = "What is in the picture? Answer as a list."
    texts = [engine.generate(Prompt(user=question, images=engine.encode_image(picture)), GREEDY).text for picture in (first, second)]
    assert "yellow girl" in texts[0] and "blue robot" in texts[0] and "castle" in texts[0]
    assert "red dragon" in texts[1] and "white cat" in texts[1] and "forest" in texts[1]
    blank = engine.generate(Prompt(user=question, images=engine.encode_image(np.zeros((384, 384, 3), np.uint8))), GREEDY).text
    assert blank not in texts


def test_transformers_reads_the_same_from_the_dequantised_copy(engine, tmp_path, differences):
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config, weights = read_weights(DEMO_MODEL)
    raw = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config")
    write_checkpoint(tmp_path, to_official(weights, config), raw, format="fp32", experts="per_expert", max_shard_bytes=50_000_000)
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()

    lesson = sample(FIRST_SEED, True, "inventory", "en")
    prompt = Prompt(user=lesson.user, system=lesson.system, images=engine.encode_image(lesson.picture))
    ids = engine.render(prompt).token_ids
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 1, "longest_edge": 16777216},
    )  # fmt: skip
    batch = processor(images=[lesson.picture], return_tensors="pt", input_data_format="channels_last")
    tokens = torch.tensor([ids])
    with torch.no_grad():
        theirs = model(
            input_ids=tokens, mm_token_type_ids=(tokens == config.image_token_id).int(), use_cache=False,
            pixel_values=batch["pixel_values"], image_grid_thw=batch["image_grid_thw"],
        ).logits[0]  # fmt: skip
    exact = Engine.load(tmp_path_with_texts(tmp_path), device="cpu", dtype=torch.float32)
    ours = exact.logits(ids, exact.encode_image(lesson.picture))
    exact.close()
    scale = float(theirs.abs().max())
    assert differences.note("demo model, engine vs transformers", largest(ours, theirs) / scale, "relative", 1e-4) <= 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def tmp_path_with_texts(folder: Path) -> Path:
    """The dequantised folder with the tokenizer, template and settings of the shipped one."""
    for path in DEMO_MODEL.iterdir():
        if path.suffix in (".json", ".jinja") and not (folder / path.name).exists() and "index" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder
