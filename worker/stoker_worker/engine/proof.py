"""Tries a model before it is served: finds the widest mode in which each sequence answers as alone. Engine thread.

Owns the order in which modes are tried, and the time that the proof may take. `trial.py` runs one trial,
`trial_sequences.py` plans its sequences. No architecture is known by name here: only the model's behaviour counts.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx

from stoker_shared.error_line import one_line
from stoker_worker.engine.rows.rows_generator import why_not_in_rows
from stoker_worker.engine.trial import IN_8_BITS, Found, Limit, Reference, all_found, may_pass, try_plan
from stoker_worker.engine.trial_sequences import TrialPlan, plan, plan_in_two_groups
from stoker_worker.engine.verdicts import Verdict
from stoker_worker.models.cache_probe import can_be_batched
from stoker_worker.ports import LoadedModel, TokenizerPort
from stoker_worker.ports.serving_mode import WIDEST_FIRST, Batching, ServingMode

LEAST_BUDGET_S: Final = 5.0
LOAD_SHARE: Final = 0.03
"""A proof may take this share of the time the model took to load, or `LEAST_BUDGET_S`, whichever is longer."""

_TRIAL_COSTS: Final = 3.0
"""The reference and one trial together take so many times as long as the reference."""

_SPAN: Final = re.compile(r"window|top_?k|sparse|chunk|block", re.ASCII)
_SPANS: Final = range(8, 1 << 20)
_TEXT: Final = (
    "The harbour lay quiet before the storm. Two boats came in late, their lamps lit, and nobody on the pier could "
    "tell which of them had been missing since Tuesday. `for i in range(10): print(i * i)` was written on the wall, "
    "in chalk; below it, in another hand: 3.14159, 2.71828 and the date, 17 May 1893. Ask the keeper, it said."
)

_log = logging.getLogger(__name__)


def prove(model: Any, loaded: LoadedModel, *, max_batch: int, load_s: float = 0.0) -> Verdict:
    """Find out how `model` may be served.

    Args:
        model: an mlx-lm model, evaluated on this thread.
        max_batch: most sequences that will run together.
        load_s: seconds that loading the model took.
    """
    runs_in_rows = why_not_in_rows(model, loaded.spec) is None
    try:
        planned = _plan(model, loaded, max_batch, max(LEAST_BUDGET_S, LOAD_SHARE * load_s))
        in_groups = _in_groups(model, loaded, max_batch) if runs_in_rows else []
    except Exception as error:  # the model itself cannot run a sequence of more than one token in one pass
        alone = f"alone: {one_line(error)}"
        return Verdict(WIDEST_FIRST[-1], (alone,), may_pass(error))
    why = [planned.untried] if planned.untried else []
    if not can_be_batched(model):
        why.append(f"{Batching.BATCHED}: mlx-lm cannot put caches of this model's kind into one batch")

    def found_in(mode: ServingMode, limit: Limit, more: Sequence[_Trial] = ()) -> Found:
        in_mode, trials = replace(loaded, mode=mode), [planned.trial, *more]
        found = all_found(try_plan(model, in_mode, *trial, max_batch=max_batch, limit=limit) for trial in trials)
        _log.debug("tried %s: %s", mode, found)
        return found

    limit = Limit.of(planned.precision)
    if not limit.at_every_step:  # a sequence that runs alone shows how much is rounding
        single = found_in(ServingMode(Batching.ONE_AT_A_TIME), limit, in_groups)
        limit = Limit.of(planned.precision, rounding=single.apart)
    right_when_fresh: set[Batching] = set()
    passing = False
    mode = WIDEST_FIRST[-1]
    for candidate in _candidates(model, loaded, runs_in_rows):
        if candidate.batching in right_when_fresh:
            mode = candidate
            break
        found = found_in(candidate, limit, in_groups if candidate.batching == Batching.ROWS else ())
        passing = passing or found.may_pass
        if found.fresh is None and found.restored is None:
            mode = candidate
            break
        if found.fresh is None:
            right_when_fresh.add(candidate.batching)
        why.append(f"{candidate}: {found.fresh or f'restored: {found.restored}'}")
    return Verdict(mode, tuple(why), passing)


def _candidates(model: Any, loaded: LoadedModel, runs_in_rows: bool) -> Iterator[ServingMode]:
    """Modes to try, the widest first; mlx-lm's own way is not tried, since others are compared with it."""
    batched = can_be_batched(model)
    for mode in WIDEST_FIRST:
        if mode.batching == Batching.ROWS and not runs_in_rows:
            continue
        if mode.batching in (Batching.BATCHED, Batching.SINGLE_PREFILL) and not batched:
            continue
        if mode.batching != Batching.AS_MLX_LM and (loaded.spec.can_be_stored or not mode.memory):
            yield mode


_Trial = tuple[TrialPlan, Reference]


@dataclass(frozen=True)
class _Planned:
    trial: _Trial
    precision: str
    untried: str


def _plan(model: Any, loaded: LoadedModel, max_batch: int, budget_s: float) -> _Planned:
    """The sequences to try, each with its reference; across windows and sparse budgets where there is time for it."""
    logits = model(mx.array([[0, 1]]))
    text_ids = _text_ids(loaded.tokenizer, logits.shape[-1])
    kv_heads = {layer.n_kv_heads for layer in loaded.spec.layers}
    precision = str(logits.dtype).rpartition(".")[2]
    if precision == "float32" and any(layer.is_packed for layer in loaded.spec.layers):
        precision = IN_8_BITS
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
    left_out = f"not tried: sequences longer than {', '.join(map(str, untried))} tokens" if untried else ""
    return _Planned((chosen, reference), precision, left_out)


def _in_groups(model: Any, loaded: LoadedModel, max_batch: int) -> list[_Trial]:
    """What is tried in rows besides, if there may be two of them."""
    chosen = plan_in_two_groups(_text_ids(loaded.tokenizer, model(mx.array([[0]])).shape[-1]))
    return [(chosen, Reference(model, chosen))] if max_batch > 1 and chosen.longest <= loaded.context_tokens else []


def _text_ids(tokenizer: TokenizerPort, vocabulary: int) -> list[int]:
    """Token ids of real text: after random ones a model's distribution is flat, and differences drown in noise."""
    ids = tokenizer.encode(_TEXT, special_start=False)
    return [token for token in ids if token < vocabulary and token not in tokenizer.eos_ids]


def _spans(model: Any, loaded: LoadedModel) -> set[int]:
    """Numbers of tokens beyond which the model may behave differently: windows, and config values named like one."""
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
