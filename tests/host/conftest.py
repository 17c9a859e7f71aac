"""One real ComfyUI per host and session."""

import pytest

from comfy_server import make_server
from hosts import available_hosts


@pytest.fixture(scope="session", params=available_hosts(), ids=lambda host: host.name)
def host(request):
    return request.param


@pytest.fixture(scope="session")
def server(host, tmp_path_factory):
    with make_server(host, tmp_path_factory.mktemp(f"comfy-{host.name}")) as running:
        yield running
