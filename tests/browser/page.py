"""A ComfyUI page as a person uses it: open it, load a workflow file, press Run, look at the nodes."""

import json
import time
from pathlib import Path

from selenium.webdriver.common.by import By

# the button of the current front end, then the one of 2024
RUN_BUTTONS = ("button[data-testid='queue-button']", "#queue-button")

NODES = """
return app.graph._nodes.map(node => ({
    id: String(node.id), type: node.type, title: node.title, known: node.type in LiteGraph.registered_node_types,
    inputs: (node.inputs || []).map(slot => slot.name), outputs: (node.outputs || []).map(slot => slot.name),
    widgets: (node.widgets || []).map(widget => widget.name),
    x: node.pos[0], y: node.pos[1], width: node.size[0], height: node.size[1],
    pictures: (node.imgs || []).length, wrong: !!node.has_errors,
}));"""

LINKS = """
const links = app.graph.links;
return [...(links instanceof Map ? links.values() : Object.values(links))].map(link => ({
    from: String(link.origin_id), output: app.graph.getNodeById(link.origin_id)?.outputs[link.origin_slot]?.name,
    to: String(link.target_id), input: app.graph.getNodeById(link.target_id)?.inputs[link.target_slot]?.name,
}));"""

SET_WIDGET = """
const node = app.graph._nodes.find(node => node.type === arguments[0]);
const widget = node.widgets.find(widget => widget.name === arguments[1]);
widget.value = arguments[2];
if (widget.callback) widget.callback(widget.value);
"""

SHOW_ALL = """
const nodes = app.graph._nodes;
const left = Math.min(...nodes.map(n => n.pos[0])), top = Math.min(...nodes.map(n => n.pos[1])) - 40;
const right = Math.max(...nodes.map(n => n.pos[0] + n.size[0]));
const low = Math.max(...nodes.map(n => n.pos[1] + n.size[1]));
const scale = Math.min((innerWidth - 100) / (right - left), (innerHeight - 120) / (low - top), 1);
app.canvas.ds.scale = scale;
app.canvas.ds.offset = [80 / scale - left, 60 / scale - top];  // beside the side bar of the current front end
app.canvas.setDirty(true, true);
"""

TO_API = """
const done = arguments[arguments.length - 1];
app.graphToPrompt().then(made => done(made.output), error => done({error: String(error)}));
"""


CONNECTED = """
const done = arguments[arguments.length - 1];
import(new URL('/scripts/api.js', location.href)).then(made => done(!!made.api.clientId), () => done(false));
"""


def until(check, seconds: float, what: str):
    """The first true value of `check()`; AssertionError after that time."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)
    return value


class ComfyPage:
    def __init__(self, driver, url: str):
        self.driver = driver
        driver.get(url)
        until(
            lambda: driver.execute_script("return !!(window.app && window.app.canvas && window.LiteGraph)"),
            60,
            "the page starts",
        )
        until(
            lambda: driver.execute_script("return 'A3BGenerate' in LiteGraph.registered_node_types"),
            60,
            "the page knows the pack's nodes",
        )
        # the current front end opens a workflow of its own at last, over whatever was loaded before
        opened = "return !app.extensionManager || !!app.extensionManager.workflow?.activeWorkflow"
        until(lambda: driver.execute_script(opened), 60, "the page has opened its first workflow")
        # a run that is queued before the server has named the page reports its results to nobody
        until(lambda: driver.execute_async_script(CONNECTED), 60, "the page is connected")

    def load_file(self, path) -> None:
        """The Load button's file chooser."""
        wanted = len(json.loads(Path(path).read_text(encoding="utf-8"))["nodes"])
        self.driver.execute_script("app.graph.clear()")
        self.driver.find_element(By.ID, "comfy-file-input").send_keys(str(path))
        until(lambda: len(self.nodes()) == wanted, 60, "the workflow opens")
        self.driver.execute_script(SHOW_ALL)  # a node out of sight is not drawn, and loads no pictures

    def nodes(self) -> list:
        return self.driver.execute_script(NODES)

    def links(self) -> list:
        return self.driver.execute_script(LINKS)

    def set_widget(self, node_type: str, name: str, value) -> None:
        self.driver.execute_script(SET_WIDGET, node_type, name, value)

    def as_api(self) -> dict:
        """The workflow in API form, as the page would queue it."""
        return self.driver.execute_async_script(TO_API)

    def press_run(self) -> None:
        for selector in RUN_BUTTONS:
            shown = [button for button in self.driver.find_elements(By.CSS_SELECTOR, selector) if button.is_displayed()]
            if shown:
                shown[0].click()
                return
        raise AssertionError("the page shows no run button")

    def errors(self) -> list:
        """What the browser's console says at its worst level since the last call, about the pack's own files."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and "/extensions/a3b" in entry["message"]
        ]

    def screenshot(self, path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))
