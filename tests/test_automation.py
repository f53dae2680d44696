"""The commands of continuous integration and the commit hooks exist, and cover the promises of `pyproject.toml`."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def jobs() -> dict[str, dict]:
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def test_every_command_of_a_job_exists_in_the_checkout(jobs):
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    lines = [*commands, *(ROOT / ".ci" / "run").read_text().splitlines()]
    made = [target for line in lines if line.startswith("make ") for target in line.split()[1:] if "=" not in target]
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert {"lint", "types", "test", "demo"} <= set(made)
    assert set(made) <= targets


def test_no_job_runs_for_ever(jobs):
    assert all(job["timeout-minutes"] <= 180 for job in jobs.values())


def test_linux_runs_every_python_from_the_oldest_allowed(jobs):
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert versions == [f"3.{minor}" for minor in range(11, 11 + len(versions))]
    assert len(versions) >= 4


def test_a_mac_runs_the_tests_and_the_demo(jobs):
    assert all(name.startswith("macos-") for name in jobs["macos"]["strategy"]["matrix"]["os"])
    commands = [step["run"] for step in jobs["macos"]["steps"] if "run" in step]
    assert {"make demo", "make test"} <= set(commands)


def test_the_commit_hooks_run_tools_that_the_environment_has():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    installed = {re.split(r"[<>=\[ ]", line)[0] for line in PROJECT["optional-dependencies"]["dev"]}
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "mypy"}
    assert {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks} <= installed


def test_every_target_is_phony_or_a_file_of_the_environment():
    phony = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert targets == phony
