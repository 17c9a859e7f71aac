"""The checks of the residency contract on a real card. Each takes the stage and a number of rounds."""

import gc

from .stage import GB, MB

CHECKS = {}
GROWTH = MB  # bytes that rounding of an allocator may account for
STAYS = 150 * MB  # bytes that a process keeps once kernels and libraries have worked in it


def check(function):
    CHECKS[function.__name__] = function
    return function


def first_use(stage, free):
    """A card with that many bytes; loads, answers, leaves. Returns the answer and what the process holds with none of ours there."""
    stage.card.shrink_to(free)
    empty = stage.card.held(), stage.card.free(), stage.card.held_by_graphs()
    expected = stage.use()
    stage.same(stage.use(), expected, "second use:")  # the second picture of a size is captured
    stage.note(memory=stage.engine.memory(), graphs_in_use=stage.card.held_by_graphs(), held_with_us=stage.card.held())
    stage.management.unload_all_models()
    rest = nothing_left(stage, "after the first unload")
    left = rest[0] - empty[0], empty[1] - rest[1]
    stage.note(left_by_torch=left[0], left_for_driver=left[1], graphs_after_unload=stage.card.held_by_graphs(), graphs_before=empty[2])
    stage.expect(left[0] <= STAYS and left[1] <= 3 * STAYS, "the first use leaves", left, "bytes")
    return expected, rest


def nothing_left(stage, when):
    """Nothing of ours is on the card. Returns bytes held by torch and free."""
    gc.collect()
    stage.card.trim()
    memory = stage.engine.memory()
    stage.expect(not stage.engine.is_loaded and memory["total"] == 0 and stage.patcher.loaded_size() == 0, when, "is left:", memory)
    stage.expect(stage.patcher not in stage.listed(), when, "ComfyUI lists the model still")
    return stage.card.held(), stage.card.free()


def as_before(stage, rest, when):
    """The card is as `first_use` left it."""
    now = nothing_left(stage, when)
    stage.expect(now[0] <= rest[0] + GROWTH, when, now[0] - rest[0], "bytes more are held by torch")
    stage.expect(now[1] >= rest[1] - 64 * MB, when, rest[1] - now[1], "bytes fewer are free")


@check
def alternate(stage, rounds):
    """We and another model take turns: we give a part, it computes beside us, it leaves, we take the part back."""
    free = stage.for_all_of_ours()
    expected, rest = first_use(stage, free)
    rival = stage.rival(stage.rival_size(free))
    loads, levels, pinned, parts, taken, rivals = stage.loads, [], [], [], [], []
    for number in range(rounds):
        stage.same(stage.use(), expected, f"round {number}, alone:")
        stage.expect(stage.engine.loaded_bytes == stage.whole, f"round {number}: only", stage.engine.loaded_bytes, "of", stage.whole, "came")
        loads = loads + 1 if number == 0 else loads
        rivals.append(stage.bring(rival))
        parts.append(stage.engine.loaded_bytes)
        taken.append(stage.card.free_for_comfyui())
        stage.same(stage.answer(), expected, f"round {number}, beside the rival:")
        if number % 2:
            stage.send_away(rival)  # else it gives way to us
        stage.same(stage.use(), expected, f"round {number}, again alone:")
        stage.expect(stage.engine.loaded_bytes == stage.whole, f"round {number}: only", stage.engine.loaded_bytes, "of", stage.whole, "came back")
        stage.send_away(rival)
        stage.engine.release_caches()
        levels.append(stage.card.held())
        pinned.append(stage.engine.memory()["host_pinned"])
    stage.note(parts=parts, rivals=rivals, rival_size=rival.model_size(), free_beside_both=taken, levels=levels, pinned=pinned)
    stage.note(unloads=stage.unloads[-2 * rounds :], loads=stage.loads)
    stage.expect(stage.loads == loads, "weights were read", stage.loads - loads, "times too often")
    stage.expect(all(stage.smallest <= part < stage.whole for part in parts), "not a part of us stayed beside the rival:", parts)
    stage.expect(all(size >= 0.97 * rival.model_size() for size in rivals), "the rival had no room for itself:", rivals)
    stage.expect(max(levels[1:] or levels) - min(levels[1:] or levels) <= GROWTH, "what tensors hold changes from round to round:", levels)
    stage.expect(len(set(pinned[1:])) <= 1, "pinned RAM changes from round to round:", pinned)
    gave_back(stage)
    stage.management.unload_all_models()
    as_before(stage, rest, "after unload_all_models")
    stage.same(stage.use(), expected, "loaded again:")
    stage.management.free_memory(1e30, stage.card.device)
    as_before(stage, rest, "after free_memory")


def gave_back(stage):
    """Of every partial unload: what was said to be free is free."""
    real = [each for each in stage.unloads if each[1] > 0]
    stage.expect(real, "we were never asked for a part")
    for wanted, freed, driver, comfyui in real:
        stage.expect(freed >= wanted, "of", wanted, "bytes only", freed, "were freed")
        stage.expect(comfyui >= 0.98 * freed - 8 * MB, freed, "bytes freed, but ComfyUI has", comfyui, "more")
        stage.expect(driver >= 0.9 * freed - 64 * MB, freed, "bytes freed, but the driver has", driver, "more")


@check
def out_of_memory(stage, rounds):
    """A failed allocation: the user is told what helps, ComfyUI sees an out-of-memory error, the card is empty, the next run works."""
    errors = stage._module("errors")
    free = stage.for_all_of_ours()
    expected, rest = first_use(stage, free)
    for _ in range(rounds):
        try:
            with stage.residency.loaded(stage.handle, stage.engine.working_bytes(512)):
                stage.card.allocate(2 * free)
        except errors.MemoryBudgetError as error:
            text = str(error)
            stage.note(message=text)
            stage.expect(isinstance(error, stage.management.OOM_EXCEPTION), "ComfyUI would not see it:", type(error).__mro__)
            stage.expect("ran out of memory on" in text and "What helps" in text and "vram_gb" in text, "the message is:", text)
        else:
            stage.expect(False, "no error although there was no room")
        as_before(stage, rest, "after the error")
        stage.same(stage.use(), expected, "after the error:")
        stage.management.unload_all_models()
    as_before(stage, rest, "at the end")


@check
def reserve(stage, rounds):
    """--reserve-vram: those bytes stay free of the weights and of what an answer takes."""
    stage.card.shrink_to(stage.beside + stage.half)
    expected, free = stage.use(), []
    for _ in range(1 + rounds):
        free.append(stage.card.free_for_comfyui())
        stage.same(stage.use(), expected, "again:")
    stage.note(reserve=stage.reserve, free=free, part=stage.engine.loaded_bytes)
    stage.expect(stage.reserve >= 20 * 2**30, "the flag says 20 GB, ComfyUI", stage.reserve)
    stage.expect(stage.smallest <= stage.engine.loaded_bytes < stage.whole, "not a part:", stage.engine.loaded_bytes)
    stage.expect(min(free) >= stage.reserve, "only", min(free), "bytes are free of", stage.reserve, "reserved")
    stage.expect(stage.loads == 1, "weights were read", stage.loads, "times")
    stage.management.unload_all_models()
    nothing_left(stage, "after unload_all_models")


@check
def high(stage, rounds):
    """--highvram: what is unloaded stays on the card, so that we take what the other model leaves."""
    rival = stage.rival(2 * GB)
    stage.card.shrink_to(stage.beside + rival.model_size() + stage.half)
    stage.bring(rival)
    expected = stage.use()
    for _ in range(rounds):
        stage.same(stage.use(), expected, "again:")
        stage.expect(stage.card.free_for_comfyui() >= stage.reserve, "the reserve is not kept:", stage.card.free_for_comfyui())
    there = {parameter.device.type for parameter in rival.model.parameters()}
    stage.note(part=stage.engine.loaded_bytes, free=stage.card.free_for_comfyui(), rival_on=sorted(there))
    stage.expect(there == {stage.card.device.type}, "the rival's layers are on", there)
    stage.expect(stage.smallest <= stage.engine.loaded_bytes < stage.whole, "not a part:", stage.engine.loaded_bytes)
    stage.expect(stage.loads == 1, "weights were read", stage.loads, "times")
    stage.bring(rival)  # it is there already, but ComfyUI reckons with bytes that it took off its list
    stage.note(after_the_rivals_second_turn=stage.engine.loaded_bytes)
    stage.same(stage.use(), expected, "after the rival's second turn:")
    stage.management.unload_all_models()
    nothing_left(stage, "after unload_all_models")


@check
def none(stage, rounds):
    """--novram: our smallest part, however much is free, and nobody moves for it."""
    rival = stage.rival(GB)
    stage.card.shrink_to(stage.for_all_of_ours() + rival.model_size())
    before = stage.bring(rival)
    expected = stage.use()
    for _ in range(rounds):
        stage.same(stage.use(), expected, "again:")
    memory = stage.engine.memory()
    stage.note(part=stage.engine.loaded_bytes, rival=before, experts=memory["experts_on_device"], of=memory["experts"])
    stage.expect(stage.engine.loaded_bytes == stage.smallest, "not the smallest part:", stage.engine.loaded_bytes, stage.smallest)
    stage.expect(rival.loaded_size() == before and rival in stage.listed(), "the rival had to move:", rival.loaded_size(), before)
    stage.expect(stage.loads == 1, "weights were read", stage.loads, "times")
    stage.management.unload_all_models()
    nothing_left(stage, "after unload_all_models")


@check
def not_smart(stage, rounds):
    """--disable-smart-memory: within a prompt weights are read once; another model's turn takes all of us off the card."""
    free = stage.for_all_of_ours()
    expected, rest = first_use(stage, free)
    rival, loads = stage.rival(GB), stage.loads
    for number in range(rounds):
        stage.same(stage.use(), expected, f"round {number}:")
        stage.same(stage.use(), expected, f"round {number}, again:")
        stage.expect(stage.loads == loads + 1 + number, "weights were read", stage.loads - loads, "times in", 1 + number, "rounds")
        stage.bring(rival)
        stage.expect(stage.engine.loaded_bytes == 0 and stage.patcher not in stage.listed(), "of us is left:", stage.engine.loaded_bytes)
    stage.send_away(rival)
    as_before(stage, rest, "after the rival's turn")
