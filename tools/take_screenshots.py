"""Takes the README's picture and the example workflows' pictures from the real front end.

    python tools/take_screenshots.py [NAME ...]      (default: all; needs Chromium, selenium and Pillow)

Starts ComfyUI with the pack as the browser tests do (the current one where there is one), once a language, opens each
canvas file on the bundled pictures and photographs the canvas: after a run, where the bundled model can give the answer.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for entry in (ROOT, ROOT / "tests" / "host", ROOT / "tests" / "browser"):
    sys.path.insert(0, str(entry))

FOLDER = ROOT / "example_workflows"
README_PICTURE = ROOT / "assets" / "workflow.jpg"  # of comic_script in English
README_WIDTH, WIDTH = 2400, 1600  # pixels
MOST_BYTES, QUALITIES = 280_000, (88, 84, 80, 75, 70, 60)
# In this order: redraw_saved_script opens what comic_script saved. The others want the real model, or an image model.
RUN_FIRST = ("comic_script", "redraw_saved_script", "describe_picture")
CHECKPOINT = "sd_xl_base_1.0.safetensors"  # an empty file of this name, so that the list knows it
PAD = 10
SETTINGS = {"Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasMenu": False, "Comfy.Graph.CanvasInfo": False}

CLEAR_PAGE = """
const focus = app.extensionManager?.command;
if (focus && !app.extensionManager.focusMode) return focus.execute('Workspace.ToggleFocusMode');
"""
SHOW_AT_FULL_SIZE = """
app.canvas.ds.scale = 1;
app.canvas.ds.offset = [arguments[0], arguments[0]];
app.canvas.deselectAllNodes();
app.canvas.draw(true, true);
const box = app.canvas.canvas.getBoundingClientRect();
return [box.left, box.top];
"""


def picture_size(canvas: dict) -> tuple[int, int]:
    """Width and height of what the groups enclose."""
    boxes = [group["bounding"] for group in canvas["groups"]]
    return max(x + width for x, _, width, _ in boxes) + 2 * PAD, max(y + height for _, y, _, height in boxes) + 2 * PAD


def with_pictures(canvas: dict, names: list[str]) -> dict:
    """The workflow with the bundled pictures in its Load Image nodes, one after the other."""
    loaders = [node for node in canvas["nodes"] if node["type"] == "LoadImage"]
    for node, name in zip(loaders, names):
        node["widgets_values"][0] = name
    return canvas


def photograph(page, server, canvas: dict, copy: Path, run: bool):
    """The whole canvas as a Pillow picture."""
    from PIL import Image

    from page import until
    from tools.runner.client import run_error

    width, height = picture_size(canvas)
    copy.write_text(json.dumps(canvas, ensure_ascii=False), encoding="utf-8")
    page.driver.set_window_size(width + 200, height + 300)
    page.load_file(copy)
    page.driver.execute_script(CLEAR_PAGE)
    if run:
        before = set(server.client.get("/history"))
        page.driver.execute_script("app.queuePrompt(0, 1)")
        new = until(lambda: set(server.client.get("/history")) - before, 300, "the run ends")
        problem = run_error(server.client.history(new.pop()))
        assert not problem, problem
        time.sleep(3)  # pictures and texts arrive on the nodes, messages at the page's edge leave
    for _ in range(2):  # text boxes follow the canvas a moment later
        left, top = page.driver.execute_script(SHOW_AT_FULL_SIZE, PAD)
        time.sleep(1)
    shot = copy.with_suffix(".png")
    page.screenshot(shot)
    return Image.open(shot).convert("RGB").crop((round(left), round(top), round(left) + width, round(top) + height))


def save(picture, path: Path, width: int) -> None:
    from PIL import Image

    small = picture.resize((width, round(picture.height * width / picture.width)), Image.LANCZOS)
    for quality in QUALITIES:
        small.save(path, quality=quality, optimize=True)
        if path.stat().st_size <= MOST_BYTES:
            break
    print(f"{path.relative_to(ROOT)}: {small.width}x{small.height}, {path.stat().st_size // 1000} kB")


def main(names: list[str]) -> None:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    from comfy_server import CANVAS_SETTINGS
    from conftest import FLAGS
    from hosts import available_hosts
    from page import ComfyPage
    from tools.runner.browser import find_browser
    from tools.runner.paths import ASSETS
    from tools.runner.server import ComfyServer
    from tools.workflows.description import LANGUAGES

    stems = [*RUN_FIRST, *sorted({path.name.split(".")[0] for path in FOLDER.glob("*.json")} - set(RUN_FIRST))]
    found = find_browser()
    for language in LANGUAGES:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "checkpoints").mkdir()
            (work / "checkpoints" / CHECKPOINT).write_bytes(b"")
            more_paths = work / "more_paths.yaml"
            more_paths.write_text(json.dumps({"shots": {"checkpoints": str(work / "checkpoints")}}), encoding="ascii")
            settings = work / "host" / "user" / "default" / "comfy.settings.json"
            settings.parent.mkdir(parents=True)
            settings.write_text(json.dumps({**json.loads(CANVAS_SETTINGS), **SETTINGS, "Comfy.Locale": language}), encoding="utf-8")
            options = webdriver.ChromeOptions()
            options.binary_location = found.program
            for flag in (*FLAGS, f"--user-data-dir={work / 'chromium'}"):
                options.add_argument(flag)
            server = ComfyServer(
                available_hosts()[-1], work / "host", flags=["--extra-model-paths-config", str(more_paths)]
            )
            driver = webdriver.Chrome(options=options, service=Service(found.driver))
            try:
                with server:
                    own, other = (server.client.upload_image(ASSETS / f"demo_picture.{name}.png") for name in sorted(LANGUAGES, key=language.__ne__))
                    page = ComfyPage(driver, server.url)
                    for stem in stems:
                        if names and stem not in names and stem != RUN_FIRST[0]:
                            continue
                        file = FOLDER / (f"{stem}.json" if language == LANGUAGES[0] else f"{stem}.{language}.json")
                        canvas = with_pictures(json.loads(file.read_text(encoding="utf-8")), [own, other])
                        picture = photograph(page, server, canvas, work / file.name, run=stem in RUN_FIRST)
                        save(picture, file.with_suffix(".jpg"), WIDTH)
                        if (stem, language) == (RUN_FIRST[0], LANGUAGES[0]):
                            save(picture, README_PICTURE, README_WIDTH)
            finally:
                driver.quit()


if __name__ == "__main__":
    main(sys.argv[1:])
