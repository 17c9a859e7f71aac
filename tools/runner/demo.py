"""`run.py demo`: the comic workflow on the bundled pictures and stories, in a real ComfyUI."""

from __future__ import annotations

import argparse
import time
import uuid
from pathlib import Path

from .client import ComfyClient, run_error
from .console import USAGE, RunnerError, say, tail
from .environment import HOST_REQUIREMENTS, REQUIREMENTS, ensure_requirements, ensure_venv
from .hosts import Host, ensure_2024_host, own_host
from .panels import print_panels, read_panels
from .paths import ASSETS, DEMO_MODEL, PACK_NAME, WORK
from .server import ComfyServer, port_is_free
from .websocket import WebSocket
from .workflow import Workflow

LANGUAGES = {"en": "English", "zh": "Chinese"}
BROWSER_PORT = 8188  # where people look for a ComfyUI
BUNDLED_NOTE = (
    "Model: the bundled demonstration model (22 million parameters). It knows the drawn world that the demo's pictures "
    "come from, and nothing else; --model DIR runs the demo on a real checkpoint."
)
NODES = ("A3BLoadModel", "A3BEncodeImage", "A3BBuildPrompt", "A3BGenerate", "A3BParsePanels")


def run_demo(options: argparse.Namespace) -> int:
    check_options(options)
    host = choose_host(options)
    bundled = options.model is None
    model = DEMO_MODEL if bundled else options.model.expanduser().resolve()
    port = options.port or (BROWSER_PORT if options.serve and port_is_free(BROWSER_PORT) else 0)
    server = ComfyServer(
        host,
        WORK / "demo",
        port=port,
        gpu=options.gpu,
        models=[] if bundled else [model],
    )
    say(f"Starting ComfyUI ({host.folder}) on the {'GPU' if options.gpu else 'CPU'} ...")
    with server:
        try:
            require_nodes(server)
            if bundled:
                say(BUNDLED_NOTE)
            begin = time.monotonic()
            for language in LANGUAGES if options.lang == "both" else (options.lang,):
                run_workflow(server, model.name, language)
            say(f"\nAll together: {time.monotonic() - begin:.1f} s. Log: {server.log}")
        except (RunnerError, OSError) as error:
            raise RunnerError(str(error), details=tail(server.log), log=server.log) from error
        if options.serve:
            # the canvas workflow names the picture that every ComfyUI comes with
            server.client.upload_image(picture_of("zh" if options.lang == "zh" else "en"), "example.png")
            serve(server)
    return 0


def check_options(options: argparse.Namespace) -> None:
    if options.python and not options.comfyui:
        raise RunnerError("--python belongs to --comfyui: name the ComfyUI folder too", code=USAGE)
    if options.gpu and not options.comfyui:
        raise RunnerError("--gpu belongs to --comfyui: the demo's own ComfyUI runs on the CPU", code=USAGE)
    if not 0 <= options.port <= 65535:
        raise RunnerError(f"--port {options.port}: a port lies between 1 and 65535", code=USAGE)
    if options.model and not (options.model.expanduser() / "config.json").is_file():
        raise RunnerError(
            f"--model {options.model}: no config.json in there, so it is no checkpoint folder", code=USAGE
        )
    if options.model and not any(options.model.expanduser().glob("*.safetensors*")):
        raise RunnerError(f"--model {options.model}: no .safetensors files beside its config.json", code=USAGE)


def choose_host(options: argparse.Namespace) -> Host:
    """The ComfyUI to use."""
    if options.comfyui:
        return own_host(options.comfyui, options.python, verbose=options.verbose)
    python = ensure_venv(options.verbose)
    ensure_requirements(
        python,
        "demo",
        [REQUIREMENTS, HOST_REQUIREMENTS],
        why="PyTorch and what ComfyUI and the pack need",
        verbose=options.verbose,
    )
    return ensure_2024_host(python, options.verbose)


def require_nodes(server: ComfyServer) -> None:
    absent = [name for name in NODES if not server.client.object_info(name)]
    if absent:
        reasons = [
            line for line in server.log_text().splitlines() if line.startswith("Cannot import") and PACK_NAME in line
        ]
        why = reasons[0] if reasons else f"missing: {', '.join(absent)}"
        raise RunnerError(f"ComfyUI runs, but the pack did not load in it: {why}")


def checkpoint_choice(client: ComfyClient, name: str) -> str:
    """The loader's own spelling of a checkpoint folder's name."""
    field = client.object_info("A3BLoadModel")["A3BLoadModel"]["input"]["required"]["checkpoint"]
    choices = field[0] if isinstance(field[0], list) else field[1].get("options", [])
    for choice in choices:
        if choice.replace("\\", "/").split("/")[-1] == name:
            return choice
    raise RunnerError(
        f"the loader node does not list the checkpoint {name!r}; it lists: {', '.join(choices) or 'nothing'}"
    )


def picture_of(language: str) -> Path:
    return ASSETS / f"demo_picture.{language}.png"


def run_workflow(server: ComfyServer, model_name: str, language: str) -> None:
    client = server.client
    story, picture = ASSETS / f"demo_story.{language}.txt", picture_of(language)
    text = story.read_text(encoding="utf-8").strip()
    workflow = Workflow.load()
    workflow.set("A3BLoadModel", checkpoint=checkpoint_choice(client, model_name))
    workflow.set("LoadImage", image=client.upload_image(picture))
    workflow.set("A3BBuildPrompt", text=text + "\n[[IMG]]", language=LANGUAGES[language])
    say(f"\nPicture: {picture}\nStory:   {text}\nWriting the script ...")
    client_id, begin = uuid.uuid4().hex, time.monotonic()
    with client.events(client_id) as events:
        prompt_id = client.queue(workflow.graph, client_id)
        entry = follow(client, prompt_id, events, workflow.node("A3BGenerate"))
    problem = run_error(entry)
    if problem:
        raise RunnerError(f"the workflow failed: {problem}")
    say(f"Done in {time.monotonic() - begin:.1f} s.\n")
    print_panels(read_panels(server.host.python, entry, workflow))
    say("\nScript, as JSON and as a readable screenplay:")
    for name in "".join(entry["outputs"].get(workflow.node("A3BSaveScript"), {}).get("text", [])).splitlines():
        say(f"  {server.work / 'output' / name}")
    say("Pictures (the reference picture cut to each panel's size and tinted; no image model is used):")
    for image in [image for outputs in entry["outputs"].values() for image in outputs.get("images", [])]:
        say(f"  {server.work / image['type'] / image['subfolder'] / image['filename']}")


def follow(client: ComfyClient, prompt_id: str, events: WebSocket, generate: str) -> dict:
    """Wait for the run's end; every five seconds a line about the tokens written."""
    shown = time.monotonic()
    while (entry := client.history(prompt_id)) is None:
        message = events.receive(0.5)
        if not isinstance(message, dict) or message.get("type") != "progress":
            continue
        data = message["data"]
        if data.get("node") == generate and time.monotonic() - shown > 5:
            say(f"  {data['value']} tokens so far ...")
            shown = time.monotonic()
    return entry


def serve(server: ComfyServer) -> None:
    """Keep the server until Ctrl-C; RunnerError when it ends by itself."""
    say(
        f"\nComfyUI is running: {server.url}   (this machine only; Ctrl-C stops it)\n"
        "Drag example_workflows/comic_script.json into the page; the demo's picture is there already, as example.png."
    )
    while server.process.poll() is None:
        time.sleep(0.5)
    raise RunnerError(
        f"ComfyUI ended by itself (exit code {server.process.returncode})", details=tail(server.log), log=server.log
    )
