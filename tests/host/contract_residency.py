"""Drives a real `comfy.model_management` with a pretended 80 GB card and an engine that only counts bytes.

Run by test_residency_contract.py inside a host's own interpreter (comfy reads sys.argv when it is imported):
    python contract_residency.py HOST_ROOT CHECK
Prints one JSON object: {"check": ..., "ok": true} or {"ok": false, "error": traceback}. `LIST` prints the names.
"""

import importlib
import json
import sys
import tempfile
import traceback
import types
from pathlib import Path

PACK = Path(__file__).resolve().parents[2]
GB = 10**9
CARD = 80 * GB
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


class CountingEngine:
    """Stands in for a3b_engine.engine.Engine: sizes and load states without tensors."""

    weights = 36 * GB
    made = []

    def __init__(self, folder, **options):
        self.folder, self.options, self.name = folder, options, "counting"
        self.weight_bytes, self.loaded_bytes, self.is_loaded = self.weights, 0, False
        self.loads, self.free_at_load, self.fail_with, self.fail_unload = 0, None, None, False
        self.cached_bytes = 0  # what runs left on the device beside the weights
        CountingEngine.made.append(self)

    @classmethod
    def open(cls, folder, **options):
        return cls(folder, **options)

    def load_weights(self, progress=None, cancel=None):
        self.loads += 1
        self.free_at_load = HOST.free()
        self.loaded_bytes = self.weight_bytes // 2
        progress(self.loaded_bytes, self.weight_bytes)
        cancel()
        if self.fail_with is not None:
            raise self.fail_with
        self.loaded_bytes, self.is_loaded = self.weight_bytes, True

    def release_caches(self, wanted=None):
        freed, self.cached_bytes = self.cached_bytes, 0
        return freed

    def unload_weights(self):
        self.loaded_bytes, self.cached_bytes, self.is_loaded = 0, 0, False
        if self.fail_unload:
            raise RuntimeError("driver says no")

    close = unload_weights


class Host:
    """comfy.model_management with its device replaced; nothing else of it is changed."""

    def __init__(self, root):
        sys.path.insert(0, root)
        sys.argv = ["main.py", "--cpu"]  # import without a GPU; the state is set to "GPU present" below
        import comfy.options
        import torch

        comfy.options.enable_args_parsing()
        import comfy.model_management as management
        import comfy.model_patcher as patchers

        self.torch, self.management, self.patchers = torch, management, patchers
        self.device = torch.device("cuda", 0)
        self.rivals = []
        management.cpu_state = management.CPUState.GPU
        management.vram_state = management.VRAMState.NORMAL_VRAM
        management.get_torch_device = lambda: self.device
        management.get_free_memory = self._free_memory
        management.soft_empty_cache = lambda *a, **k: None

    def free(self):
        return CARD - sum(e.loaded_bytes + e.cached_bytes for e in CountingEngine.made) - sum(r.resident for r in self.rivals)

    def _free_memory(self, dev=None, torch_free_too=False):
        return (self.free(), 0) if torch_free_too else self.free()

    def listed(self):
        return [entry.model for entry in self.management.current_loaded_models]

    def rival(self, size):
        """Another pack's model, written to this host's own patcher interface."""
        base, torch = self.patchers.ModelPatcher, self.torch

        class Rival(base):
            def __init__(self):
                self.resident = 0
                super().__init__(torch.nn.Module(), HOST.device, torch.device("cpu"), size=size)

            def _set(self, there):
                self.resident = size if there else 0
                self.current_device = self.load_device if there else self.offload_device
                return self.model

            def loaded_size(self):
                return self.resident

            def current_loaded_device(self):
                return self.load_device if self.resident else self.offload_device

            def partially_load(self, *args, **kwargs):
                self._set(True)
                return size

            def partially_unload(self, *args, **kwargs):
                return 0

            def detach(self, unpatch_all=True):
                return self._set(False) if unpatch_all else self.model

            def patch_model(self, device_to=None, patch_weights=True):
                return self._set(True)

            def unpatch_model(self, device_to=None, unpatch_weights=True):
                if unpatch_weights:
                    self._set(False)

        rival = Rival()
        self.rivals.append(rival)
        return rival


def load_residency():
    """nodes/residency.py with the engine replaced; the rest of the pack (and its packages) is not needed here."""
    for name, folder in (("a3bpack", PACK), ("a3bpack.nodes", PACK / "nodes")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    engine = types.ModuleType("a3bpack.a3b_engine.engine")
    engine.Engine = CountingEngine
    sys.modules[engine.__name__] = engine
    return importlib.import_module("a3bpack.nodes.residency")


def new_handle(device=None, **options):
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return RESIDENCY.ModelHandle(path=str(folder), device=str(device or HOST.device), **options)


def patcher_of(handle):
    return RESIDENCY._residents[handle].patcher


@check
def opening_loads_nothing():
    engine = RESIDENCY.open_engine(new_handle())
    assert engine.loads == 0 and HOST.listed() == []


@check
def room_is_made_before_weights_arrive():
    rival = HOST.rival(50 * GB)
    HOST.management.load_models_gpu([rival])
    engine = RESIDENCY.ensure_loaded(new_handle(), 5 * GB)
    assert rival.resident == 0
    assert engine.free_at_load >= engine.weight_bytes + 5 * GB
    assert engine.is_loaded and HOST.listed() == [patcher_of(next(iter(RESIDENCY._residents)))]


@check
def resident_weights_stay_between_runs():
    handle = new_handle()
    for _ in range(3):
        engine = RESIDENCY.ensure_loaded(handle, GB)
    assert engine.loads == 1 and engine.is_loaded
    assert HOST.listed() == [patcher_of(handle)]


@check
def equal_options_share_one_engine():
    handle = new_handle()
    twin = RESIDENCY.ModelHandle(path=handle.path, device=handle.device)
    assert RESIDENCY.ensure_loaded(handle, GB) is RESIDENCY.ensure_loaded(twin, GB)
    other = RESIDENCY.ModelHandle(path=handle.path, device=handle.device, context=4096)
    assert RESIDENCY.open_engine(other) is not RESIDENCY.open_engine(handle)


@check
def a_rival_takes_the_room_and_we_come_back():
    handle, rival = new_handle(), HOST.rival(50 * GB)
    engine = RESIDENCY.ensure_loaded(handle, GB)
    HOST.management.load_models_gpu([rival])
    assert not engine.is_loaded and rival.resident and patcher_of(handle) not in HOST.listed()
    assert RESIDENCY.ensure_loaded(handle, GB) is engine
    assert engine.is_loaded and engine.loads == 2 and rival.resident == 0


@check
def two_engines_take_turns():
    first, second = new_handle(), new_handle()
    CountingEngine.weights = 60 * GB
    a = RESIDENCY.ensure_loaded(first, GB)
    b = RESIDENCY.ensure_loaded(second, GB)
    assert b.is_loaded and not a.is_loaded
    RESIDENCY.ensure_loaded(first, GB)
    assert a.is_loaded and not b.is_loaded


@check
def small_rivals_may_stay():
    rival = HOST.rival(10 * GB)
    HOST.management.load_models_gpu([rival])
    RESIDENCY.ensure_loaded(new_handle(), GB)
    assert rival.resident


@check
def working_memory_pushes_a_rival_out():
    handle, rival = new_handle(), HOST.rival(10 * GB)
    RESIDENCY.ensure_loaded(handle, GB)
    HOST.management.load_models_gpu([rival])
    assert rival.resident
    engine = RESIDENCY.ensure_loaded(handle, 40 * GB)
    assert rival.resident == 0 and engine.is_loaded and engine.loads == 1


@check
def caches_go_before_weights():
    handle, rival = new_handle(), HOST.rival(20 * GB)
    engine = RESIDENCY.ensure_loaded(handle, GB)
    engine.cached_bytes = CARD - 58 * GB  # a run left buffers, graphs and kept prompts
    if not hasattr(patcher_of(handle), "partially_unload"):
        return  # the host of 2024 takes whole models only
    HOST.management.load_models_gpu([rival])
    assert rival.resident and engine.is_loaded and engine.cached_bytes == 0 and engine.loads == 1


@check
def what_is_cached_is_not_asked_for_again():
    handle, rival = new_handle(), HOST.rival(20 * GB)
    engine = RESIDENCY.ensure_loaded(handle, GB)
    HOST.management.load_models_gpu([rival])
    engine.cached_bytes = cached = CARD - 59 * GB
    assert RESIDENCY.ensure_loaded(handle, cached) is engine
    assert rival.resident and engine.cached_bytes == cached


@check
def unload_all_models_releases_everything():
    handle = new_handle()
    engine = RESIDENCY.ensure_loaded(handle, GB)
    HOST.management.unload_all_models()
    assert engine.loaded_bytes == 0 and HOST.listed() == [] and HOST.free() == CARD
    RESIDENCY.ensure_loaded(handle, GB)
    assert engine.is_loaded and engine.loads == 2


@check
def a_failed_load_leaves_nothing():
    handle = new_handle()
    engine = RESIDENCY.open_engine(handle)
    for failure in (RuntimeError("bad file"), MemoryError(), KeyboardInterrupt()):
        engine.fail_with = failure
        try:
            RESIDENCY.ensure_loaded(handle, GB)
        except BaseException as error:
            assert error is failure, error
        else:
            raise AssertionError("the failure was swallowed")
        assert engine.loaded_bytes == 0 and HOST.listed() == []
    engine.fail_with = None
    assert RESIDENCY.ensure_loaded(handle, GB).is_loaded


@check
def cancel_while_loading_leaves_nothing():
    handle = new_handle()
    engine = RESIDENCY.open_engine(handle)
    HOST.management.interrupt_current_processing(True)
    try:
        RESIDENCY.ensure_loaded(handle, GB)
    except HOST.management.InterruptProcessingException:
        pass
    else:
        raise AssertionError("cancel had no effect")
    assert engine.loaded_bytes == 0 and HOST.listed() == []
    assert RESIDENCY.ensure_loaded(handle, GB).is_loaded


@check
def too_large_is_refused_with_numbers():
    from a3bpack.a3b_engine.errors import MemoryBudgetError

    CountingEngine.weights = 90 * GB
    handle = new_handle()
    try:
        RESIDENCY.ensure_loaded(handle, GB)
    except MemoryBudgetError as error:
        assert "90.0 GB" in str(error) and "80.0 GB" in str(error), error
    else:
        raise AssertionError("90 GB went on an 80 GB card")
    assert RESIDENCY.open_engine(handle).loads == 0 and HOST.listed() == []


@check
def weights_that_left_another_way_come_back():
    handle = new_handle()
    engine = RESIDENCY.ensure_loaded(handle, GB)
    engine.unload_weights()
    RESIDENCY.ensure_loaded(handle, GB)
    assert engine.is_loaded and engine.loads == 2 and HOST.listed() == [patcher_of(handle)]


@check
def a_changed_checkpoint_is_opened_again():
    handle = new_handle()
    old = RESIDENCY.ensure_loaded(handle, GB)
    (Path(handle.path) / "config.json").write_text("{} ", encoding="utf-8")
    new = RESIDENCY.ensure_loaded(handle, GB)
    assert new is not old and new.is_loaded and old.loaded_bytes == 0
    assert HOST.listed() == [patcher_of(handle)]


@check
def sizes_are_right():
    handle = new_handle()
    RESIDENCY.open_engine(handle)
    patcher = patcher_of(handle)
    assert (patcher.model_size(), patcher.loaded_size()) == (36 * GB, 0)
    assert patcher.current_loaded_device() == HOST.torch.device("cpu")
    RESIDENCY.ensure_loaded(handle, GB)
    assert (patcher.model_size(), patcher.loaded_size()) == (36 * GB, 36 * GB)
    assert patcher.current_loaded_device() == HOST.device
    assert list(patcher.model.parameters()) == [] and patcher.clone() is patcher
    assert isinstance(patcher, HOST.patchers.ModelPatcher) and patcher.is_clone(patcher)


@check
def detach_keeps_or_releases_and_never_raises():
    handle = new_handle()
    engine = RESIDENCY.ensure_loaded(handle, GB)
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
    engine = RESIDENCY.ensure_loaded(handle, GB)
    HOST.management.cleanup_models()
    for name in ("cleanup_models_gc", "reset_cast_buffers"):
        getattr(HOST.management, name, lambda: None)()
    assert engine.is_loaded and HOST.listed() == [patcher_of(handle)]


@check
def another_card_than_the_main_one():
    handle = new_handle(device="cuda:1")
    engine = RESIDENCY.ensure_loaded(handle, GB)
    assert patcher_of(handle).load_device == HOST.torch.device("cuda", 1)
    assert engine.options["device"] == "cuda:1" and engine.is_loaded


@check
def everything_works_on_the_cpu():
    HOST.device = HOST.torch.device("cpu")
    HOST.management.cpu_state = HOST.management.CPUState.CPU
    HOST.management.vram_state = HOST.management.VRAMState.DISABLED
    handle = new_handle()
    engine = RESIDENCY.ensure_loaded(handle, GB)
    RESIDENCY.ensure_loaded(handle, GB)
    assert engine.is_loaded and engine.loads == 1 and HOST.listed() == [patcher_of(handle)]
    HOST.management.unload_all_models()
    assert engine.loaded_bytes == 0 and HOST.listed() == []
    assert RESIDENCY.ensure_loaded(handle, GB).loads == 2


def main():
    global HOST, RESIDENCY
    if sys.argv[1] == "LIST":
        print(json.dumps(list(CHECKS)))
        return
    root, wanted = sys.argv[1], sys.argv[2:]
    HOST = Host(root)
    RESIDENCY = load_residency()
    device = HOST.device
    for name in wanted or CHECKS:
        report = {"check": name, "ok": True}
        try:
            CHECKS[name]()
        except BaseException:
            report = {"check": name, "ok": False, "error": traceback.format_exc()}
        print(json.dumps(report), flush=True)
        HOST.management.unload_all_models()
        HOST.management.current_loaded_models.clear()
        RESIDENCY._residents.clear()
        HOST.rivals.clear()
        CountingEngine.made.clear()
        CountingEngine.weights = 36 * GB
        HOST.device = device
        HOST.management.cpu_state = HOST.management.CPUState.GPU
        HOST.management.vram_state = HOST.management.VRAMState.NORMAL_VRAM


if __name__ == "__main__":
    main()
