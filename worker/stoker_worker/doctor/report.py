"""All findings of one run, as JSON: the file is whole after each check, so that a crash in MLX leaves the rest."""

import json
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stoker_shared.durable_file import replace_file
from stoker_worker.doctor.check import Finding, Status


class Report:
    """What was found so far, in the order of the checks."""

    def __init__(self, out: Path | None) -> None:
        """
        Args:
            out: the file that `add` keeps up to date; ``None`` for no file.

        Raises:
            OSError: the file cannot be written.
        """
        self._out = out
        self._began = time.time()
        self._found: list[tuple[str, Finding]] = []
        self._write()

    def add(self, name: str, finding: Finding) -> None:
        """Raises `OSError`: the file cannot be written."""
        self._found.append((name, finding))
        self._write()

    @property
    def failed(self) -> bool:
        return self.count(Status.FAIL) > 0

    def count(self, status: Status) -> int:
        return sum(finding.status == status for _, finding in self._found)

    def as_json(self) -> dict[str, Any]:
        return {
            "stoker": version("stoker"),
            "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began, 1),
            "failed": self.failed,
            "checks": [{"name": name, **asdict(finding)} for name, finding in self._found],
        }

    def text(self) -> str:
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"

    def _write(self) -> None:
        if self._out is not None:
            replace_file(self._out, self.text().encode())
