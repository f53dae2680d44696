"""The compose file: nothing listens beyond loopback, nothing is forgotten or dropped."""

import runpy
from pathlib import Path

import pytest
import yaml

DOCKER = Path(__file__).resolve().parent.parent / "docker"


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def test_every_published_port_is_bound_to_loopback(services):
    ports = [port for service in services.values() for port in service["ports"]]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not any("network_mode" in service for service in services.values())


def test_the_queue_keeps_an_append_only_file_on_a_named_volume_and_evicts_nothing(services):
    queue = services["queue"]
    command = queue["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert queue["volumes"] == ["queue-data:/data"]
    assert queue["healthcheck"]["test"][-1] == "ping"


def test_images_and_packages_are_pinned(services):
    assert services["queue"]["image"].partition(":")[2][0].isdigit()
    dockerfile = (DOCKER / services["dashboard"]["build"]["dockerfile"]).read_text()
    [install] = [line for line in dockerfile.splitlines() if "pip install" in line]
    packages = [word for word in install.split() if word.startswith('"')]
    assert len(packages) == 3
    assert all("==" in package for package in packages)


def test_importing_the_dashboard_wrapper_changes_nothing():
    from rq.serializers import resolve_serializer

    before = resolve_serializer(None)
    runpy.run_path(str(DOCKER / "dashboard.py"))
    assert resolve_serializer(None) is before
