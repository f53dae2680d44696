"""The files of docker/: what they open, keep and drop, and that each file, command, option and image in them is right.

No image is built here and no container runs.
"""

import json
import re
from pathlib import Path

import click
import pytest
import yaml

from stoker.cli import cli
from stoker_shared.environment import require_known_variables
from stoker_worker.cli.main import main
from stoker_worker.settings import read_settings

DOCKER = Path(__file__).resolve().parent.parent / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
BUILT = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


def test_every_published_port_is_bound_to_loopback():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not [service for service in SERVICES.values() if service.get("network_mode") == "host"]


def test_the_queue_keeps_an_append_only_file_on_a_named_volume_and_evicts_nothing():
    queue = SERVICES["queue"]
    command = queue["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert queue["volumes"] == ["queue-data:/data"]
    # A ping that is answered with LOADING or MISCONF is an exit code 0, without -e.
    assert queue["healthcheck"]["test"] == ["CMD", "valkey-cli", "-e", "ping"]


def test_what_is_mounted_or_read_exists():
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service.get("volumes", [])]
    files = [DOCKER / source for source, *_ in mounts if source.startswith(".")]
    assert files
    assert not [file for file in files if not file.exists()]
    assert {source for source, *_ in mounts if not source.startswith(".")} == set(COMPOSE["volumes"])
    ignored = (DOCKER.parent / ".gitignore").read_text().splitlines()
    assert f"docker/{COMPOSE['secrets']['tokens']['file']}" in ignored


def test_prometheus_scrapes_the_port_of_a_worker_in_a_container_and_reads_the_alerts():
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    mounted = {mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{file}" for file in config["rule_files"]} <= mounted
    job, redis = config["scrape_configs"]
    assert redis["static_configs"][0]["targets"] == ["redis-exporter:9121"]
    targets = [target for targets in job["static_configs"] for target in targets["targets"]]
    forwarder = SERVICES["worker-metrics"]
    listens, forwards = forwarder["command"]
    assert targets[1] == f"worker:{listens.split(':')[1].split(',')[0]}"
    assert f"STOKER_METRICS_PORT={forwards.rpartition(':')[2]}" in (DOCKER / "worker.Dockerfile").read_text()
    assert forwarder["network_mode"] == "service:worker"


def test_grafana_is_given_the_data_source_and_the_folder_of_the_dashboard():
    provisioning = DOCKER / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "stoker.yaml").read_text())["providers"]
    assert f"./grafana/stoker.json:{provider['options']['path']}/stoker.json:ro" in SERVICES["grafana"]["volumes"]
    assert json.loads((DOCKER / "grafana" / "stoker.json").read_text())["panels"]
    environment = SERVICES["grafana"]["environment"]  # nobody can log in with the well-known password
    assert (environment["GF_AUTH_BASIC_ENABLED"], environment["GF_AUTH_DISABLE_LOGIN_FORM"]) == ("false", "true")


def test_images_are_pinned():
    images = [service["image"] for service in SERVICES.values() if "image" in service]
    assert len(images) == 5
    assert all(re.fullmatch(r"[a-z0-9_/]+:v?\d[\d.]*", image) for image in images), images


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_small_pinned_and_not_run_as_root(file):
    text = file.read_text().replace("\\\n", " ")
    words = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    stages = [line for line in words if line[0] == "FROM"]
    assert len(stages) == 2  # what builds is not in the image
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+", line[1]) for line in stages)
    assert not [line for line in words if line[0] == "ADD"]
    [user] = [line[1] for line in words if line[0] == "USER"]
    assert user == "1000:1000"
    [install] = [line for line in text.splitlines() if "pip install" in line]
    assert "--no-cache-dir" in install
    packages = [word for word in install.split() if word.startswith('"') and not word.startswith('"/src')]
    assert packages
    assert all("==" in package for package in packages)
    for line in words:
        if line[0] == "COPY" and not line[1].startswith("--from"):
            assert all((DOCKER.parent / source).exists() for source in line[1:-1])
            assert all(
                f"!{source}" in (DOCKER.parent / ".dockerignore").read_text().splitlines() for source in line[1:-1]
            )


@pytest.mark.parametrize("name", BUILT)
def test_a_container_starts_a_valid_command(name, monkeypatch):
    service = BUILT[name]
    text = (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).read_text()
    [entry] = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in text.splitlines() if "ENTRYPOINT" in line]
    for variable, value in re.findall(r"(STOKER_\w+)=(\S+)", text):
        monkeypatch.setenv(variable, value)
    for variable in service.get("environment", {}):
        monkeypatch.setenv(variable, "x")
    require_known_variables()
    command: click.Command = {"stoker": cli, "stoker-worker": main}[entry[0]]
    words = [*entry[1:], *service.get("command", [])]
    while words and isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    context = command.make_context(name, words, resilient_parsing=False, obj=None)
    if name == "worker":
        assert read_settings(context.params).metrics_port == 9410
        return
    [published] = service["ports"]
    assert published == f"127.0.0.1:{context.params['port']}:{context.params['port']}"
    assert context.params["bind"] == "0.0.0.0"  # in a container, the published port is the one bound to loopback
