"""Remembers the mode that each model was proved in, so that only its first start pays for the proof. Engine thread.

A verdict holds for one model, one device and one set of versions: a new mlx-lm may break or mend a mode.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stoker_worker.models.memo_file import read_memo, write_memo
from stoker_worker.ports.model import WIDEST_FIRST, Batching, ServingMode

_VERSIONS: Final = ("mlx", "mlx-lm", "stoker")


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        mode: the widest mode that is right.
        why: the faults of wider modes, and the trials that were left out; empty when there is nothing to report.
        may_pass: whether a wider mode failed for a reason that may pass by itself.
        reached: tokens of the longest sequence for which there was time.
        is_whole: whether nothing was left out for lack of time.
        budget_s: seconds that the proof could take.
    """

    mode: ServingMode
    why: tuple[str, ...]
    may_pass: bool = False
    reached: int = 0
    is_whole: bool = True
    budget_s: float = 0.0


def remembered_or_proved(
    memo: Path | None,
    fingerprint: str,
    *,
    max_batch: int,
    draft_ngram: bool,
    device: str,
    prove: Callable[[Verdict | None], Verdict],
) -> Verdict:
    """The verdict on a model: the remembered one if it is whole, or that of `prove`, which gets the remembered one.

    Args:
        memo: JSON file of earlier verdicts; ``None``: every start proves anew.
    """
    versions = {name: version(name) for name in _VERSIONS}
    parts = json.dumps([fingerprint, max_batch, draft_ngram, device, versions], sort_keys=True)
    key = hashlib.sha256(parts.encode()).hexdigest()
    known = read_memo(memo)
    remembered = _verdict(known.get(key))
    if remembered is not None and remembered.is_whole:
        return remembered
    verdict = prove(remembered)
    if verdict.may_pass:  # memory was short, perhaps, and the next start tries again
        return remembered or verdict
    if remembered is not None and WIDEST_FIRST.index(verdict.mode) < WIDEST_FIRST.index(remembered.mode):
        verdict = replace(verdict, mode=remembered.mode, why=remembered.why)  # more trials allow no more than fewer
    mode = verdict.mode
    entry = {"rows": mode.batching.name, "memory": mode.memory, "why": verdict.why, "versions": versions}
    entry |= {"reached": verdict.reached, "whole": verdict.is_whole, "budget_s": verdict.budget_s}
    write_memo(memo, {**known, key: entry})
    return verdict


def _verdict(entry: Any) -> Verdict | None:
    try:
        return Verdict(
            ServingMode(Batching[entry["rows"]], memory=entry["memory"] is True),
            tuple(str(reason) for reason in entry["why"]),
            reached=int(entry["reached"]),
            is_whole=entry["whole"] is True,
            budget_s=float(entry["budget_s"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
