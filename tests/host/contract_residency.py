"""Drives a real `comfy.model_management` with a pretended 80 GB card and an engine that only counts bytes.

Run by test_residency_contract.py inside a host's own interpreter (comfy reads sys.argv when it is imported):
    python contract_residency.py HOST_ROOT CHECK
Prints one JSON object: {"check": ..., "ok": true} or {"ok": false, "error": traceback}. `LIST` prints the names.
"""

import json
import sys
import traceback
from pathlib import Path

import contract_parts  # noqa: F401  (its checks)
from contract_stage import CARD, CHECKS, GB, CountingEngine, Host, check, load_residency, new_handle, partial_host, patcher_of, reserve, stage


@check
def opening_loads_nothing():
    engine = stage.residency.open_engine(new_handle())
    assert engine.loads == 0 and stage.host.listed() == []


@check
def room_is_made_before_weights_arrive():
    rival = stage.host.rival(50 * GB)
    stage.host.management.load_models_gpu([rival])
    engine = stage.residency.ensure_loaded(new_handle(), 5 * GB)
    assert rival.resident == 0
    assert engine.free_at_load >= engine.weight_bytes + 5 * GB
    assert engine.is_loaded and stage.host.listed() == [patcher_of(next(iter(stage.residency._residents)))]


@check
def resident_weights_stay_between_runs():
    handle = new_handle()
    for _ in range(3):
        engine = stage.residency.ensure_loaded(handle, GB)
    assert engine.loads == 1 and engine.is_loaded
    assert stage.host.listed() == [patcher_of(handle)]


@check
def equal_options_share_one_engine():
    handle = new_handle()
    twin = stage.residency.ModelHandle(path=handle.path, device=handle.device)
    assert stage.residency.ensure_loaded(handle, GB) is stage.residency.ensure_loaded(twin, GB)
    other = stage.residency.ModelHandle(path=handle.path, device=handle.device, context=4096)
    assert stage.residency.open_engine(other) is not stage.residency.open_engine(handle)


@check
def a_rival_takes_the_room_and_we_come_back():
    handle, rival = new_handle(), stage.host.rival(50 * GB)
    engine = stage.residency.ensure_loaded(handle, GB)
    stage.host.management.load_models_gpu([rival])
    assert rival.resident and engine.is_loaded == partial_host() == (patcher_of(handle) in stage.host.listed())
    assert engine.loaded_bytes < 24 * GB
    assert stage.residency.ensure_loaded(handle, GB) is engine
    assert engine.loaded_bytes == 36 * GB and rival.resident == 0 and engine.loads == (1 if partial_host() else 2)


@check
def two_engines_take_turns():
    first, second = new_handle(), new_handle()
    CountingEngine.weights = 60 * GB
    a = stage.residency.ensure_loaded(first, GB)
    b = stage.residency.ensure_loaded(second, GB)
    assert b.loaded_bytes == 60 * GB and a.loaded_bytes < 18 * GB and a.is_loaded == partial_host()
    stage.residency.ensure_loaded(first, GB)
    assert a.loaded_bytes == 60 * GB and b.loaded_bytes < 18 * GB and b.is_loaded == partial_host()


@check
def small_rivals_may_stay():
    rival = stage.host.rival(10 * GB)
    stage.host.management.load_models_gpu([rival])
    stage.residency.ensure_loaded(new_handle(), GB)
    assert rival.resident


@check
def working_memory_pushes_a_rival_out():
    handle, rival = new_handle(), stage.host.rival(10 * GB)
    stage.residency.ensure_loaded(handle, GB)
    stage.host.management.load_models_gpu([rival])
    assert rival.resident
    engine = stage.residency.ensure_loaded(handle, 40 * GB)
    assert rival.resident == 0 and engine.is_loaded and engine.loads == 1


@check
def caches_go_before_weights():
    handle, rival = new_handle(), stage.host.rival(20 * GB)
    engine = stage.residency.ensure_loaded(handle, GB)
    engine.cached_bytes = CARD - 58 * GB  # a run left buffers, graphs and kept prompts
    if not partial_host():
        return  # the host of 2024 takes whole models only
    stage.host.management.load_models_gpu([rival])
    assert rival.resident and engine.is_loaded and engine.cached_bytes == 0 and engine.loads == 1 and engine.rows == 256


@check
def what_is_cached_is_not_asked_for_again():
    handle, rival = new_handle(), stage.host.rival(20 * GB)
    engine = stage.residency.ensure_loaded(handle, GB)
    stage.host.management.load_models_gpu([rival])
    engine.cached_bytes = cached = CARD - 59 * GB
    assert stage.residency.ensure_loaded(handle, cached) is engine
    assert rival.resident and engine.cached_bytes == cached


@check
def unload_all_models_releases_everything():
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    stage.host.management.unload_all_models()
    assert engine.loaded_bytes == 0 and stage.host.listed() == [] and stage.host.free() == CARD
    stage.residency.ensure_loaded(handle, GB)
    assert engine.is_loaded and engine.loads == 2


@check
def a_failed_load_leaves_nothing():
    handle = new_handle()
    engine = stage.residency.open_engine(handle)
    for failure in (RuntimeError("bad file"), MemoryError(), KeyboardInterrupt()):
        engine.fail_with = failure
        try:
            stage.residency.ensure_loaded(handle, GB)
        except BaseException as error:
            assert error is failure, error
        else:
            raise AssertionError("the failure was swallowed")
        assert engine.loaded_bytes == 0 and stage.host.listed() == []
    engine.fail_with = None
    assert stage.residency.ensure_loaded(handle, GB).is_loaded


@check
def cancel_while_loading_leaves_nothing():
    handle = new_handle()
    engine = stage.residency.open_engine(handle)
    stage.host.management.interrupt_current_processing(True)
    try:
        stage.residency.ensure_loaded(handle, GB)
    except stage.host.management.InterruptProcessingException:
        pass
    else:
        raise AssertionError("cancel had no effect")
    assert engine.loaded_bytes == 0 and stage.host.listed() == []
    assert stage.residency.ensure_loaded(handle, GB).is_loaded


@check
def weights_that_left_another_way_come_back():
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    engine.unload_weights()
    stage.residency.ensure_loaded(handle, GB)
    assert engine.is_loaded and engine.loads == 2 and stage.host.listed() == [patcher_of(handle)]


@check
def a_changed_checkpoint_is_opened_again():
    handle = new_handle()
    old = stage.residency.ensure_loaded(handle, GB)
    (Path(handle.path) / "config.json").write_text("{} ", encoding="utf-8")
    new = stage.residency.ensure_loaded(handle, GB)
    assert new is not old and new.is_loaded and old.loaded_bytes == 0
    assert stage.host.listed() == [patcher_of(handle)]


@check
def sizes_are_right():
    handle = new_handle()
    stage.residency.open_engine(handle)
    patcher = patcher_of(handle)
    assert (patcher.model_size(), patcher.loaded_size()) == (36 * GB, 0)
    assert patcher.current_loaded_device() == stage.host.torch.device("cpu")
    stage.residency.ensure_loaded(handle, GB)
    assert (patcher.model_size(), patcher.loaded_size()) == (36 * GB, 36 * GB)
    assert patcher.current_loaded_device() == stage.host.device
    assert list(patcher.model.parameters()) == [] and patcher.clone() is patcher
    assert isinstance(patcher, stage.host.patchers.ModelPatcher) and patcher.is_clone(patcher)


@check
def detach_keeps_or_releases_and_never_raises():
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    patcher = patcher_of(handle)
    current = hasattr(patcher, "detach")
    leave = patcher.detach if current else patcher.unpatch_model
    flag = "unpatch_all" if current else "unpatch_weights"
    leave(**{flag: False})
    assert engine.is_loaded
    engine.fail_unload = True
    leave(**{flag: True})
    assert engine.loaded_bytes == 0


@check
def housekeeping_calls_leave_us_alone():
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    stage.host.management.cleanup_models()
    for name in ("cleanup_models_gc", "reset_cast_buffers"):
        getattr(stage.host.management, name, lambda: None)()
    assert engine.is_loaded and stage.host.listed() == [patcher_of(handle)]


@check
def another_card_than_the_main_one():
    handle, rival = new_handle(device="cuda:1"), stage.host.rival(70 * GB)
    second = stage.host.torch.device("cuda", 1)
    stage.host.management.load_models_gpu([rival])
    engine = stage.residency.ensure_loaded(handle, GB)
    assert patcher_of(handle).load_device == second and engine.options["device"] == "cuda:1"
    assert engine.loaded_bytes == 36 * GB and rival.resident, "what is on one card does not matter to the other"
    stage.host.management.unload_all_models()  # the buttons of these hosts empty the main card; newer ones go through all cards:
    assert engine.is_loaded and rival.resident == 0
    stage.host.management.free_memory(1e30, second)
    assert engine.loaded_bytes == 0 and stage.host.listed() == []


@check
def everything_works_on_the_cpu():
    stage.host.device = stage.host.torch.device("cpu")
    stage.host.management.cpu_state = stage.host.management.CPUState.CPU
    stage.host.management.vram_state = stage.host.management.VRAMState.DISABLED
    handle = new_handle()
    engine = stage.residency.ensure_loaded(handle, GB)
    stage.residency.ensure_loaded(handle, GB)
    assert engine.is_loaded and engine.loads == 1 and stage.host.listed() == [patcher_of(handle)]
    stage.host.management.unload_all_models()
    assert engine.loaded_bytes == 0 and stage.host.listed() == []
    assert stage.residency.ensure_loaded(handle, GB).loads == 2


def main():
    if sys.argv[1] == "LIST":
        print(json.dumps(list(CHECKS)))
        return
    root, wanted = sys.argv[1], sys.argv[2:]
    stage.host = Host(root)
    stage.residency = load_residency()
    device, reserved = stage.host.device, reserve()
    for name in wanted or CHECKS:
        report = {"check": name, "ok": True}
        try:
            CHECKS[name]()
        except BaseException:
            report = {"check": name, "ok": False, "error": traceback.format_exc()}
        print(json.dumps(report), flush=True)
        stage.host.management.DISABLE_SMART_MEMORY = False
        stage.host.management.unload_all_models()
        stage.host.management.current_loaded_models.clear()
        stage.residency._residents.clear()
        stage.host.rivals.clear()
        CountingEngine.made.clear()
        CountingEngine.weights = 36 * GB
        stage.host.device, stage.host.card = device, CARD
        if hasattr(stage.host.management, "EXTRA_RESERVED_VRAM"):
            stage.host.management.EXTRA_RESERVED_VRAM = reserved
        stage.host.management.cpu_state = stage.host.management.CPUState.GPU
        stage.host.management.vram_state = stage.host.management.VRAMState.NORMAL_VRAM


if __name__ == "__main__":
    main()
