"""An engine with a part of its weights on the device: the same answers, within the budget, and everything given back.

On a CPU a budget makes the engine keep its experts in slots too, in plain PyTorch.
"""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from engine_samples import GREEDY, picture

from a3b_engine import Engine, Prompt
from a3b_engine.errors import CheckpointError, ConfigError, MemoryBudgetError
from a3b_engine.memory.residence import Residence
from a3b_engine.runtime.budget import Budget

AMPLE = 10**12
LONG = Prompt(system="You draw comics. " * 12, user="Tell me a story about a fox. " * 6)


@pytest.fixture(scope="module")
def least(random_checkpoint):
    return Engine.open(random_checkpoint, context=1024, vram_budget=AMPLE)._budget.least


@pytest.fixture
def part(random_checkpoint, least):
    """With the fewest experts that go."""
    engine = Engine.load(random_checkpoint, context=1024, vram_budget=least)
    yield engine
    engine.close()


def test_the_smallest_budget_gives_the_same_answers(engine, part):
    assert part.memory()["experts_on_device"] < part.memory()["experts"]
    for prompt in (Prompt(user="Tell me"), LONG):
        expected = engine.generate(prompt, GREEDY)
        assert part.generate(prompt, GREEDY).text == expected.text
    asked, fetched = part.expert_counts()
    assert 0 < fetched < asked


def test_the_budget_holds_at_every_token(part):
    held = []
    part.generate(LONG, GREEDY, on_token=lambda event: held.append(part.memory()["total"]))
    assert held and max(held) <= part.vram_budget and part.memory()["total"] <= part.vram_budget


def test_a_byte_less_is_refused_with_the_sum_and_the_levers(random_checkpoint, least):
    with pytest.raises(MemoryBudgetError, match="(?s)needs at least .* MB .*experts a layer.*vram_gb.*context.*expert_format"):
        Engine.open(random_checkpoint, context=1024, vram_budget=least - 1)


def test_experts_leave_and_come_back(random_checkpoint, engine):
    mine = Engine.open(random_checkpoint, context=1024, vram_budget=engine.weight_bytes * 3)
    mine.load_weights()
    assert mine.expert_counts() is None
    expected = engine.generate(LONG, GREEDY).text
    sizes = mine._residence.sizes
    for _ in range(3):
        before = mine.loaded_bytes
        freed = mine.release(sizes.row + mine.cached_bytes)
        assert freed >= sizes.row and mine.loaded_bytes == before - sizes.row
        assert mine.generate(LONG, GREEDY).text == expected
        assert mine.grow(sizes.row * 1.5) == sizes.row and mine.loaded_bytes == before
        assert mine.generate(LONG, GREEDY).text == expected
    assert mine.release() > 0 and mine.memory()["experts_on_device"] == sizes.fewest_rows * sizes.layers
    assert mine.release() == 0 and mine.generate(LONG, GREEDY).text == expected
    assert mine.grow() > 0 and mine.expert_counts() is None  # all of them
    assert mine.generate(LONG, GREEDY).text == expected
    mine.close()
    assert mine.memory()["total"] == mine.memory()["host_pageable"] == 0


def test_a_room_takes_what_it_can(random_checkpoint, least):
    mine = Engine.open(random_checkpoint, context=1024, vram_budget=AMPLE)
    working = mine._budget.answering()
    sizes = []
    for room in (least - working, least - working + 1.5 * mine._residence.sizes.row, 10 * mine.weight_bytes):
        mine.load_weights(room=room)
        sizes.append(mine.memory()["experts_on_device"])
        assert mine.smallest_bytes <= mine.loaded_bytes <= mine.weight_bytes
        mine.unload_weights()
        assert mine.loaded_bytes == 0 and mine.memory()["host_pageable"] == 0
    assert sizes[0] < sizes[1] < sizes[2] == mine.memory()["experts"]
    with pytest.raises(MemoryBudgetError):
        mine.load_weights(room=-mine._budget.answering())
    assert mine.memory()["total"] == 0


@pytest.mark.parametrize("more, fits", [(0.0, False), (0.5, False), (1.0, True), (1.5, True)])
def test_without_pinned_ram_experts_give_way_to_the_embedding(random_checkpoint, engine, monkeypatch, more, fits):
    """On a card whose system refuses pinned RAM the embedding goes to the device: then an answer fits beside it, or loading is refused."""
    monkeypatch.setattr(Residence, "_pin", lambda self, placement: replace(placement, embedding=True))
    roomy = Engine.open(random_checkpoint, context=1024, vram_budget=AMPLE)
    embedding = roomy._residence.sizes.embedding
    mine = Engine.open(random_checkpoint, context=1024, vram_budget=roomy._budget.least + int(more * embedding))
    asked = mine._division(math.inf).placement
    assert not asked.embedding and embedding > 0
    if not fits:
        with pytest.raises(MemoryBudgetError, match="no pinned RAM for the embedding"):
            mine.load_weights()
        assert not mine.is_loaded and mine.memory()["total"] == 0
        return
    mine.load_weights()
    rows = mine._residence.placement.rows
    assert mine._residence.placement.embedding and rows <= asked.rows
    assert mine.grow() == 0 and mine._residence.placement.rows == rows and mine.most_bytes == mine.loaded_bytes
    held = []
    answer = mine.generate(LONG, GREEDY, on_token=lambda event: held.append(mine.memory()["total"]))
    assert answer.text == engine.generate(LONG, GREEDY).text and max(held) <= mine.vram_budget
    mine.close()


def test_pictures_are_the_same_when_the_tower_only_visits(engine, part):
    assert not part._residence.placement.vision
    image = picture()
    ours, theirs = part.encode_image(image, size=64), engine.encode_image(image, size=64)
    assert torch.equal(ours[0].features, theirs[0].features)
    held = part.memory()["total"]
    prompt = Prompt(user="[[IMG]] What is this?")
    answers = [each.generate(replace(prompt, images=tuple(features)), GREEDY).text for each, features in ((part, ours), (engine, theirs))]
    assert answers[0] == answers[1] and held <= part.vram_budget


def test_parked_experts_come_back_without_the_files(random_checkpoint, engine, least, monkeypatch):
    mine = Engine.load(random_checkpoint, context=1024, vram_budget=least, park=True)
    expected = mine.generate(LONG, GREEDY).text
    mine.unload_weights()
    assert mine.memory()["total"] == 0 and mine.memory()["host_pageable"] > 0

    def read(*args, **kwargs):
        raise AssertionError("the files were read again")

    monkeypatch.setattr(type(mine.parts.weights), "load", read)
    mine.load_weights()
    assert mine.generate(LONG, GREEDY).text == expected
    mine.close()
    assert mine.memory()["host_pageable"] == 0


def test_a_load_that_fails_in_the_middle_leaves_nothing(random_checkpoint, least):
    mine, calls = Engine.open(random_checkpoint, context=1024, vram_budget=least), []

    def cancel():
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mine.load_weights(cancel=cancel)
    assert not mine.is_loaded and mine.memory()["total"] == mine.memory()["host_pageable"] == 0
    mine.load_weights()
    assert mine.generate(Prompt(user="Tell me"), GREEDY).text
    mine.close()


def test_the_report_says_what_is_where_and_what_would_help(random_checkpoint, part):
    report = part.memory_report()
    assert "experts" in report and "%" in report and "expert_format" in report and "ordinary RAM" in report
    closed = Engine.open(random_checkpoint, context=1024)
    assert "not loaded" in closed.memory_report() and "runs from" in closed.memory_report()


def test_what_comes_to_the_device_is_what_was_announced(random_checkpoint, least):
    mine = Engine.open(random_checkpoint, context=1024, vram_budget=least)
    mine.load_weights()
    assert mine.smallest_bytes <= mine.loaded_bytes == mine.most_bytes < mine.weight_bytes
    mine.close()


def test_unloading_in_the_middle_of_an_answer_waits_for_its_end(random_checkpoint, engine, least):
    mine = Engine.load(random_checkpoint, context=1024, vram_budget=least)
    seen = []

    def leave(event):
        mine.unload_weights()
        mine.release()
        seen.append(mine.is_loaded)

    assert mine.generate(LONG, GREEDY, on_token=leave).text == engine.generate(LONG, GREEDY).text
    assert seen and not any(seen) and mine.memory()["total"] == mine.memory()["host_pageable"] == 0
    mine.load_weights()
    released = []
    answer = mine.generate(LONG, GREEDY, on_token=lambda event: released.append(mine.release()))
    assert answer.text == engine.generate(LONG, GREEDY).text and mine.cached_bytes == 0
    mine.close()


@pytest.mark.parametrize("budget", [0, -1, True, float("nan"), float("inf"), "12"])
def test_a_budget_that_is_none_is_named(random_checkpoint, budget):
    with pytest.raises(ConfigError, match="vram_budget: found"):
        Engine.open(random_checkpoint, vram_budget=budget)


def test_an_expert_that_cannot_be_read_once_spoils_no_later_answer(random_checkpoint, engine, least, monkeypatch):
    mine = Engine.load(random_checkpoint, context=1024, vram_budget=least)
    expected, homes = engine.generate(LONG, GREEDY).text, mine._residence._homes
    bring = type(homes).bring
    for failing in (1, 2, 5, 9, 14):
        calls = []

        def sometimes(self, layer, expert, place):
            calls.append(1)
            if len(calls) == failing:
                place.fill_(7)
                raise OSError("the disk is away")
            bring(self, layer, expert, place)

        mine.release_caches()
        monkeypatch.setattr(type(homes), "bring", sometimes)
        with pytest.raises(OSError):
            mine.generate(LONG, GREEDY)
        monkeypatch.setattr(type(homes), "bring", bring)
        assert mine.generate(LONG, GREEDY).text == expected
    mine.close()


@pytest.mark.parametrize("inside_first", [True, False])
def test_nodes_run_in_inference_mode_and_unload_buttons_do_not(random_checkpoint, engine, inside_first):
    expected = engine.generate(LONG, GREEDY).text
    mine = Engine.open(random_checkpoint, context=1024, vram_budget=AMPLE, park=True)

    def use(inside):
        with torch.inference_mode(inside):
            mine.load_weights()
            assert mine.generate(LONG, GREEDY).text == expected
            assert mine.encode_image(picture(), size=64)

    def move(inside):
        with torch.inference_mode(inside):
            assert mine.release(mine.cached_bytes + 1) > 0
        use(not inside)
        with torch.inference_mode(inside):
            assert mine.grow() > 0
            mine.unload_weights()
            assert mine.memory()["host_pageable"] > 0

    use(inside_first)
    move(not inside_first)
    use(not inside_first)
    mine.close()


def test_files_that_change_behind_an_open_engine_are_not_read(random_checkpoint, tmp_path):
    folder = shutil.copytree(random_checkpoint, tmp_path / "copy")
    mine = Engine.open(folder, context=1024)
    mine.load_weights()
    mine.unload_weights()
    file = next(iter(sorted(folder.glob("*.safetensors"))))
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match="changed or gone since"):
        mine.load_weights()
    assert mine.memory()["total"] == 0


def test_experts_that_fit_no_slot_are_budgeted_as_a_whole(random_checkpoint, monkeypatch):
    """Layers in different formats: everything is on the device or nothing."""
    from a3b_engine.parts import FolderWeights

    def differ(self, *args):
        raise CheckpointError("layers differ")

    monkeypatch.setattr(FolderWeights, "expert_shapes", differ)
    mine = Engine.open(random_checkpoint, context=1024, vram_budget=AMPLE)
    assert mine.smallest_bytes == mine.weight_bytes == mine.most_bytes
    least = mine.least_bytes
    with pytest.raises(MemoryBudgetError):
        Engine.open(random_checkpoint, context=1024, vram_budget=least - 1)
    mine = Engine.load(random_checkpoint, context=1024, vram_budget=least)
    assert mine.loaded_bytes == mine.weight_bytes and mine.generate(LONG, GREEDY).text and mine.memory()["total"] <= least
    assert mine.shrink(10**9) == mine.grow() == 0
    mine.close()


def test_parking_without_enough_ram_reads_the_files_again(random_checkpoint, engine, least, monkeypatch):
    from a3b_engine.memory import homes

    def refuse(self):
        raise homes.PinnedMemoryError("no pinned RAM in this test")

    monkeypatch.setattr(homes.PinnedArena, "take", refuse)
    mine = Engine.load(random_checkpoint, context=1024, vram_budget=least, park=True)
    expected = engine.generate(LONG, GREEDY).text
    for _ in range(2):
        assert mine.generate(LONG, GREEDY).text == expected
        mine.unload_weights()
        mine.load_weights()
    assert mine.generate(LONG, GREEDY).text == expected
    mine.close()
