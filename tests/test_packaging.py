"""The published files; and `pip install stoker` and `from stoker import Producer` never load the heavy side."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"shared": "stoker_shared", "producer": "stoker", "worker": "stoker_worker"}
EXPERIMENTS = "stoker_worker/experiments"
"""In the wheel, for `stoker-worker figures`."""

HEAVY = {
    *("mlx", "mlx-lm", "mlx-cpu", "mlx-metal", "transformers", "tokenizers", "numpy", "torch", "safetensors"),
    *("rich", "prometheus-client", "pyarrow", "flask", "rq-dashboard"),
}


def core_dependencies(distribution: str, seen: set[str]) -> set[str]:
    """The names that `distribution` needs without extras, at all levels. Other platforms' markers count too."""
    for requirement in requires(distribution) or []:
        spec, _, marker = requirement.partition(";")
        name = re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~\[(@]", spec.strip())[0]).lower()
        if "extra ==" in marker or name in seen:
            continue
        seen.add(name)
        try:
            core_dependencies(name, seen)
        except PackageNotFoundError:  # for another platform or Python
            continue
    return seen


def test_the_core_install_needs_nothing_heavy():
    names = core_dependencies("stoker", set())
    assert {"rq", "redis", "pydantic", "pydantic-core", "click"} <= names
    assert not names & HEAVY
    assert any("mlx-lm" in line and "worker" in line.partition(";")[2] for line in requires("stoker") or [])


def test_importing_the_producer_and_the_command_loads_nothing_heavy():
    code = "import sys, stoker; print(*sys.modules); import stoker.cli; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    of_library, loaded = (set(line.split()) for line in output.splitlines())
    assert not of_library & {"click", "flask", "stoker.batch", "stoker.cli"}
    loaded = {name.partition(".")[0] for name in loaded}
    assert "rq" in loaded
    assert not loaded & {*(name.replace("-", "_") for name in HEAVY), "stoker_worker"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def packed(built: Path) -> set[str]:
    """The files of the sdist, relative to its one folder."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def modules_of_the_checkout(folder: str, package: str) -> set[str]:
    """Also the scripts that run in Redis."""
    files = (ROOT / folder / package).rglob("*.*")
    return {path.relative_to(ROOT / folder).as_posix() for path in files if path.suffix in (".py", ".lua")}


def test_the_wheel_has_the_modules_the_templates_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = set().union(*(modules_of_the_checkout(*source) for source in SOURCES.items()))
    templates = ROOT / "producer" / "stoker" / "dashboard" / "templates"
    shown = {path.relative_to(ROOT / "producer").as_posix() for path in templates.rglob("*.*")}
    texts = {f"{package}/py.typed" for package in SOURCES.values()} | {f"{EXPERIMENTS}/prompt_texts.json"}
    scripts = {f"{EXPERIMENTS}/{path.name}" for path in (ROOT / "experiments").glob("*.py")}
    assert names == modules | shown | texts | {script for script in scripts if "/lm_eval" not in script}


@pytest.mark.mlx
def test_the_wheel_alone_measures_a_machine(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "wheel")
    command = [sys.executable, "-m", "stoker_worker", "figures", "--only", "machine", "--model", "owner/model"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "wheel")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = tmp_path / "stoker-figures" / "figures.json"
    content = json.loads(results.read_text())
    assert [part["status"] for part in content["parts"]] == ["done"]
    assert content["source"]["commit"] is None
    assert results.with_suffix(".md").exists()


def test_the_sdist_has_the_sources_the_pages_and_no_tests(packed: set[str]):
    folders = {name.partition("/")[0] for name in packed if "/" in name}
    assert folders == {*SOURCES, "docs", "docker", "experiments"}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= packed
    for folder, package in SOURCES.items():
        assert {f"{folder}/{module}" for module in modules_of_the_checkout(folder, package)} <= packed
