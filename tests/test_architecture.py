"""Who may import what. A forbidden import fails here by name, before it becomes a habit."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"stoker_shared": ROOT / "shared", "stoker": ROOT / "producer", "stoker_worker": ROOT / "worker"}

# Where operations meet a connection; the producer's other modules never do I/O.
EDGES = (
    *("stoker.producer.", "stoker.ticket.", "stoker.async_producer.", "stoker.async_ticket.", "stoker.agent_jobs."),
    *("stoker.shared_connection.", "stoker.batch.cli.", "stoker.batch.work.", "stoker.batch.feeding."),
    "stoker.batch.collecting.",
)
COMMANDS = (
    *("stoker.cli.", "stoker.agent_cli.", "stoker.queue_commands.", "stoker.submit_", "stoker.command_parts."),
    *("stoker.batch.cli.", "stoker.batch.planning.", "stoker.batch.progress.", "stoker_shared.help_layout."),
    *("stoker_worker.cli.", "stoker_worker.memory_cli."),
)

# module imported -> prefixes of the modules that may import it
ALLOWED_IMPORTERS = {
    "rq": ("stoker.", "stoker_worker.rq_worker."),
    "mlx": ("stoker_worker.engine.",),
    "mlx_lm": ("stoker_worker.engine.",),
    "transformers": ("stoker_worker.engine.",),
    "tokenizers": ("stoker_worker.engine.",),
    "numpy": ("stoker_worker.",),
    "redis": ("stoker.", "stoker_worker."),
    "stoker": ("stoker.", "stoker_worker.demo"),
    "stoker_worker": ("stoker_worker.",),
    "stoker.driver": EDGES,
    "stoker.async_driver": EDGES,
    "stoker.batch": ("stoker.batch.", "stoker.cli."),
    "click": COMMANDS,
    "pickle": (),
}

# One module turns bytes into arrays and back; these need no MLX at all, so that policy is tested without it.
WITHOUT_MLX = (
    "stoker_worker.engine.block_pool",
    "stoker_worker.engine.scripted",
    "stoker_worker.engine.stop_scanner",
    "stoker_worker.engine.codec",
)


def modules():
    for package, root in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


MODULES = list(modules())


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(("module", "path"), MODULES, ids=lambda value: value if isinstance(value, str) else "")
def test_every_import_is_allowed(module, path):
    for imported in imports_of(path):
        for name, importers in ALLOWED_IMPORTERS.items():
            allowed = not f"{imported}.".startswith(f"{name}.") or f"{module}.".startswith(importers)
            assert allowed, f"{module} must not import {imported}"


@pytest.mark.parametrize("module", WITHOUT_MLX)
def test_modules_that_need_no_mlx_do_not_import_it(module):
    path = ROOT / "worker" / Path(*module.split(".")).with_suffix(".py")
    assert not {name.split(".")[0] for name in imports_of(path)} & {"mlx", "mlx_lm"}


def test_the_memory_package_knows_neither_redis_nor_rq_nor_mlx():
    for path in (ROOT / "worker/stoker_worker/memory").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports_of(path)} & {"redis", "rq", "mlx", "mlx_lm"}, path


@pytest.mark.parametrize(("module", "path"), MODULES, ids=lambda value: value if isinstance(value, str) else "")
def test_every_file_opens_with_what_it_owns(module, path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
