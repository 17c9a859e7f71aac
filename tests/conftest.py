"""What every suite shares: the repository root on sys.path, and the pack loaded as ComfyUI loads it."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# ComfyUI names the module after the folder: no identifier, and no parent package
PACK_MODULE = "custom_nodes/a3b-comic-script"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pack():
    """The pack's root module, imported by path under a name of ComfyUI's making (once a session)."""
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
