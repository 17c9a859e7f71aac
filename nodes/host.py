"""What the nodes ask of ComfyUI: folders, devices, progress, cancel, streamed text.

With `residency.py` the only file that imports comfy, folder_paths or server, and only inside functions: the pack can
be imported and tested without ComfyUI.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..a3b_engine.errors import CheckpointError

log = logging.getLogger(__name__)

MODEL_FOLDER = "LLM"  # the folder key that packs share for language models; core has none
SEARCHED_KEYS = (MODEL_FOLDER, "text_encoders", "clip")  # "clip" is the 2024 name of text_encoders
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"
NOTHING_FOUND = "(no checkpoint found)"

TEXT_INTERVAL = 0.15  # seconds between two updates of the streamed text
TEXT_TAIL = 4000  # characters of the streamed text that are sent

RESERVE_2024 = 400 * 1024 * 1024  # bytes; that host has no figure of its own, later ones have this
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")


# -- folders ---------------------------------------------------------------------------------------------------------


def check_folder_name(name: str) -> None:
    """Warn where the pack's own folder bears a name that ComfyUI's addresses of templates and help pages do not carry.

    `name`: as it stands in custom_nodes. With a space, a dot, a letter outside ASCII and the like the nodes load, but their
    templates, pictures and help pages answer 404, and nothing else would say why.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        log.warning(
            "A3B: the pack's folder is named %a. With characters other than letters, digits, - and _ its templates and help pages may not "
            "open: rename the folder (a3b-comic-script) and restart ComfyUI",
            name,
        )


def register_model_folder() -> None:
    """Add `models/LLM` to ComfyUI's folders, beside whatever extra_model_paths.yaml has put there already."""
    try:
        import folder_paths
    except ImportError:
        return  # outside ComfyUI
    folder = os.path.join(folder_paths.models_dir, MODEL_FOLDER)
    known = folder_paths.folder_names_and_paths.get(MODEL_FOLDER, ([],))[0]
    if folder not in known:
        folder_paths.add_model_folder_path(MODEL_FOLDER, folder)


def checkpoint_roots() -> list[Path]:
    """The pack's demo_model/ first, then every registered root, in ComfyUI's order, each once."""
    import folder_paths

    roots = [DEMO_FOLDER]
    for key in SEARCHED_KEYS:
        if key in folder_paths.folder_names_and_paths:
            roots += [Path(folder) for folder in folder_paths.get_folder_paths(key)]
    return list(dict.fromkeys(roots))


def checkpoints() -> dict[str, Path]:
    """Names as the loader lists them (POSIX, relative to their root) -> folders. The first root wins a name."""
    from ..a3b_engine.checkpoint.discover import find_checkpoint_folders

    found: dict[str, Path] = {}
    for root in checkpoint_roots():
        if root.is_dir():
            for folder in find_checkpoint_folders(root):
                name = root.name if folder == root else folder.relative_to(root).as_posix()
                found.setdefault(name, folder)
    return found


def checkpoint_names() -> list[str]:
    return list(checkpoints()) or [NOTHING_FOUND]


def checkpoint_folder(name: str) -> Path:
    """The folder of a listed name. Backslashes of a workflow saved on Windows match; nothing is joined from `name`.

    Raises CheckpointError with what to do when the name is not in the list.
    """
    found = checkpoints()
    wanted = name.replace("\\", "/").strip().strip("/")
    if wanted in found:
        return found[wanted]
    alike = [folder for known, folder in found.items() if known.casefold() == wanted.casefold()]
    if len(alike) == 1:
        return alike[0]
    if found:
        raise CheckpointError(
            f"checkpoint: {name!r} is not among the folders found ({', '.join(found)}). Choose one of these, or put "
            f"the folder under {_searched()} and press R to refresh the list"
        )
    raise CheckpointError(
        f"checkpoint: no Qwen3.5-35B-A3B folder (config.json beside *.safetensors) was found under {_searched()}; "
        f"nothing is downloaded by itself (37.5 GB). To fetch the official FP8 files run:  {download_command()}"
    )


def _searched() -> str:
    """Where to put a checkpoint, for messages: models/LLM first, the pack's own demo_model last, two at most."""
    import folder_paths

    first = Path(folder_paths.models_dir) / MODEL_FOLDER
    roots = sorted(checkpoint_roots(), key=lambda root: (root != first, root == DEMO_FOLDER))
    return ", ".join([*map(str, roots[:2]), *(["..."] if len(roots) > 2 else [])])


def download_command() -> str:
    import folder_paths

    target = os.path.join(folder_paths.models_dir, MODEL_FOLDER, "Qwen3.5-35B-A3B-FP8")
    return f'hf download Qwen/Qwen3.5-35B-A3B-FP8 --local-dir "{target}"'


def output_folder() -> Path:
    """Where ComfyUI's nodes save."""
    import folder_paths

    return Path(folder_paths.get_output_directory())


def script_folders() -> dict[str, Path]:
    """Where scripts are read from, by the marks ComfyUI puts behind names ("page.json [output]"); the first needs none."""
    import folder_paths

    return {"input": Path(folder_paths.get_input_directory()), "output": output_folder()}


# -- devices ---------------------------------------------------------------------------------------------------------


def main_device() -> torch.device:
    """ComfyUI's own device; the CPU under --cpu."""
    import comfy.model_management as management

    return management.get_torch_device()


def _cuda_devices() -> list[str]:
    import comfy.model_management as management

    if management.cpu_state == management.CPUState.CPU:
        return []
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def device_names() -> list[str]:
    return ["auto", "cpu", *_cuda_devices()]


def resolve_device(choice: str) -> torch.device:
    """The device of a widget value. A card that is not there (any more) falls back to 'auto' with a warning."""
    if choice == "cpu":
        return torch.device("cpu")
    if choice in _cuda_devices():
        return torch.device(choice)
    main = main_device()
    if choice != "auto":
        log.warning("A3B: device %r is not present here (found: %s); using %s instead", choice, ", ".join(device_names()), main)
    return main


def is_device_name(choice: str) -> bool:
    """Whether it names a device of some machine: workflows travel, and `resolve_device` replaces a card that is not here."""
    kind, _, index = choice.partition(":")
    return choice in ("auto", "cpu") or kind == "cuda" and index.isdecimal()


# -- memory ----------------------------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int:
    """Bytes that ComfyUI counts as free there; of RAM for the CPU."""
    import comfy.model_management as management

    return int(management.get_free_memory(device))


def total_memory(device: torch.device) -> int:
    import comfy.model_management as management

    return int(management.get_total_memory(device))


def reserved_memory(device: torch.device) -> int:
    """Bytes that models shall leave alone on a card: --reserve-vram, else ComfyUI's own reserve."""
    import comfy.model_management as management

    if device.type == "cpu":
        return 0
    return int(getattr(management, "extra_reserved_memory", lambda: RESERVE_2024)())


def keeps_models_off_the_device() -> bool:
    """ComfyUI was started with --novram."""
    import comfy.model_management as management

    return management.vram_state == management.VRAMState.NO_VRAM


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or in RAM."""
    import comfy.model_management as management

    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or getattr(management, "is_oom", lambda _: False)(error):
        return True
    # Triton, cuBLAS and the CPU allocator raise plain RuntimeErrors.
    return isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in OUT_OF_MEMORY)


def unload_models(device: torch.device) -> None:
    """Have ComfyUI take every model off that device, as it does itself after an out-of-memory error."""
    import comfy.model_management as management

    management.free_memory(1e30, device)
    management.soft_empty_cache()


# -- progress, cancel, text ------------------------------------------------------------------------------------------


def check_interrupt() -> bool:
    """Raises ComfyUI's interrupt exception when the user pressed cancel; otherwise False ("do not stop")."""
    import comfy.model_management as management

    management.throw_exception_if_processing_interrupted()
    return False


def loading_progress() -> Callable[[int, int], None]:
    """A `progress(done_bytes, total_bytes)` that drives a bar on the running node; raises on cancel."""
    import comfy.utils

    bar = comfy.utils.ProgressBar(1)

    def report(done: int, total: int) -> None:
        check_interrupt()
        bar.update_absolute(done, max(total, 1))

    return report


class TokenProgress:
    """`on_token` of a generation: one step of the bar per token, and the text so far where the host can show it."""

    def __init__(self, limit: int):
        import comfy.utils

        self._bar = comfy.utils.ProgressBar(limit)
        self._send = _text_sender()
        self._text = ""
        self._thinking = False
        self._sent_at = 0.0

    def __call__(self, event) -> None:
        """`event`: a3b_engine TokenEvent."""
        check_interrupt()
        self._bar.update_absolute(event.count, event.limit)
        if self._thinking and not event.thinking:
            self._text = ""  # the reasoning was worth watching; the answer stands alone
        self._thinking = event.thinking
        self._text = (self._text + event.text)[-TEXT_TAIL:]
        if self._send is not None and time.monotonic() - self._sent_at >= TEXT_INTERVAL:
            self._send(self._text)
            self._sent_at = time.monotonic()

    def finish(self, text: str) -> None:
        """Show the final text, whatever the last update left out."""
        if self._send is not None:
            self._send(text[-TEXT_TAIL:])


def _text_sender() -> Callable[[str], None] | None:
    """Sends text to the running node in the browser that queued it; None where the host has no such message (2024)."""
    try:
        from comfy_execution.utils import get_executing_context
        from server import PromptServer
    except ImportError:
        return None
    server = getattr(PromptServer, "instance", None)
    context = get_executing_context()
    # Without a client id the text would go to every open browser.
    if context is None or not hasattr(server, "send_progress_text") or server.client_id is None:
        return None
    return lambda text: server.send_progress_text(text, context.node_id, sid=server.client_id)
