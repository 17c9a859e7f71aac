"""Checks of the residency contract: a part of the weights on the device, and ComfyUI's memory flags."""

from contract_stage import CARD, GB, check, new_handle, partial_host, patcher_of, reserve, stage

# A part of the weights


@check
def a_small_card_gets_a_part():
    stage.host.card = 24 * GB
    handle, rival = new_handle(), stage.host.rival(10 * GB)
    stage.host.management.load_models_gpu([rival])
    engine = stage.residency.ensure_loaded(handle, 2 * GB)
    assert rival.resident == 0, "others leave before a part of the model has to stay out"
    assert engine.is_loaded and 18 * GB < engine.loaded_bytes < 22 * GB, engine.loaded_bytes
    assert stage.host.free() >= 2 * GB + reserve() and stage.host.listed() == [patcher_of(handle)]
    loaded = engine.loaded_bytes
    for _ in range(3):
        stage.residency.ensure_loaded(handle, 2 * GB)
        assert (engine.loads, engine.loaded_bytes) == (1, loaded)
    assert patcher_of(handle).loaded_size() == loaded and patcher_of(handle).model_size() == 36 * GB


@check
def a_rival_makes_us_smaller_and_room_makes_us_larger():
    stage.host.card = 24 * GB
    handle, rival = new_handle(), stage.host.rival(10 * GB)
    engine = stage.residency.ensure_loaded(handle, GB)
    large = engine.loaded_bytes
    stage.host.management.load_models_gpu([rival])
    assert rival.resident
    if not partial_host():
        assert engine.loaded_bytes == 0  # as a whole, or not at all
        assert stage.residency.ensure_loaded(handle, GB).loads == 2 and engine.loaded_bytes == large
        return
    small = engine.loaded_bytes
    assert engine.is_loaded and engine.loads == 1 and 7 * GB <= small < large - 8 * GB
    assert stage.host.free() >= 0 and set(stage.host.listed()) == {patcher_of(handle), rival}
    stage.residency.ensure_loaded(handle, GB)
    assert engine.loads == 1 and engine.loaded_bytes == large and rival.resident == 0


@check
def a_rival_that_needs_more_than_experts_takes_all():
    stage.host.card = 24 * GB
    handle, rival = new_handle(), stage.host.rival(18 * GB)
    engine = stage.residency.ensure_loaded(handle, GB)
    stage.host.management.load_models_gpu([rival])
    assert rival.resident and engine.loaded_bytes == 0 and stage.host.listed() == [rival]


@check
def free_room_is_taken_without_moving_anybody():
    """Room that other programs gave back."""
    stage.host.card = 20 * GB
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    part = engine.loaded_bytes
    stage.host.card = 60 * GB
    stage.residency.ensure_loaded(handle, GB)
    assert part < 20 * GB and engine.loaded_bytes == 36 * GB and engine.loads == 1
    stage.host.card = 24 * GB  # another program took it: experts give way before an allocation fails
    engine.rows -= 130
    stage.residency.ensure_loaded(handle, 3 * GB)
    assert engine.is_loaded and engine.loads == 1 and stage.host.free() >= 3 * GB + reserve()


@check
def a_long_prompt_pushes_experts_out_and_keeps_the_buffers():
    stage.host.card = 24 * GB
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    engine.cached_bytes = GB
    stage.residency.ensure_loaded(handle, 6 * GB)
    assert engine.cached_bytes == GB and engine.loads == 1
    assert stage.host.free() + engine.cached_bytes >= 6 * GB + reserve()


@check
def room_for_an_answer_is_left_when_a_picture_comes_first():
    stage.host.card = 24 * GB
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, 10**7)
    rows = engine.rows
    stage.residency.ensure_loaded(handle, engine.working_bytes(8192))
    assert engine.rows == rows


@check
def the_smallest_part_has_to_fit():
    from a3bpack.a3b_engine.errors import MemoryBudgetError

    stage.host.card = 8 * GB
    handle = new_handle()
    try:
        stage.residency.ensure_loaded(handle, 2 * GB)
    except MemoryBudgetError as error:
        for said in ("at least 7.8 GB", "7.0 GB of its 36.0 GB", "Of 8.0 GB", "leave 7.", "expert_format = int4", "context = 4096"):
            assert said in str(error), error
    else:
        raise AssertionError("7.8 GB and ComfyUI's reserve went on an 8 GB card")
    assert stage.residency.open_engine(handle).loads == 0 and stage.host.listed() == [] and stage.host.free() == stage.host.card
    stage.host.card = 9 * GB
    engine = stage.residency.ensure_loaded(handle, 2 * GB)  # more than is left, but the smallest part needs less
    assert engine.rows == engine.fewest


@check
def vram_gb_leaves_the_rest_to_others():
    handle, rival = new_handle(vram_gb=14.0), stage.host.rival(8 * GB)
    stage.host.card = 32 * GB if not partial_host() else 24 * GB  # the host of 2024 wants 1.3 times what a model takes
    stage.host.management.load_models_gpu([rival])
    engine = stage.residency.ensure_loaded(handle, GB)
    assert rival.resident and 12 * GB < engine.loaded_bytes <= 14 * GB - engine.working_bytes(8192)
    assert patcher_of(handle).model_size() == engine.loaded_bytes == engine.most_bytes
    for _ in range(3):
        stage.host.management.load_models_gpu([rival])
        stage.residency.ensure_loaded(handle, GB)
    assert rival.resident and engine.loads == 1 and engine.loaded_bytes == engine.most_bytes


@check
def partial_unloading_returns_what_was_freed():
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    patcher = patcher_of(handle)
    if not partial_host():
        return
    for wanted, least, most in ((GB, GB, 1.2 * GB), (0, 0, 0), (10 * GB, 10 * GB, 10.2 * GB), (100 * GB, 17 * GB, 18 * GB), (GB, 0, 0)):
        free = stage.host.free()
        freed = patcher.partially_unload(patcher.offload_device, wanted)
        assert stage.host.free() - free == freed and least <= freed <= most, (wanted, freed)
    assert engine.is_loaded and engine.rows == engine.fewest
    engine.shrink = engine.release = lambda wanted: 1 / 0
    assert patcher.partially_unload(patcher.offload_device, GB) == 0


@check
def odd_budgets_never_hurt_a_loaded_model():
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    patcher = patcher_of(handle)
    if not partial_host():
        return
    for budget in (0.1, 0, -1, -5 * GB, -1e32, 1e32, float("inf")):
        patcher.partially_load(stage.host.device, budget)
        assert engine.is_loaded and engine.rows == 256, budget
    stage.host.card = 30 * GB  # less than is held now
    assert patcher.partially_load(stage.host.device, -8 * GB) < 0
    assert engine.is_loaded and stage.host.free() >= GB + reserve()
    stage.host.card, engine.fail_grow = CARD, RuntimeError("no more")
    assert patcher.partially_load(stage.host.device, 1e32) == 0 and engine.is_loaded
    engine.fail_grow = KeyboardInterrupt()
    try:
        patcher.partially_load(stage.host.device, 1e32)
    except KeyboardInterrupt:
        assert engine.loaded_bytes == 0
    else:
        raise AssertionError("the interrupt was swallowed")


@check
def a_host_that_fails_in_between_leaves_nothing():
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    if not partial_host():
        return  # the host of 2024 keeps its entry
    real = stage.host.management.free_memory

    def fails(*args, **kwargs):
        raise RuntimeError("in the middle")

    stage.host.management.free_memory = fails
    try:
        stage.residency.ensure_loaded(handle, GB)
    except RuntimeError as error:
        assert str(error) == "in the middle"
    else:
        raise AssertionError("the failure was swallowed")
    finally:
        stage.host.management.free_memory = real
    assert engine.loaded_bytes == 0 and stage.host.listed() == []


@check
def fifty_turns_leave_everything_as_it_was():
    stage.host.card = 24 * GB
    handle, rival = new_handle(), stage.host.rival(10 * GB)
    seen = set()
    for _ in range(50):
        engine = stage.residency.ensure_loaded(handle, GB)
        ours = engine.loaded_bytes
        stage.host.management.load_models_gpu([rival])
        seen.add((ours, engine.loaded_bytes, rival.resident, stage.host.free(), len(stage.host.listed())))
    assert len(seen) == 1, seen
    assert engine.loads == (1 if partial_host() else 50) and len(stage.residency._residents) == 1


@check
def a_twin_gives_its_ram_back():
    stage.host.card = 24 * GB
    handle = new_handle()
    old = stage.residency.ensure_loaded(handle, GB)
    assert old.memory()["host_pinned"]
    twin = stage.residency.ModelHandle(path=handle.path, device=handle.device, context=4096)
    new = stage.residency.ensure_loaded(twin, GB)
    assert old.loaded_bytes == 0 and new.is_loaded and list(stage.residency._residents) == [twin]
    assert stage.host.listed() == [patcher_of(twin)]
    assert stage.residency.ensure_loaded(handle, GB).is_loaded and new.loaded_bytes == 0  # a loader in ComfyUI's cache


@check
def out_of_memory_says_what_helps_and_empties_the_card():
    from a3bpack.a3b_engine.errors import MemoryBudgetError

    stage.host.card = 48 * GB
    handle, rival = new_handle(), stage.host.rival(2 * GB)
    problems = (stage.host.torch.cuda.OutOfMemoryError("Tried to allocate 2.00 GiB"), RuntimeError("Triton Error [CUDA]: out of memory"), MemoryError())
    for problem in problems:
        try:
            with stage.residency.loaded(handle, GB) as engine:
                stage.host.management.load_models_gpu([rival])
                raise problem
        except MemoryBudgetError as error:
            assert isinstance(error, stage.host.management.OOM_EXCEPTION), "ComfyUI would not see it"
            assert getattr(stage.host.management, "is_oom", lambda _: True)(error)
            for said in ("ran out of memory on cuda:0", "vram_gb = ", "now 0, ComfyUI decides", "expert_format = int4", "context = 4096 (now 8192)"):
                assert said in str(error), error
            assert str(problem) in str(error)
        else:
            raise AssertionError("no error")
        assert engine.loaded_bytes == 0 and rival.resident == 0 and stage.host.free() == stage.host.card
    try:
        with stage.residency.loaded(handle, GB):
            raise RuntimeError("something else")
    except RuntimeError as error:
        assert str(error) == "something else"
    assert engine.is_loaded


# Flags


@check
def lowvram_is_like_no_flag():
    stage.host.management.vram_state = stage.host.management.VRAMState.LOW_VRAM
    engine = stage.residency.ensure_loaded(new_handle(), GB)
    assert engine.loaded_bytes == 36 * GB
    stage.host.management.unload_all_models()
    stage.host.card = 24 * GB
    handle = new_handle()
    assert 18 * GB < stage.residency.ensure_loaded(handle, GB).loaded_bytes < 24 * GB


@check
def novram_loads_the_smallest_part_and_moves_nobody():
    stage.host.management.vram_state = stage.host.management.VRAMState.NO_VRAM
    stage.host.card = 24 * GB
    handle, rival = new_handle(), stage.host.rival(10 * GB)
    stage.host.management.load_models_gpu([rival])
    for _ in range(3):
        engine = stage.residency.ensure_loaded(handle, GB)
        assert engine.rows == engine.fewest and engine.loads == 1 and rival.resident
    assert patcher_of(handle).model_size() == engine.smallest_bytes


@check
def highvram_takes_what_the_models_that_stay_leave():
    stage.host.management.vram_state = stage.host.management.VRAMState.HIGH_VRAM
    handle, rival = new_handle(), stage.host.rival(60 * GB, stays=True)
    stage.host.management.load_models_gpu([rival])
    engine = stage.residency.ensure_loaded(handle, GB)
    assert rival.resident and 16 * GB < engine.loaded_bytes < 20 * GB and stage.host.free() >= GB + reserve()
    stage.residency.ensure_loaded(handle, GB)
    assert engine.loads == 1 and stage.host.free() >= GB + reserve()


@check
def reserved_memory_stays_free():
    if not hasattr(stage.host.management, "EXTRA_RESERVED_VRAM"):
        return  # the host of 2024 has no --reserve-vram
    stage.host.management.EXTRA_RESERVED_VRAM = 10 * GB
    stage.host.card = 40 * GB
    engine = stage.residency.ensure_loaded(new_handle(), 2 * GB)
    assert 26 * GB < engine.loaded_bytes <= 28 * GB and stage.host.free() >= 12 * GB
    stage.host.management.vram_state = stage.host.management.VRAMState.HIGH_VRAM
    stage.host.management.unload_all_models()
    assert stage.residency.ensure_loaded(new_handle(), 2 * GB).loaded_bytes and stage.host.free() >= 12 * GB


@check
def without_smart_memory_a_prompt_still_loads_once():
    stage.host.management.DISABLE_SMART_MEMORY = True
    handle, rival = new_handle(), stage.host.rival(GB)
    stage.host.management.load_models_gpu([rival])
    engine = stage.residency.ensure_loaded(handle, GB)
    stage.residency.ensure_loaded(handle, GB)
    assert engine.loads == 1 and rival.resident == 0
    stage.host.management.unload_all_models()  # what ComfyUI does at the end of a prompt with this flag
    assert engine.loaded_bytes == 0 and stage.host.listed() == []
    stage.residency.ensure_loaded(handle, GB)
    stage.host.management.load_models_gpu([rival])
    assert engine.loaded_bytes == 0 and engine.loads == 2


@check
def beside_dynamic_models():
    if not partial_host():
        return
    stage.host.card = 24 * GB
    handle, rival = new_handle(), stage.host.rival(12 * GB, dynamic=True)
    engine = stage.residency.ensure_loaded(handle, GB)
    large = engine.loaded_bytes
    stage.host.management.load_models_gpu([rival])
    assert rival.resident and engine.is_loaded and engine.loaded_bytes < large - 8 * GB  # the one that is not dynamic gives way
    stage.residency.ensure_loaded(handle, GB)
    assert engine.loads == 1 and engine.loaded_bytes == large and stage.host.free() >= GB + reserve()
