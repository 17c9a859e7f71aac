"""What the checks play with: an engine of made-up weights in the pack's own residency, and another model in ComfyUI's own patcher."""

import gc
import importlib
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from .card import Card

PACK = "a3b-comic-script"
SHAPE = {"layers": 4, "vision_depth": 2}  # of the published width: 5.5 GB, half of it experts
SIDE = 4096  # of the other model's square layers
CONTEXT = 2048
MB, GB = 10**6, 10**9

log = logging.getLogger(__name__)


class Stage:
    def __init__(self):
        import comfy.model_management as management

        self.management, self.began = management, time.perf_counter()
        self.card = Card(management)
        self.failures, self.facts = [], {}
        self.loads = 0
        self.unloads = []  # of every partially_unload: bytes asked for, bytes said to be freed, gain of the driver's figure, of ComfyUI's
        self.residency = next(module for name, module in list(sys.modules.items()) if name.endswith(f"{PACK}.nodes.residency"))
        engine = self._module("engine")
        self.prompt = self._module("prompt").Prompt(system="You draw comics. " * 10, user="A fox finds a lamp. " * 10)
        self.greedy = self._module("sampling").SamplingParams(temperature=0.0, max_new_tokens=32)
        self.picture = np.random.default_rng(1).integers(0, 256, (384, 384, 3), dtype=np.uint8)
        self.parts = self._module("bench.made_up").made_up_parts(self._module("bench.shape").ModelShape(**SHAPE))
        self._put_in_place(engine.Engine)
        self.facts |= {"allocator": torch.cuda.get_allocator_backend() if self.card.device.type == "cuda" else ""}
        self.facts |= {"whole": self.whole, "smallest": self.smallest}

    def _module(self, name):
        package = self.residency.__package__.rpartition(".")[0]
        return importlib.import_module(f"{package}.a3b_engine.{name}")

    def _put_in_place(self, engine_class):
        """Handles open engines of the made-up weights until `close`."""
        stage, parts = self, self.parts

        class MadeUpEngine:
            @staticmethod
            def open(_folder, **options):
                return engine_class.from_parts(parts, **options)

        weights = type(parts.weights)
        self._real = (self.residency.Engine, weights, weights.load)
        real_load = weights.load

        def counted(*args, **kwargs):
            stage.loads += 1
            return real_load(*args, **kwargs)

        weights.load, self.residency.Engine = counted, MadeUpEngine
        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "config.json").write_text("{}", encoding="utf-8")
        self.handle = self.residency.ModelHandle(path=self._folder.name, device=str(self.card.device), context=CONTEXT)
        self.engine = self.residency.open_engine(self.handle)
        self.patcher = self.residency._residents[self.handle].patcher
        real_unload = self.patcher.partially_unload

        def measured(device_to, memory_to_free=0, **kwargs):
            before = self.card.free(), self.card.free_for_comfyui()
            freed = real_unload(device_to, memory_to_free, **kwargs)
            gained = self.card.free() - before[0], self.card.free_for_comfyui() - before[1]
            self.unloads.append((int(memory_to_free), int(freed), *gained))
            return freed

        self.patcher.partially_unload = measured

    def close(self):
        """The process is as it was, for the next check."""
        self.engine.close()
        self.residency._strike_off(self.patcher)
        self.residency._residents.pop(self.handle, None)
        self.residency.Engine, weights, weights.load = self._real
        self._folder.cleanup()
        self.management.unload_all_models()
        self.card.grow_back()
        gc.collect()
        self.facts["seconds"] = round(time.perf_counter() - self.began, 1)

    # Reckoning

    whole = property(lambda self: self.engine.weight_bytes)
    smallest = property(lambda self: self.engine.smallest_bytes)

    @property
    def reserve(self):
        return int(self.management.extra_reserved_memory())

    @property
    def inference(self):
        """What ComfyUI wants free beside the weights of any model, its reserve included."""
        return int(self.management.minimum_inference_memory())

    @property
    def beside(self):
        """What is to be free beside our weights and any other's: ComfyUI's reserve, and what an answer or a picture takes."""
        return max(self.inference, self.reserve + self.engine.working_bytes(CONTEXT)) + self.engine.seeing_bytes

    @property
    def half(self):
        """Bytes of a part of our weights that is neither the whole nor the smallest."""
        return (self.whole + self.smallest) // 2

    def for_all_of_ours(self):
        """Bytes free on the card, before anything is loaded, with which nobody has to leave for our whole."""
        return int(1.1 * self.whole + self.beside + 0.4 * GB)

    def rival_size(self, free):
        """Bytes of a model for which a third of what we can give must leave a card with that many bytes for all models."""
        return (free - self.inference - (2 * self.whole + self.smallest) / 3) / 1.1

    # Saying

    def expect(self, true, *said):
        """Notes a failure and goes on: a card is rarely at hand, and a run shall tell all it can."""
        if not true:
            self.failures.append(" ".join(str(each) for each in said))

    def note(self, **facts):
        self.facts |= facts
        log.info("A3B-FACTS %s", facts)

    # Playing

    def use(self):
        """One use as the nodes have it: room asked for, a picture read, an answer written. Returns text and features."""
        with self.residency.loaded(self.handle, self.engine.working_bytes(CONTEXT)) as engine:
            assert engine is self.engine
            return self.answer()

    def answer(self):
        """The same from what is on the device as it is, no room asked for."""
        features = self.engine.encode_image(self.picture)[0].features.float()
        return self.engine.generate(self.prompt, self.greedy).text, features

    def same(self, answer, expected, when):
        self.expect(answer[0] == expected[0], when, "other greedy tokens:", repr(answer[0][:120]), "for", repr(expected[0][:120]))
        self.expect(torch.allclose(answer[1], expected[1], atol=0.02, rtol=0.02), when, "other features of the picture")

    def listed(self):
        return [entry.model for entry in self.management.current_loaded_models]

    def send_away(self, rival):
        """The rival leaves; we stay where we are."""
        ours = [entry for entry in self.management.current_loaded_models if entry.model is self.patcher]
        self.management.free_memory(1e30, self.card.device, keep_loaded=ours)
        self.expect(rival.loaded_size() == 0, "the rival did not leave:", rival.loaded_size())

    def rival(self, nbytes):
        """A model of core's kind: what `CoreModelPatcher` is in this mode, around layers whose weights ComfyUI may stream."""
        import comfy.model_patcher
        import comfy.ops

        count = max(1, int(nbytes) // (2 * SIDE * SIDE))
        layers = [comfy.ops.disable_weight_init.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16, device="cpu") for _ in range(count)]
        for layer in layers:
            layer.weight.requires_grad_(False).zero_()
        module = torch.nn.Sequential(*layers)
        self.management.archive_model_dtypes(module)
        offload = self.management.unet_offload_device()
        return comfy.model_patcher.CoreModelPatcher(module, load_device=self.card.device, offload_device=offload)

    def bring(self, rival):
        """ComfyUI loads the rival, which then computes: dynamic VRAM brings its layers only now."""
        import comfy.memory_management
        import comfy_aimdo.model_vbar

        self.management.load_models_gpu([rival])
        with torch.no_grad():
            rival.model(torch.ones((1, SIDE), dtype=torch.bfloat16, device=self.card.device))
        self.card.held()  # waits for it
        if comfy.memory_management.aimdo_enabled:  # as ComfyUI does after every node
            self.management.reset_cast_buffers()
            comfy_aimdo.model_vbar.vbars_reset_watermark_limits()
        return rival.loaded_size()
