"""The product's modules and what each imports, read from the source. Owns no rule; imports none of the modules."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"stoker_shared": ROOT / "shared", "stoker": ROOT / "producer", "stoker_worker": ROOT / "worker"}
EXPERIMENTS = ROOT / "experiments"


@dataclass(frozen=True)
class Module:
    name: str
    """Dotted, without ``.__init__``; a file of `experiments/` has its plain name, because it runs as a script."""
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @cached_property
    def imports(self) -> frozenset[str]:
        """All names imported anywhere in the file, in functions and for type checkers too: ``from a import b`` is
        ``a.b``, whether ``b`` is a module or not."""
        return frozenset(_imported(ast.walk(self.tree)))

    @cached_property
    def imports_at_load(self) -> frozenset[str]:
        """The names imported when the module is loaded, without those in functions or under ``TYPE_CHECKING``."""
        return frozenset(_imported(_statements_at_load(self.tree.body)))


def product_modules() -> list[Module]:
    return [
        Module(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path)
        for package, root in PACKAGES.items()
        for path in sorted((root / package).rglob("*.py"))
    ]


def experiment_modules() -> list[Module]:
    return [Module(path.stem, path) for path in sorted(EXPERIMENTS.glob("*.py"))]


class ImportGraph:
    def __init__(self, modules: list[Module]) -> None:
        self._modules = {module.name: module for module in modules}

    def edges(self) -> dict[str, set[str]]:
        """From each module to the modules of the graph it imports anywhere in its file."""
        return {name: self._found(module.imports) for name, module in self._modules.items()}

    def chain(self, start: str, to: tuple[str, ...]) -> list[str] | None:
        """The modules loaded one after another from `start` to a top-level package of `to`, parent packages included;
        ``None`` if loading `start` loads none of them."""
        came_from: dict[str, str | None] = {start: None}
        waiting = [start]
        while waiting:
            name = waiting.pop(0)
            module = self._modules[name]
            outside = sorted(name for name in module.imports_at_load if name.split(".")[0] in to)
            if outside:
                return [*_way(came_from, name), outside[0]]
            for loaded in sorted(self._found(module.imports_at_load) | set(self._parents(name))):
                if loaded not in came_from:
                    came_from[loaded] = name
                    waiting.append(loaded)
        return None

    def _found(self, imports: frozenset[str]) -> set[str]:
        return {found for name in imports if (found := self._module_of(name))}

    def _module_of(self, name: str) -> str | None:
        """``stoker.tickets.Ticket`` and ``stoker.tickets`` are both the module ``stoker.tickets``."""
        if name in self._modules:
            return name
        parent = name.rpartition(".")[0]
        return parent if parent in self._modules else None

    def _parents(self, name: str) -> Iterator[str]:
        while name := name.rpartition(".")[0]:
            yield name


def _imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _statements_at_load(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _statements_at_load(statement.orelse)
            continue
        yield statement
        for block in ("body", "orelse", "finalbody"):
            yield from _statements_at_load(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements_at_load(handler.body)


def _way(came_from: dict[str, str | None], name: str | None) -> list[str]:
    way: list[str] = []
    while name is not None:
        way.insert(0, name)
        name = came_from[name]
    return way
