"""What every suite shares: the repository root on sys.path, and the pack loaded as ComfyUI loads it."""

import sys
from pathlib import Path

import pytest
from pack_loader import ROOT, load_pack

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pack():
    """The pack's root module (`pack_loader.load_pack`)."""
    return load_pack()
