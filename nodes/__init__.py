"""The ComfyUI side of the pack: thin nodes over `a3b_engine`."""

from pathlib import Path

from . import host
from .build_prompt import A3BBuildPrompt
from .edit_script import A3BEditScript
from .encode_image import A3BEncodeImage
from .generate import A3BGenerate
from .load_model import A3BLoadModel
from .load_script import A3BLoadScript
from .parse_panels import A3BParsePanels
from .pick_panel import A3BPickPanel
from .save_script import A3BSaveScript

NODES = (
    A3BLoadModel,
    A3BEncodeImage,
    A3BBuildPrompt,
    A3BGenerate,
    A3BParsePanels,
    A3BPickPanel,
    A3BEditScript,
    A3BSaveScript,
    A3BLoadScript,
)

NODE_CLASS_MAPPINGS = {node.NODE_ID: node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS = {node.NODE_ID: node.TITLE for node in NODES}

# Other packs and extra_model_paths.yaml share the same folder key, so it is announced as soon as the pack is there.
host.register_model_folder()
host.check_folder_name(Path(__file__).parent.parent.name)  # not resolved: ComfyUI goes by the name of a link, too
