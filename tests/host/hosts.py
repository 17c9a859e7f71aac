"""The ComfyUIs these tests run on: the one of 2024 from PyPI always, a current one where there is one."""

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.runner import environment, hosts, paths  # noqa: E402


@functools.cache
def available_hosts() -> tuple[hosts.Host, ...]:
    """Fetched and ready to start; `run.py test` has usually done the work already."""
    own = environment.venv_python(paths.VENV)
    python = own if own.is_file() else Path(sys.executable)
    current = hosts.current_host()
    return (hosts.ensure_2024_host(python), *([current] if current else []))
