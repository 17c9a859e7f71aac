"""Node classes as a workflow file needs them: inputs in order, widget defaults, outputs.

Those of this pack are read from the classes themselves; core ones stand in a table.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK = "a3b_pack_for_workflows"
NOTE = "Note"  # text on the canvas; runs nothing, so the API form has none


@dataclass
class Kind:
    """A node class: its inputs in order ("SOCKET" types, or widgets with a default) and its outputs."""

    sockets: dict[str, str] = field(default_factory=dict)  # name -> type
    widgets: dict[str, tuple[str, object]] = field(default_factory=dict)  # name -> (type, default)
    outputs: list[tuple[str, str]] = field(default_factory=list)  # (name, type)
    lists: tuple[bool, ...] = ()  # of the outputs: True for a list, one item per run of what follows
    seeds: tuple[str, ...] = ()  # widgets that are followed by a control drop-down
    trailing: tuple = ()  # values of widgets that only the front end has

    def slot(self, output: str) -> int:
        return [name for name, _ in self.outputs].index(output)

    def input_type(self, name: str) -> str:
        return self.sockets[name] if name in self.sockets else self.widgets[name][0]


# Core nodes that exist with these inputs in ComfyUI of 2024 and of today.
CORE = {
    "LoadImage": Kind(widgets={"image": ("COMBO", "example.png")}, outputs=[("IMAGE", "IMAGE"), ("MASK", "MASK")], trailing=("image",)),
    "ImageScale": Kind(
        sockets={"image": "IMAGE"},
        widgets={"upscale_method": ("COMBO", "bicubic"), "width": ("INT", 512), "height": ("INT", 512), "crop": ("COMBO", "center")},
        outputs=[("IMAGE", "IMAGE")],
    ),
    "EmptyImage": Kind(
        widgets={"width": ("INT", 512), "height": ("INT", 512), "batch_size": ("INT", 1), "color": ("INT", 0)},
        outputs=[("IMAGE", "IMAGE")],
    ),
    "ImageBlend": Kind(
        sockets={"image1": "IMAGE", "image2": "IMAGE"},
        widgets={"blend_factor": ("FLOAT", 0.5), "blend_mode": ("COMBO", "normal")},
        outputs=[("IMAGE", "IMAGE")],
    ),
    "SaveImage": Kind(sockets={"images": "IMAGE"}, widgets={"filename_prefix": ("STRING", "ComfyUI")}),
    "PreviewImage": Kind(sockets={"images": "IMAGE"}),
    "CheckpointLoaderSimple": Kind(
        widgets={"ckpt_name": ("COMBO", "sd_xl_base_1.0.safetensors")},
        outputs=[("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE")],
    ),
    "CLIPTextEncode": Kind(sockets={"clip": "CLIP"}, widgets={"text": ("STRING", "")}, outputs=[("CONDITIONING", "CONDITIONING")]),
    "EmptyLatentImage": Kind(
        widgets={"width": ("INT", 512), "height": ("INT", 512), "batch_size": ("INT", 1)}, outputs=[("LATENT", "LATENT")]
    ),
    "KSampler": Kind(
        sockets={"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"},
        widgets={
            "seed": ("INT", 0),
            "steps": ("INT", 20),
            "cfg": ("FLOAT", 8.0),
            "sampler_name": ("COMBO", "euler"),
            "scheduler": ("COMBO", "normal"),
            "denoise": ("FLOAT", 1.0),
        },
        outputs=[("LATENT", "LATENT")],
        seeds=("seed",),
    ),
    "VAEDecode": Kind(sockets={"samples": "LATENT", "vae": "VAE"}, outputs=[("IMAGE", "IMAGE")]),
}  # fmt: skip


def pack_nodes() -> dict[str, type]:
    """The node classes of this pack, imported by path as ComfyUI does it."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
        sys.modules[PACK] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACK])
    return sys.modules[PACK].NODE_CLASS_MAPPINGS


def kind_of(node: type) -> Kind:
    kind = Kind(outputs=list(zip(node.RETURN_NAMES, node.RETURN_TYPES)), lists=node.OUTPUT_IS_LIST)
    for name, marker in node.MARKERS.items():
        if type(marker).__name__ == "Socket":
            kind.sockets[name] = marker.type()
        else:
            callable_list = callable(getattr(marker, "choices", None))
            value_type = "COMBO" if callable_list or isinstance(marker.type(), list) else marker.type()
            kind.widgets[name] = (value_type, node.DEFAULTS[name])
            if getattr(marker, "control", False):
                kind.seeds += (name,)
    return kind


@functools.cache
def kinds() -> dict[str, Kind]:
    """All classes that an example may use."""
    return {**CORE, **{name: kind_of(node) for name, node in pack_nodes().items()}}
