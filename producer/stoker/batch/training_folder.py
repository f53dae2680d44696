"""The folder of a training set: ``TASK/train.jsonl``, ``valid.jsonl`` and ``test.jsonl``, as `mlx_lm.lora` reads them.

It appears complete or not at all. Owns the files' names and their form; does not choose what is in them.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from stoker.batch.training_example import Part


class TrainingFolder:
    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: something is there already, which is not changed, or the folder above it is missing.
            OSError: the folder above it cannot be written.
        """
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ValueError(f"{path} exists already; give a folder that is new or empty")
        self._path = path
        self._beside = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-")
        self._unfinished = Path(self._beside.name) / "unfinished"
        self._unfinished.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was not published."""
        self._beside.cleanup()

    def add(self, task: str, part: Part, row: Mapping[str, Any]) -> None:
        """
        Raises:
            OSError: the disk is full or failed, or `task` is too long for the name of a folder.
        """
        folder = self._unfinished / folder_name(task)
        folder.mkdir(exist_ok=True)
        # Opened for each row: there may be more tasks than a process may have files. mlx-lm reads the files in the
        # locale's encoding, so they are ASCII; and it fails on a file without lines, so none is made in advance.
        with (folder / f"{part}.jsonl").open("a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")

    def publish(self) -> None:
        """Give the folder its name.

        Raises:
            OSError: something has appeared there.
        """
        self._unfinished.rename(self._path)


def folder_name(task: str) -> str:
    """The name of a task's folder: the task with ``+`` for ``/``, percent-encoded, so that it is never a path."""
    name = quote(task, safe="").replace("%2F", "+")
    return f"%2E{name[1:]}" if name.startswith(".") else name
