"""The nodes inside a real ComfyUI on a real card: `A3B_COMFYUI=~/ComfyUI pytest -c tests/pytest.ini tests/gpu/test_comfyui_gpu.py`.

Wants a free card with 34 GB and takes four minutes. ComfyUI runs with its own flags and its own allocator; the residency checks stand in
`comfyui_pack/`, the workflow is the example on the bundled model.
"""

import os
import re
import time

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False here"),
    pytest.mark.skipif("A3B_COMFYUI" not in os.environ, reason="needs a ComfyUI: its folder in the environment variable A3B_COMFYUI"),
]

from comfyui_servers import DEMO, FLAGS, Servers, on_card, run_check  # noqa: E402  (puts tests/host on the path)

from comfy_server import PICTURE, cached_nodes, saved_images, succeeded, watch, witnessed  # noqa: E402
from tools.runner.workflow import Workflow  # noqa: E402

PANELS = 3
MB = 10**6
LOADED = re.compile(r"\bLoaded " + re.escape(DEMO) + r" on cuda:0")
MEMORY = {"memory": 1}
WARNING = "A3B: --disable-smart-memory makes ComfyUI unload"
BOTH = pytest.mark.parametrize("server", ["dynamic", "classic"], indirect=True)


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    started = Servers(tmp_path_factory.mktemp("comfyui"), list(FLAGS))
    yield started
    started.stop()


@pytest.fixture
def server(servers, request):
    return servers.ready(request.param)


def passes(server, check, rounds):
    report = run_check(server, check, rounds)
    assert not report["failures"], "\n".join([*report["failures"], str(report["facts"])])


@BOTH
def test_mode_is_what_the_flags_say(server):
    log = server.log_text()
    assert ("DynamicVRAM support detected and enabled" in log) == ("--disable-dynamic-vram" not in server.flags), log[-3000:]
    assert re.search(r"Device: cuda:0 NVIDIA .* : (cudaMallocAsync|native)", log), log[-3000:]


@BOTH
def test_taking_turns_with_another_model(server):
    passes(server, "alternate", 10)


def demo_workflow(server, seed):
    workflow = Workflow.load()
    workflow.set("LoadImage", image=server.client.upload_image(PICTURE))
    workflow.set("A3BGenerate", format="short comic script", panels=PANELS, rounds=1, seed=seed)
    workflow.set("A3BParsePanels", panel_count=PANELS)
    assert workflow.inputs("A3BLoadModel")["checkpoint"] == DEMO
    return watch(workflow, "A3BLoadModel", MEMORY)


def loads(server):
    return len(LOADED.findall(server.log_text()))


def settles(server, below, seconds=15):
    """Bytes of tensors, once they are fewer than that or time is up: what takes models away is answered before it is done."""
    deadline = time.monotonic() + seconds
    while (found := on_card(server)) >= below and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@BOTH
def test_the_example_runs_on_the_card_and_stays_there(server):
    already, left = loads(server), []
    for turn in range(2):
        for seed in (10 * turn + 1, 10 * turn + 2, 10 * turn + 3):
            workflow = demo_workflow(server, seed)
            entry = succeeded(server, workflow, 100)
            assert len(saved_images(entry)) == PANELS and all(server.client.view(image)[:4] == b"\x89PNG" for image in saved_images(entry))
            assert workflow.node("A3BGenerate") not in cached_nodes(entry)
            assert loads(server) == already + 1 + turn
        assert "cuda:0" in witnessed(entry, MEMORY)["memory"][0]
        held = on_card(server)
        server.client.free()
        left.append(settles(server, held - 20 * MB))
        assert left[-1] < held - 20 * MB, (left, held)
    assert left[1] <= left[0] + MB, ("more stays with every turn", left)


@BOTH
def test_a_failed_allocation_is_told_and_the_next_run_works(server):
    passes(server, "out_of_memory", 1)


@pytest.mark.parametrize("server, check", [("reserve", "reserve"), ("highvram", "high"), ("novram", "none")], indirect=["server"])
def test_flags(server, check):
    passes(server, check, 2)


@pytest.mark.parametrize("server", ["lowvram"], indirect=True)
def test_lowvram_is_like_no_flag(server):
    passes(server, "alternate", 2)


@pytest.mark.parametrize("server", ["not-smart"], indirect=True)
def test_without_smart_memory_every_run_reads_the_model_and_the_log_warns_once(server):
    passes(server, "not_smart", 2)
    before = on_card(server)
    for seed in (1, 2):
        succeeded(server, demo_workflow(server, seed), 100)
        assert loads(server) == seed
        # What CUDA's libraries took on the way stays; the model and what it worked with do not.
        assert settles(server, before + 100 * MB, 5) < before + 100 * MB
    assert server.log_text().count(WARNING) == 1
