"""The code that figures come from: the commit of a run, the paths that an experiment measures, and whether they have
changed since. It asks git."""

import ast
import re
import subprocess
from collections.abc import Sequence
from typing import Final

from common import HERE, Json

_WORKER = "worker/stoker_worker"
_ENGINE, _MODELS, _PIPELINE, _PLACEMENT, _QUEUE = (
    f"{_WORKER}/{room}" for room in ("engine", "models", "pipeline", "placement", "queue")
)
BUT: Final = ":(exclude)"
_REPLICA = f"{_WORKER}/memory/replica"
# The commands of maintenance are in no figure, and the shared store only in those of several workers.
_MEMORY = (f"{_WORKER}/memory", f"{BUT}{_WORKER}/memory/admin", f"{BUT}{_REPLICA}")
# Not the command line, service, doctor and metrics.
_SERVING = (_ENGINE, _MODELS, *_MEMORY, _PIPELINE, _PLACEMENT, _QUEUE, f"{_WORKER}/settings.py")
MEASURED = {
    "001": (_MODELS, _ENGINE, *_MEMORY), "002": (_ENGINE,), "003": (_ENGINE, *_MEMORY), "004": (_ENGINE, *_MEMORY),
    "006": (_ENGINE, *_MEMORY), "007": (_ENGINE, *_MEMORY), "008": (_ENGINE, *_MEMORY), "009": _SERVING,
    "010": (_ENGINE, _PIPELINE), "011": (_ENGINE,), "012": _MEMORY, "013": (_QUEUE,), "014": _SERVING,
    "015": (_ENGINE,), "016": _MEMORY, "017": (_ENGINE,), "018": (_ENGINE,),
    "019": ("producer/stoker/batch", "shared/stoker_shared/trust.py"), "020": (_ENGINE,), "021": _SERVING,
    "022": (_ENGINE,), "023": (_ENGINE,), "024": _SERVING, "025": (_QUEUE, _PLACEMENT, _REPLICA),
    "026": (_QUEUE, _PLACEMENT), "027": (_ENGINE, *_MEMORY),
}  # fmt: skip
"""By an experiment's number: the paths whose behaviour its figures tell, as git takes them."""


def source() -> Json:
    """The commit of the checkout, and whether it has changes that are not committed; nothing where there is no git."""
    if _git("rev-parse", "--show-toplevel") != str(HERE.parent):  # installed, perhaps below another repository
        return {"commit": None, "dirty": None}
    return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain"))}


def is_older(number: str, commit: str | None) -> bool:
    """Whether the measured code has changed since a commit."""
    return _has_changed(number, commit, MEASURED[number])


def is_of_another_script(number: str, commit: str | None) -> bool:
    """Whether the experiment's own script has changed since a commit."""
    return _has_changed(number, commit, (f"experiments/exp_{number}_*.py",))


def _has_changed(number: str, commit: str | None, paths: Sequence[str]) -> bool:
    """In more than words and form. Without a commit, or if a rebase has removed it, that is the one with the results as
    they are, which is no older than the run."""
    since = commit if commit and _git("cat-file", "-e", commit) is not None else None
    since = since or _git("log", "-1", "--format=%H", "--", f"experiments/results/exp_{number}_results.json")
    changed = since and _git("diff", "--name-only", "--no-renames", since, "HEAD", "--", *paths)
    return any(_code(since, path) != _code("HEAD", path) for path in (changed or "").split())


def code(text: str) -> str:
    """What a module does: its syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [line for line in body if not _is_text(line)]
    return ast.dump(tree)


def _is_text(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _code(commit: str | None, path: str) -> str | None:
    text = _git("show", f"{commit}:{path}")
    if text and path.endswith(".lua"):
        return re.sub(r"\s*--.*", "", text)
    return code(text) if text and path.endswith(".py") else text


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(HERE.parent), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
