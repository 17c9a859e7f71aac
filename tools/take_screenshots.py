"""Takes the README's picture and the example workflows' thumbnails from the real front end.

    python tools/take_screenshots.py

Starts ComfyUI with the pack as the browser tests do (the current one where there is one), opens the canvas workflow on
the bundled picture, runs it and photographs the canvas. Needs Chromium, selenium and Pillow.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for entry in (ROOT, ROOT / "tests" / "host", ROOT / "tests" / "browser"):
    sys.path.insert(0, str(entry))

README_PICTURE = ROOT / "assets" / "workflow.jpg"
THUMBNAIL = ROOT / "example_workflows" / "comic_script.jpg"
TWINS = (THUMBNAIL.with_name("comic_script.zh.jpg"),)  # the same graph with other texts, too small to read here
WINDOW = (3000, 1150)

# The nodes are moved to where neither the page's side bar nor its title bar covers them.
SIDE, TOP = 80, 50
CANVAS_ONLY = """
const nodes = app.graph._nodes;
const left = Math.min(...nodes.map(n => n.pos[0])) - 20, top = Math.min(...nodes.map(n => n.pos[1])) - 80;
const right = Math.max(...nodes.map(n => n.pos[0] + n.size[0])) + 20;
const low = Math.max(...nodes.map(n => n.pos[1] + n.size[1])) + 20;
const box = app.canvas.canvas.getBoundingClientRect();
const [side, above] = arguments;
const scale = Math.min((box.width - side) / (right - left), (box.height - above) / (low - top));
app.canvas.ds.scale = scale;
app.canvas.ds.offset = [side / scale - left, above / scale - top];
app.canvas.deselectAllNodes();
app.canvas.draw(true, true);
return [box.left + side, box.top + above, (right - left) * scale, (low - top) * scale];
"""


def main() -> None:
    from PIL import Image
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    from comfy_server import CANVAS_SETTINGS, DEMO_MODEL, PICTURE, make_server
    from conftest import FLAGS
    from hosts import available_hosts
    from page import ComfyPage, until
    from tools.runner.browser import find_browser

    host = available_hosts()[-1]
    found = find_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = found.program
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for flag in (*FLAGS, f"--window-size={WINDOW[0]},{WINDOW[1]}", f"--user-data-dir={work / 'chromium'}"):
            options.add_argument(flag)
        settings = work / "host" / "user" / "default" / "comfy.settings.json"
        settings.parent.mkdir(parents=True)
        settings.write_text(CANVAS_SETTINGS, encoding="utf-8")
        driver = webdriver.Chrome(options=options, service=Service(found.driver))
        try:
            with make_server(host, work / "host") as server:
                picture = server.client.upload_image(PICTURE)
                page = ComfyPage(driver, server.url)
                # The front end marks a picture that is not there as missing, so the file names ours from the start.
                canvas = (ROOT / "example_workflows" / "comic_script.json").read_text(encoding="utf-8")
                copy = work / "comic_script.json"
                copy.write_text(canvas.replace("example.png", picture), encoding="utf-8")
                page.load_file(copy)
                for name, field, value in (
                    ("A3BLoadModel", "checkpoint", DEMO_MODEL.name),
                    ("A3BGenerate", "format", "short comic script"),
                ):
                    page.set_widget(name, field, value)
                page.press_run()
                until(lambda: any(node["type"] == "SaveImage" and node["pictures"] for node in page.nodes()), 300, "the result")
                box = driver.execute_script(CANVAS_ONLY, SIDE, TOP)
                until(lambda: driver.execute_script("return document.readyState === 'complete'"), 30, "the page is drawn")
                driver.execute_script(CANVAS_ONLY, SIDE, TOP)
                shot = work / "shot.png"
                page.screenshot(shot)
        finally:
            driver.quit()
        left, top, width, height = (round(value) for value in box)
        picture = Image.open(shot).convert("RGB").crop((left, top, left + width, top + height))
    picture.save(README_PICTURE, quality=85, optimize=True)
    picture.resize((picture.width // 3, picture.height // 3), Image.LANCZOS).save(THUMBNAIL, quality=85, optimize=True)
    for twin in TWINS:
        shutil.copyfile(THUMBNAIL, twin)


if __name__ == "__main__":
    main()
