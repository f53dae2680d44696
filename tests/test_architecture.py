"""The structure of the product: the allowed imports, the order of the packages, the length of a function.

A change that breaks one of these rules fails here by name. The rules have no exceptions: a rule that is in the way is
changed here, with the reason.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter

import pytest
from tests.support.import_graph import ROOT, ImportGraph, Module, experiment_modules, product_modules

MAX_FUNCTION_LINES = 50
MAX_ENTRIES = 17
"""Most modules and packages in an opened folder: all of them fit on a screen."""

COMMANDS = (
    *("stoker.cli.", "stoker.agent_cli.", "stoker.status_command.", "stoker.submit_", "stoker.cascade.cli."),
    *("stoker.command_parts.", "stoker.wait_line.", "stoker.dashboard.command.", "stoker_shared.help_layout."),
    *("stoker.batch.cli.", "stoker.batch.planning.", "stoker.batch.progress."),
    *("stoker.serve.command.", "stoker_worker.cli."),
)

ALLOWED_IMPORTERS = {
    "rq": ("stoker.", "stoker_worker.queue."),
    "mlx": ("stoker_worker.engine.", "stoker_worker.models.", "stoker_worker.doctor."),
    "mlx_lm": ("stoker_worker.engine.", "stoker_worker.models."),
    "transformers": ("stoker_worker.models.",),
    "tokenizers": ("stoker_worker.models.",),
    "llguidance": ("stoker_worker.models.",),
    "numpy": ("stoker_worker.",),
    "redis": (
        *("stoker.", "stoker_worker.queue.", "stoker_worker.placement.", "stoker_worker.pipeline."),
        "stoker_worker.cli.",
        *("stoker_worker.embedded_redis.", "stoker_worker.doctor."),
    ),
    "stoker": ("stoker.", "stoker_worker.cli.demo."),
    "stoker_worker": ("stoker_worker.",),
    "stoker.batch": ("stoker.batch.", "stoker.cli.", "stoker.serve."),
    "stoker.serve": ("stoker.serve.", "stoker.cli."),
    "starlette": ("stoker.serve.",),
    "uvicorn": ("stoker.serve.server.", "stoker.serve.connections."),
    "click": COMMANDS,
    "prometheus_client": ("stoker_worker.metrics.", "stoker.serve.metrics."),
    "pyarrow": ("stoker.batch.parquet_rows.", "stoker.batch.answer_table."),
    "obstore": ("stoker_worker.memory.replica.bucket.",),
    "pickle": (),
}
"""Module imported: prefixes of the modules that may import it."""

BASE = {"events", "periodic", "process_identity"}
VALUES = {"ports", *BASE}
CONFIGURED = {"settings", *VALUES}
LAYERS = {
    "__main__": {"cli"},
    "cli": {
        *("pipeline", "engine", "queue", "memory", "metrics", "models", "embedded_redis", "service", "doctor"),
        *CONFIGURED,
    },
    "doctor": {"engine", "queue", "memory", "models", "embedded_redis", *CONFIGURED},
    "pipeline": CONFIGURED,
    "engine": {"models", *CONFIGURED},
    "queue": {"embedded_redis", "placement", *CONFIGURED},
    "placement": set(),
    "memory": CONFIGURED,
    "metrics": VALUES,
    "service": set(),
    "models": CONFIGURED,
    "embedded_redis": CONFIGURED,
    "settings": VALUES,
    "ports": set(),
    "events": set(),
    "periodic": set(),
    "process_identity": set(),
}
"""Each part of the worker, from the top, and the parts it may import besides itself and `stoker_shared`."""

NEED_NO_MLX = {
    *("stoker_worker.engine.kv_memory", "stoker_worker.engine.scripted", "stoker_worker.engine.text"),
    *(f"stoker_worker.models.{name}" for name in ("blas", "fingerprint", "gguf", "loading", "tokenizer")),
}
"""These are tested without MLX, though their docstrings do not call them pure."""

PRODUCT = product_modules()


def test_every_import_is_allowed() -> None:
    forbidden = {
        f"{module.name} imports {imported}"
        for module in PRODUCT
        for imported in module.imports
        for name, importers in ALLOWED_IMPORTERS.items()
        if f"{imported}.".startswith(f"{name}.") and not f"{module.name}.".startswith(importers)
    }
    assert not forbidden


@pytest.mark.parametrize("modules", [PRODUCT, experiment_modules()], ids=["product", "experiments"])
def test_no_file_imports_itself_through_others(modules: list[Module]) -> None:
    try:
        TopologicalSorter(ImportGraph(modules).edges()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_lower_layer_of_the_worker_imports_a_higher_one() -> None:
    assert list(TopologicalSorter(LAYERS).static_order()), "the layers have an order"
    inside = {module: _worker_part(module.name) for module in PRODUCT if _worker_part(module.name)}
    assert set(inside.values()) == set(LAYERS), "each part of the worker has its place in LAYERS"
    wrong = {
        f"{module.name} imports {imported}"
        for module, part in inside.items()
        for imported in module.imports
        if (other := _worker_part(imported)) and other not in {part, *LAYERS[part]}
    }
    assert not wrong


def test_pure_modules_load_no_mlx() -> None:
    graph = ImportGraph(PRODUCT)
    pure = NEED_NO_MLX | {module.name for module in PRODUCT if re.search(r"\bPure\b", module.docstring)}
    chains = [chain for name in sorted(pure) if (chain := graph.chain(name, ("mlx", "mlx_lm")))]
    assert not [" loads ".join(chain) for chain in chains]


def test_every_file_opens_with_a_docstring() -> None:
    assert not [module.name for module in PRODUCT if not module.docstring]


def test_functions_are_short() -> None:
    functions = {
        f"{module.name}.{node.name}": node.end_lineno - node.lineno + 1
        for module in PRODUCT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert not {name: lines for name, lines in functions.items() if lines > MAX_FUNCTION_LINES}


def test_an_opened_folder_of_the_worker_shows_few_entries() -> None:
    for folder in (ROOT / "worker", ROOT / "worker" / "stoker_worker"):
        entries = {path.name for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert 0 < len(entries - {"__init__.py"}) <= MAX_ENTRIES, folder


def test_tests_lie_where_the_product_does() -> None:
    folders = {module.path.parent.relative_to(ROOT).parts for module in PRODUCT}
    mirrored = {(side, *inner) for side, _, *inner in folders}
    tests = {path.parent.relative_to(ROOT / "tests").parts for path in (ROOT / "tests").rglob("test_*.py")}
    assert {parts for parts in tests if parts and parts[0] in {"shared", "producer", "worker"}} <= mirrored


def _worker_part(name: str) -> str:
    """``queue`` for ``stoker_worker.queue.claim``; empty for the package itself and for anything else."""
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] if package == "stoker_worker" else ""
