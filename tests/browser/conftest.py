"""A headless Chromium, and a real ComfyUI per host for it to open."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

from comfy_server import CANVAS_SETTINGS, make_server  # noqa: E402
from hosts import available_hosts  # noqa: E402
from tools.runner.browser import HOW_TO_GET, find_browser  # noqa: E402
from tools.runner.suites import in_ci  # noqa: E402

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--window-size=1900,1200",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    found = find_browser()
    if found is None:
        (pytest.fail if in_ci() else pytest.skip)(HOW_TO_GET)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = found.program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found.driver))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="session", params=available_hosts(), ids=lambda host: host.name)
def server(request, tmp_path_factory):
    work = tmp_path_factory.mktemp(f"browser-{request.param.name}")
    settings = work / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(CANVAS_SETTINGS, encoding="utf-8")
    with make_server(request.param, work) as running:
        yield running
