"""The compose file: everything listens on loopback only, and the queue forgets and drops nothing."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from stoker.cli import cli

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
    [install] = [line for line in dockerfile(services).splitlines() if "pip install" in line]
    packages = [word for word in install.split() if word.startswith('"') and not word.startswith('"/src')]
    assert len(packages) == 3
    assert all("==" in package for package in packages)


def test_the_dashboard_image_copies_existing_files_and_starts_a_valid_command(services):
    lines = dockerfile(services).splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    context = DOCKER / services["dashboard"]["build"]["context"]
    assert all((context / source).exists() for sources in copied for source in sources)
    [command] = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD")]
    assert command[0] == "stoker"
    run = CliRunner().invoke(cli, [*command[1:], "--help"])
    assert run.exit_code == 0, run.output
    assert "--allow-remote" in command  # in a container, the published port is the one bound to loopback
    assert services["dashboard"]["ports"] == ["127.0.0.1:9181:9181"]


def dockerfile(services):
    build = services["dashboard"]["build"]
    return (DOCKER / build["context"] / build["dockerfile"]).read_text()
