"""What `pip install stoker` pulls, and what `from stoker import Producer` loads: never the worker's heavy side."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires

HEAVY = {
    "mlx",
    "mlx-lm",
    "mlx-cpu",
    "mlx-metal",
    "transformers",
    "tokenizers",
    "numpy",
    "torch",
    "safetensors",
    "rich",
    "flask",
    "rq-dashboard",
}


def core_dependencies(distribution: str, seen: set[str]) -> set[str]:
    """The names `distribution` needs without extras, through all levels. Other platforms' markers count too."""
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


def test_the_worker_extra_is_what_brings_mlx():
    worker = [line for line in requires("stoker") or [] if "worker" in line.partition(";")[2]]
    assert any(line.startswith("mlx-lm") for line in worker)


def test_importing_the_producer_and_the_command_loads_nothing_heavy():
    code = "import sys; from stoker import Producer; import stoker.cli; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in output.split()}
    assert "rq" in loaded
    assert not loaded & {*(name.replace("-", "_") for name in HEAVY), "stoker_worker"}


def test_importing_the_library_loads_nothing_of_the_commands():
    code = "import sys; import stoker; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"click", "flask", "stoker.batch", "stoker.cli"}
