"""Remembers the mode that each model was proved in, so that only its first start pays for the proof. Engine thread.

A verdict holds for one model, one device and one set of versions: a new mlx-lm may break or mend a mode.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stoker_worker.models.memo_file import read_memo, write_memo
from stoker_worker.ports.serving_mode import Batching, ServingMode

_VERSIONS: Final = ("mlx", "mlx-lm", "stoker")


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        mode: the widest mode that is right.
        why: the faults of wider modes, and the trials that were left out; empty when there is nothing to report.
        may_pass: whether a wider mode failed for a reason that may pass by itself.
    """

    mode: ServingMode
    why: tuple[str, ...]
    may_pass: bool = False


def remembered_or_proved(
    memo: Path | None, fingerprint: str, *, max_batch: int, device: str, prove: Callable[[], Verdict]
) -> Verdict:
    """The verdict on a model: the remembered one, or that of `prove`.

    Args:
        memo: JSON file of earlier verdicts; ``None``: every start proves anew.
    """
    versions = {name: version(name) for name in _VERSIONS}
    parts = json.dumps([fingerprint, max_batch, device, versions], sort_keys=True)
    key = hashlib.sha256(parts.encode()).hexdigest()
    known = read_memo(memo)
    if (remembered := _verdict(known.get(key))) is not None:
        return remembered
    verdict = prove()
    if not verdict.may_pass:  # else memory was short, perhaps, and the next start tries again
        mode = verdict.mode
        entry = {"rows": mode.batching.name, "memory": mode.memory, "why": verdict.why, "versions": versions}
        write_memo(memo, {**known, key: entry})
    return verdict


def _verdict(entry: Any) -> Verdict | None:
    try:
        mode = ServingMode(Batching[entry["rows"]], memory=entry["memory"] is True)
        return Verdict(mode, tuple(str(reason) for reason in entry["why"]))
    except (KeyError, TypeError):
        return None
