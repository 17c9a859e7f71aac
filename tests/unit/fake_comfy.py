"""Stands in for ComfyUI and for the engine in the tests of `nodes/`; import the fixtures you use by name."""

import importlib
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from pack_loader import PACK_MODULE, load_pack


def part(dotted):
    """A module of the pack, e.g. part("nodes.host")."""
    load_pack()
    return importlib.import_module(f"{PACK_MODULE}.{dotted}")


class Interrupted(BaseException):
    pass


@dataclass
class Comfy:
    """What a test sees and sets of the fake ComfyUI."""

    models_dir: Path
    folders: dict
    cuda_cards: int = 0
    free: int = 10**12  # bytes, on every device
    total: int = 2 * 10**12
    interrupt: bool = False
    loaded: list = field(default_factory=list)  # patchers, newest first
    memory_requests: list = field(default_factory=list)
    bars: list = field(default_factory=list)  # (value, total) of every update
    texts: list = field(default_factory=list)  # (text, node id, client) of every send_progress_text

    def add_checkpoint(self, root, name):
        folder = Path(root) / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "qwen3_5_moe"}', encoding="utf-8")
        (folder / "model.safetensors").write_bytes(b"")
        return folder


def _modules(comfy):
    """name -> fake module; `comfy` (a Comfy) holds their state."""
    management = types.ModuleType("comfy.model_management")
    management.CPUState = types.SimpleNamespace(CPU="cpu", GPU="gpu")
    management.cpu_state = "cpu"
    management.VRAMState = types.SimpleNamespace(NO_VRAM="no", NORMAL_VRAM="normal")
    management.vram_state = "normal"
    management.DISABLE_SMART_MEMORY = False
    management.InterruptProcessingException = Interrupted
    management.get_torch_device = lambda: torch.device("cpu")
    management.get_free_memory = lambda device: comfy.free
    management.get_total_memory = lambda device: comfy.total
    management.OOM_EXCEPTION = torch.cuda.OutOfMemoryError
    management.current_loaded_models = []

    def throw():
        if comfy.interrupt:
            comfy.interrupt = False
            raise Interrupted

    def load_models_gpu(models, memory_required=0):
        comfy.memory_requests.append(memory_required)
        for patcher in models:
            patcher.partially_load(patcher.load_device, 1e32)
            comfy.loaded.insert(0, patcher)

    def free_memory(wanted, device):
        for patcher in [patcher for patcher in comfy.loaded if patcher.load_device == device]:
            comfy.loaded.remove(patcher)
            patcher.detach(True)

    management.free_memory = free_memory
    management.soft_empty_cache = lambda: None
    management.throw_exception_if_processing_interrupted = throw
    management.load_models_gpu = load_models_gpu

    class ModelPatcher:
        def __init__(self, model, load_device, offload_device, size=0):
            self.model, self.load_device, self.offload_device = model, load_device, offload_device

        def partially_load(self, *args, **kwargs):
            raise AssertionError("not overridden")

    class ProgressBar:
        def __init__(self, total):
            self.total = total

        def update_absolute(self, value, total=None):
            comfy.bars.append((value, total or self.total))

    class Server:
        client_id = "browser-1"

        def send_progress_text(self, text, node_id, sid=None):
            comfy.texts.append((text, node_id, sid))

    patchers = types.ModuleType("comfy.model_patcher")
    patchers.ModelPatcher = ModelPatcher
    utils = types.ModuleType("comfy.utils")
    utils.ProgressBar = ProgressBar
    top = types.ModuleType("comfy")
    top.model_management, top.model_patcher, top.utils = management, patchers, utils
    execution = types.ModuleType("comfy_execution")
    execution.utils = types.ModuleType("comfy_execution.utils")
    execution.utils.get_executing_context = lambda: types.SimpleNamespace(node_id="17", prompt_id="p")
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(instance=Server())
    folders = types.ModuleType("folder_paths")
    folders.models_dir = str(comfy.models_dir)
    folders.get_input_directory = lambda: str(comfy.models_dir.parent / "input")
    folders.get_output_directory = lambda: str(comfy.models_dir.parent / "output")
    folders.folder_names_and_paths = comfy.folders
    folders.get_folder_paths = lambda key: list(comfy.folders[key][0])
    folders.add_model_folder_path = lambda key, path: comfy.folders.setdefault(key, ([], set()))[0].append(path)
    return {
        "comfy": top,
        "comfy.model_management": management,
        "comfy.model_patcher": patchers,
        "comfy.utils": utils,
        "comfy_execution": execution,
        "comfy_execution.utils": execution.utils,
        "server": server,
        "folder_paths": folders,
    }


@pytest.fixture
def comfy(monkeypatch, tmp_path):
    models = tmp_path / "models"
    (models / "LLM").mkdir(parents=True)
    fake = Comfy(models, {"LLM": ([str(models / "LLM")], set())})
    for name, module in _modules(fake).items():
        monkeypatch.setitem(sys.modules, name, module)
    residency = part("nodes.residency")
    monkeypatch.setattr(part("nodes.host"), "DEMO_FOLDER", tmp_path / "demo_model")
    monkeypatch.setattr(residency, "_residents", {})
    return fake


class FakeEngine:
    """An engine that writes `script` (pairs of text and thinking flag), one entry a token."""

    weight_bytes = most_bytes = 5 * 10**9
    smallest_bytes = least_room = least_bytes = 10**9
    cached_bytes = 0
    seeing_bytes = 10**6
    experts_may_shrink = False
    context = 8192
    script = (("Hel", False), ("lo", False))
    before_token = staticmethod(lambda index: None)

    def __init__(self, folder, **options):
        self.folder, self.options, self.name = Path(folder), options, Path(folder).name
        self.is_loaded, self.loads, self.calls = False, 0, []

    @classmethod
    def open(cls, folder, **options):
        return cls(folder, **options)

    @property
    def loaded_bytes(self):
        return self.weight_bytes if self.is_loaded else 0

    def load_weights(self, progress=None, cancel=None, room=None):
        assert room >= self.least_room
        progress(1, 2)
        self.is_loaded, self.loads = True, self.loads + 1

    def unload_weights(self):
        self.is_loaded = False

    close = unload_weights

    def release(self, wanted):
        freed, self.cached_bytes = self.cached_bytes, 0
        return freed

    def memory(self):
        return {"weights": self.loaded_bytes, "total": self.loaded_bytes, "host_pinned": 0, "host_pageable": 0, "experts_on_device": 8}

    def memory_report(self):
        return "all there" if self.is_loaded else "not loaded"

    def working_bytes(self, tokens):
        return tokens * 1000

    def render(self, prompt, thinking=False):
        assert prompt.user or prompt.images
        return types.SimpleNamespace(text=prompt.user, token_ids=list(range(100)))

    def encode_image(self, rgb, size=384, fit="keep"):
        assert self.is_loaded
        self.calls.append(("encode", size, fit))
        features = torch.zeros(12, 8)
        return [types.SimpleNamespace(features=features, grid=(3, 4), n_tokens=12) for _ in rgb]

    def generate(self, prompt, sampling, *, schema=None, regex=None, thinking=False, on_token=None, cancel=None):
        assert self.is_loaded
        self.calls.append(("generate", prompt, sampling, schema, regex, thinking))
        answer = part("a3b_engine.runtime.answer")
        for index, (text, in_thinking) in enumerate(self.script):
            self.before_token(index)
            cancel()
            on_token(answer.TokenEvent(text, in_thinking, index + 1, sampling.max_new_tokens))
        texts = ["".join(text for text, flag in self.script if flag is wanted) for wanted in (False, True)]
        finished = bool(texts[0])
        return answer.Answer(
            text=texts[0],
            thinking=texts[1],
            finish_reason="stop" if finished else "length",
            usage=answer.Usage(100, 0, len(self.script), 0),
            timings=answer.Timings(0.1, 0.2, 0.1, 10.0),
            seed=sampling.seed,
            ended_thinking=finished,
        )


@pytest.fixture
def engine_class(monkeypatch):
    """A fresh FakeEngine class in place of the real one; set its attributes to script the run."""
    made = type("Engine", (FakeEngine,), {})
    monkeypatch.setattr(part("nodes.residency"), "Engine", made)
    return made
