"""The pack imported by path under a name of ComfyUI's making, as ComfyUI does it; once a process."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# ComfyUI names the module after the folder: no identifier, and no parent package
PACK_MODULE = "custom_nodes/a3b-comic-script"


def load_pack():
    """The pack's root module."""
    if PACK_MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK_MODULE, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK_MODULE] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[PACK_MODULE]
            raise
    return sys.modules[PACK_MODULE]
