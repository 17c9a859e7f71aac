"""A Chromium with its driver for the browser tests: found, or installed where the system allows it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from .console import RunnerError, run_logged, say
from .paths import LOGS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVERS = ("chromedriver", "chromium.chromedriver")
HOW_TO_GET = "no Chromium with chromedriver on this machine (Debian: apt install chromium chromium-driver)"


@dataclass(frozen=True)
class Browser:
    program: str
    driver: str


def find_browser() -> Browser | None:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = next(filter(None, map(shutil.which, DRIVERS)), None)
    return Browser(program, driver) if program and driver else None


def ensure_browser(verbose: bool = False) -> Browser | None:
    """The browser, installed with apt-get where there is one and this is root; None where none can be had."""
    found = find_browser()
    if found or not shutil.which("apt-get") or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return found
    say("Installing Chromium for the browser tests (apt-get) ...")
    log = LOGS / "apt.log"
    try:
        run_logged(["apt-get", "update"], log, what="apt-get update", verbose=verbose)
        run_logged(
            ["apt-get", "install", "--yes", "--no-install-recommends", "chromium", "chromium-driver"],
            log,
            what="installing Chromium",
            verbose=verbose,
        )
    except RunnerError as error:
        say(f"{error}; the log: {log}")
    return find_browser()
