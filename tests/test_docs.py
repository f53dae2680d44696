"""The pages name existing things: links within the repository, and mlx-lm's private names as the worker uses them."""

import ast
import re
from pathlib import Path

import pytest

from stoker_worker.cli.main import import_model
from stoker_worker.cli.memory_commands import memory
from stoker_worker.models.gguf import FILE_TYPES

ROOT = Path(__file__).resolve().parents[1]
RECORDS = sorted(ROOT.glob("docs/adr/0*.md"))
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/README.md"), *ROOT.glob("experiments/*.md")]
)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_within_the_repository_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


def test_the_index_of_decisions_has_each_of_them():
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    assert re.findall(r"\]\((0\S+)\)", index) == [record.name for record in reversed(RECORDS)]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_site_has_every_page():
    nav = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert nav == {page.relative_to(ROOT).as_posix() for page in PAGES}


OUR_PAGES = [page for page in PAGES if page.name != "upstream.md"]  # it names files of mlx-lm and RQ


@pytest.mark.parametrize("page", OUR_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_source_files_that_a_page_names_exist(page):
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`", page.read_text()))
    roots = (ROOT, ROOT / "worker" / "stoker_worker", ROOT / "producer" / "stoker", ROOT / "shared")
    assert not {name for name in named if not any((root / name).exists() for root in roots)}


def test_the_tests_that_the_page_of_upstream_faults_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "upstream.md").read_text()))
    source = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert not {name for name in named if f"def {name}(" not in source}


def test_the_decision_on_composition_lists_every_private_name_of_mlx_lm_that_is_used():
    used = set()
    for room in ("engine", "models"):
        for file in (ROOT / "worker" / "stoker_worker" / room).rglob("*.py"):
            used |= private_names(ast.parse(file.read_text()))
    page = (ROOT / "docs" / "adr" / "0001-composition-over-batchgenerator.md").read_text()
    _, entry = page.split("Composition over `BatchGenerator`")
    listed = set(re.findall(r"[`.](_[a-z]\w*)`", entry))
    assert used == listed


def private_names(tree: ast.AST) -> set[str]:
    """Private attributes of other objects than `self` and `cls`, and private names imported from mlx-lm."""
    imported = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm")
        for name in node.names
        if name.name.startswith("_")
    }
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[a-z]", node.attr)
        and ast.unparse(node.value) not in ("self", "cls", "super()", "os")
    }
    return imported | attributes


def test_the_page_and_the_help_name_every_type_of_file_that_is_imported():
    page = (ROOT / "docs" / "serving-a-model.md").read_text()
    assert [name for name in FILE_TYPES.values() if name not in page or name not in (import_model.help or "")] == []


def texts_of_the_product() -> str:
    """The texts in the code without what is inserted into them, and the names of its classes, a line each."""
    nodes = (
        node
        for folder in ("shared", "producer", "worker")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    )
    classes, texts = [], []
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts += [" ".join(text.split()) for text in re.split(r"%[.\d]*[sdrf]", node.value)]
    return "\n".join([*classes, *texts])


OF_THE_SYSTEM = "Address already in use"


def test_the_messages_of_the_page_on_troubles_are_those_of_the_code():
    """In a row, "..." is any text, as in a message are a number, a name and what is joined to it."""
    known = f"\n{texts_of_the_product()}\n{OF_THE_SYSTEM}\n"

    def is_known(part: str) -> bool:
        """As a text of the code, or as the end of one to which the beginning of another is joined."""
        words = part.split()
        halves = ((" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words)))
        return " ".join(words) in known or any(f"{end}\n" in known and f"\n{begin}" in known for end, begin in halves)

    rows = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    parts = {row: re.split(r"\.\.\.|: |; |[\d()',=]", row) for row in rows}
    assert len(rows) > 100
    assert {row: part for row, found in parts.items() for part in found if not is_known(part)} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_memory_commands_on_a_page_exist_with_the_options_named(page):
    for words in re.findall(r"stoker-worker memory ([a-z].*?)(?:[`\n'&]|$)", page.read_text()):
        names, *arguments = words.split()
        assert set(names.split("|")) <= set(memory.commands), words
        options = {option for name in names.split("|") for x in memory.commands[name].params for option in x.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= options, words
