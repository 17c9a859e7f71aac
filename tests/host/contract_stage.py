"""What the residency contract is checked with: a pretended card, an engine that only counts bytes, models of other packs.

`stage` has the host whose `comfy.model_management` is driven, and the pack's own `nodes/residency.py`; `contract_residency.py`
sets the scene.
"""

import importlib
import sys
import tempfile
import types
from pathlib import Path

PACK = Path(__file__).resolve().parents[2]
GB = 10**9
CARD = 80 * GB
CHECKS = {}
stage = types.SimpleNamespace(host=None, residency=None)


def check(function):
    CHECKS[function.__name__] = function
    return function


class CountingEngine:
    """Stands in for a3b_engine.engine.Engine: sizes and load states without tensors. 4 GB that are always there and 256 rows of experts."""

    weights = 36 * GB
    rest, fewest = 4 * GB, 24
    made = []

    def __init__(self, folder, **options):
        self.folder, self.options, self.name, self.context = folder, options, "counting", options["context"]
        self.row = (self.weights - self.rest) // 256
        self.rows, self.is_loaded = 0, False
        self.loads, self.free_at_load, self.fail_with, self.fail_unload, self.fail_grow = 0, None, None, False, None
        self.cached_bytes = 0  # what runs left on the device beside the weights
        self.half = 0  # bytes of a load that goes on
        self.seeing_bytes = GB // 4
        self.experts_may_shrink, self.dtype, self.device = True, None, stage.host.torch.device(options["device"])
        self.parts = self.Parts(256 * self.row)
        CountingEngine.made.append(self)

    class Parts:
        """The experts' bytes, in this format and in smaller ones."""

        def __init__(self, experts):
            self.experts, self.weights = experts, self

        def with_experts(self, name):
            return CountingEngine.Parts(self.experts * {"int4": 17, "int3": 13}[name] // 32)

        def tier_bytes(self, dtype, dequantize):
            return {"experts": self.experts, "rest": CountingEngine.rest}

    @classmethod
    def open(cls, folder, **options):
        return cls(folder, **options)

    def size(self, rows):
        return self.rest + self.row * rows

    def most_rows(self):
        budget = self.options["vram_budget"]
        if budget is None:
            return 256
        return min(256, (budget - self.working_bytes(self.context) - self.rest) // self.row)

    weight_bytes = property(lambda self: self.size(256))
    most_bytes = property(lambda self: self.size(self.most_rows()))
    smallest_bytes = least_room = property(lambda self: self.size(self.fewest))
    least_bytes = property(lambda self: self.least_room + self.working_bytes(self.context))
    loaded_bytes = property(lambda self: self.size(self.rows) if self.is_loaded else self.half)

    def working_bytes(self, tokens):
        return tokens * 100_000

    def memory(self):
        outside = self.weight_bytes - self.loaded_bytes if self.is_loaded else 0
        return {"weights": self.loaded_bytes, "total": self.loaded_bytes + self.cached_bytes, "host_pinned": outside, "host_pageable": 0}

    def memory_report(self):
        return f"{self.rows} rows"

    def load_weights(self, progress=None, cancel=None, room=None):
        assert room >= self.least_room and not self.is_loaded
        self.loads += 1
        self.free_at_load = stage.host.free(self.device)
        self.half = self.rest
        progress(self.loaded_bytes, self.weight_bytes)
        cancel()
        if self.fail_with is not None:
            raise self.fail_with
        self.rows, self.is_loaded = min(self.most_rows(), int((room - self.rest) // self.row)), True

    def grow(self, room):
        if self.fail_grow is not None:
            raise self.fail_grow
        more = max(0, min(int(room // self.row), self.most_rows() - self.rows))
        self.rows += more
        return more * self.row

    def shrink(self, wanted):
        fewer = max(0, min(int(-(-wanted // self.row)), self.rows - self.fewest)) if self.is_loaded else 0
        self.rows -= fewer
        return fewer * self.row

    def release(self, wanted):
        freed, self.cached_bytes = self.cached_bytes, 0
        return freed + self.shrink(wanted - freed)

    def unload_weights(self):
        self.cached_bytes = self.half = self.rows = 0
        self.is_loaded = False
        if self.fail_unload:
            raise RuntimeError("driver says no")

    def close(self):
        self.unload_weights()


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
        self.rivals, self.card = [], CARD
        management.cpu_state = management.CPUState.GPU
        management.vram_state = management.VRAMState.NORMAL_VRAM
        management.get_torch_device = lambda: self.device
        management.get_free_memory = self._free_memory
        management.get_total_memory = lambda dev=None, torch_total_too=False: self.card
        management.soft_empty_cache = lambda *a, **k: None

    def free(self, device=None):
        device = device or self.device
        engines = sum(e.loaded_bytes + e.cached_bytes for e in CountingEngine.made if e.device == device)
        return self.card - engines - sum(r.resident for r in self.rivals if r.load_device == device)

    def _free_memory(self, dev=None, torch_free_too=False):
        return (self.free(dev), 0) if torch_free_too else self.free(dev)

    def listed(self):
        return [entry.model for entry in self.management.current_loaded_models]

    def rival(self, size, stays=False, dynamic=False):
        """Another pack's model, written to this host's own patcher interface. stays: what is unloaded stays on the card, as core
        models do under --highvram; dynamic: as core models are under dynamic VRAM, whose pages are taken one by one."""
        base, torch = self.patchers.ModelPatcher, self.torch

        class Rival(base):
            def __init__(self):
                self.resident = 0
                super().__init__(torch.nn.Module(), stage.host.device, torch.device("cpu"), size=size)

            def is_dynamic(self):
                return dynamic

            def _set(self, there):
                self.resident = size if there or stays else 0
                self.current_device = self.load_device if there else self.offload_device
                return self.model

            def loaded_size(self):
                return self.resident

            def current_loaded_device(self):
                return self.load_device if self.resident else self.offload_device

            def partially_load(self, *args, **kwargs):
                self._set(True)
                return size

            def partially_unload(self, device_to, memory_to_free=0, **kwargs):
                taken = min(self.resident, memory_to_free) if dynamic else 0
                self.resident -= taken
                return taken

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
    return stage.residency.ModelHandle(path=str(folder), device=str(device or stage.host.device), **options)


def partial_host():
    """ComfyUI since mid-2024 asks for parts of a model."""
    return hasattr(stage.host.patchers.ModelPatcher, "partially_load")


def reserve():
    return getattr(stage.host.management, "extra_reserved_memory", lambda: 0.4 * GB)()


def patcher_of(handle):
    return stage.residency._residents[handle].patcher
