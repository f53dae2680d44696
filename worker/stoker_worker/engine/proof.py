"""Tries a model before it is served: finds the widest mode in which every row answers as it does alone. Engine thread.

Owns the order in which modes are tried, and how long that may take. How a trial is made is `trial.py`, with which rows
`trial_rows.py`. No architecture is known by name here: what a model does is looked at.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx

from stoker_worker.engine.probe import can_be_batched
from stoker_worker.engine.trial import Found, Limit, Reference, may_pass, try_rows
from stoker_worker.engine.trial_rows import TrialPlan, plan
from stoker_worker.ports import LoadedModel, TextCodec
from stoker_worker.serving_mode import WIDEST_FIRST, Rows, ServingMode

LEAST_BUDGET_S: Final = 5.0
LOAD_SHARE: Final = 0.03
"""A proof may take this share of the time the model took to load, or `LEAST_BUDGET_S`, the longer of both."""

_TRIAL_COSTS: Final = 3.0
"""Times the reference's seconds that it and one trial take together."""

_SPAN: Final = re.compile(r"window|top_?k|sparse|chunk|block", re.ASCII)
_SPANS: Final = range(8, 1 << 20)
_TEXT: Final = (
    "The harbour lay quiet before the storm. Two boats came in late, their lamps lit, and nobody on the pier could "
    "tell which of them had been missing since Tuesday. `for i in range(10): print(i * i)` was written on the wall, "
    "in chalk; below it, in another hand: 3.14159, 2.71828 and the date, 17 May 1893. Ask the keeper, it said."
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        mode: the widest mode that is right.
        why: what is wrong with wider ones, and what was not tried; empty when there is nothing to be told.
        seconds: how long the proof took.
        may_pass: whether a wider mode failed for a reason that may pass by itself.
    """

    mode: ServingMode
    why: tuple[str, ...]
    seconds: float
    may_pass: bool = False


def prove(model: Any, loaded: LoadedModel, *, max_batch: int, load_s: float = 0.0) -> Verdict:
    """Find out how `model` may be served.

    Args:
        model: an mlx-lm model, evaluated on this thread.
        max_batch: most rows that will run together.
        load_s: seconds that loading the model took.
    """
    began = time.perf_counter()
    try:
        with_rows = _plan(model, loaded, max_batch, max(LEAST_BUDGET_S, LOAD_SHARE * load_s))
    except Exception as error:  # the model itself cannot do with rows of more than one token
        alone = f"alone: {type(error).__name__}: {' '.join(str(error).split())}"
        return Verdict(WIDEST_FIRST[-1], (alone,), time.perf_counter() - began, may_pass(error))
    why = [with_rows.untried] if with_rows.untried else []
    if not can_be_batched(model):
        why.append(f"{Rows.BATCHED}: mlx-lm cannot put caches of this model's kind into one batch")

    def found_in(mode: ServingMode, limit: Limit) -> Found:
        asked = replace(loaded, mode=mode)
        found = try_rows(model, asked, with_rows.plan, with_rows.reference, max_batch=max_batch, limit=limit)
        _log.debug("tried %s: %s", mode, found)
        return found

    limit = Limit.of(with_rows.dtype)
    if not limit.at_every_step:  # how much is rounding shows in a row that runs alone
        limit = Limit.of(with_rows.dtype, rounding=found_in(ServingMode(Rows.ALONE), limit).apart)
    right_when_fresh: set[Rows] = set()
    passing = False
    mode = WIDEST_FIRST[-1]
    for candidate in _candidates(model, loaded):
        if candidate.rows in right_when_fresh:
            mode = candidate
            break
        found = found_in(candidate, limit)
        passing = passing or found.may_pass
        if found.fresh is None and found.restored is None:
            mode = candidate
            break
        if found.fresh is None:
            right_when_fresh.add(candidate.rows)
        why.append(f"{candidate}: {found.fresh or f'restored: {found.restored}'}")
    return Verdict(mode, tuple(why), time.perf_counter() - began, passing)


def _candidates(model: Any, loaded: LoadedModel) -> Iterator[ServingMode]:
    """Modes to be tried, the widest first; the last one is not tried, since it is what others are compared with."""
    batched = can_be_batched(model)
    for mode in WIDEST_FIRST:
        if mode.rows in (Rows.BATCHED, Rows.SINGLE_PREFILL) and not batched:
            continue
        if mode.rows != Rows.WHOLE and (loaded.spec.can_be_stored or not mode.memory):
            yield mode


@dataclass(frozen=True)
class _Rows:
    plan: TrialPlan
    reference: Reference
    dtype: str
    untried: str


def _plan(model: Any, loaded: LoadedModel, max_batch: int, budget_s: float) -> _Rows:
    """The rows to try, each with what it is alone; across windows and sparse budgets where there is time for it."""
    logits = model(mx.array([[0, 1]]))
    text_ids = _text_ids(loaded.codec, logits.shape[-1])
    kv_heads = {layer.n_kv_heads for layer in loaded.spec.layers}
    dtype = str(logits.dtype).rpartition(".")[2]
    chosen = plan(text_ids, kv_heads=kv_heads, max_batch=max_batch, span=0)
    began = time.perf_counter()
    reference = Reference(model, chosen)
    tokens_per_s = chosen.n_tokens / (time.perf_counter() - began)
    untried: list[int] = []
    for span in sorted(_spans(model, loaded), reverse=True):
        longer = plan(text_ids, kv_heads=kv_heads, max_batch=max_batch, span=span)
        fits = longer.longest <= loaded.context_tokens
        if fits and _TRIAL_COSTS * longer.n_tokens / tokens_per_s < budget_s:
            chosen, reference = longer, Reference(model, longer)
            break
        untried.append(span)
    told = f"not tried: rows longer than {', '.join(map(str, untried))} tokens" if untried else ""
    return _Rows(chosen, reference, dtype, told)


def _text_ids(codec: TextCodec, vocabulary: int) -> list[int]:
    """Token ids of real text: behind random ones a model's guesses are flat, and differences drown in noise."""
    ids = codec.encode(_TEXT, special_start=False)
    return [token for token in ids if token < vocabulary and token not in codec.eos_ids]


def _spans(model: Any, loaded: LoadedModel) -> set[int]:
    """Numbers of tokens beyond which the model may behave differently: windows, and what its config calls such."""
    spans = {layer.window_tokens for layer in loaded.spec.layers}
    spans |= {n for name, n in _numbers(getattr(model, "args", None)) if _SPAN.search(name)}
    return {n for n in spans if n in _SPANS and n < loaded.context_tokens}


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name, value in fields.items():
        if type(value) is int:
            yield str(name), value
        elif isinstance(value, Mapping) or hasattr(value, "__dataclass_fields__"):
            yield from _numbers(value)
