"""Remembers which mode each model was found right in, so that only its first start pays for the proof. Engine thread.

A verdict holds for one model, one device and one set of versions: a new mlx-lm may break what was right, or mend it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stoker_worker.engine.memo_file import read_memo, write_memo
from stoker_worker.engine.proof import Verdict
from stoker_worker.serving_mode import Rows, ServingMode

_VERSIONS: Final = ("mlx", "mlx-lm", "stoker")


@dataclass(frozen=True)
class Verdicts:
    """
    Attributes:
        memo: JSON file; ``None``: every start proves anew.
    """

    memo: Path | None

    def of(self, fingerprint: str, *, max_batch: int, device: str, prove: Callable[[], Verdict]) -> Verdict:
        """The verdict on a model: the remembered one, or what `prove` finds."""
        versions = {name: version(name) for name in _VERSIONS}
        parts = json.dumps([fingerprint, max_batch, device, versions], sort_keys=True)
        key = hashlib.sha256(parts.encode()).hexdigest()
        known = read_memo(self.memo)
        remembered = _verdict(known.get(key))
        if remembered is not None:
            return remembered
        verdict = prove()
        if verdict.may_pass:  # memory was short, perhaps: the next start tries again
            return verdict
        mode = verdict.mode
        entry = {"rows": mode.rows.name, "memory": mode.memory, "why": verdict.why, "versions": versions}
        write_memo(self.memo, {**known, key: entry})
        return verdict


def _verdict(entry: Any) -> Verdict | None:
    try:
        mode = ServingMode(Rows[entry["rows"]], memory=entry["memory"] is True)
        return Verdict(mode, tuple(str(reason) for reason in entry["why"]), 0.0)
    except (KeyError, TypeError):
        return None
