"""Tries a model before it is served: finds the widest mode in which each sequence answers as it does alone.

Owns the order in which modes are tried, the time that the proof may take, and the memory of earlier verdicts.
`trial.py` runs one trial. No architecture is known by name: only the model's behaviour counts. Engine thread.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from stoker_shared.text import one_line
from stoker_worker.engine.mlx_generators import REFERENCE_CHUNK_TOKENS
from stoker_worker.engine.rows.rows_generator import why_not_in_rows
from stoker_worker.engine.trial import (
    IN_8_BITS,
    MOST_AFTER_SPAN,
    SHORTEST_SPAN,
    Found,
    Limit,
    Reference,
    TrialPlan,
    all_found,
    may_pass,
    plan,
    plan_in_two_groups,
    plan_of_alike,
    try_plan,
)
from stoker_worker.models.cache_probe import can_be_batched
from stoker_worker.models.memo_file import read_memo, write_memo
from stoker_worker.ports import LoadedModel
from stoker_worker.ports.model import WIDEST_FIRST, Batching, ServingMode

_NAMES: Final = re.compile(r"^(?!.*(dim|head)).*(window|top_?k|sparse|chunk|block)", re.ASCII)
"""A dimension or a number of heads is not a number of tokens."""


def spans(config: Any, windows: Collection[int]) -> set[int]:
    """Numbers of tokens at which a model's attention may change: `windows` (of the layers' caches), the numbers in
    `config` (a dataclass or a mapping, with others inside) whose names are like those of spans, and the products of two
    of these, because a sparse budget is often configured as a number of blocks and their size."""
    numbers = {(name, n) for name, n in _numbers("", config) if _NAMES.search(name)}
    products = (first * second for (_, first), (_, second) in combinations(numbers, 2))
    return {*windows, *(n for _, n in numbers), *products}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield name, value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(name, one)
    else:
        fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for inner, one in fields.items():
            yield from _numbers(str(inner), one)


_VERSIONS: Final = ("mlx", "mlx-lm", "stoker")


@dataclass(frozen=True)
class Verdict:
    """The widest mode that is right.

    Attributes:
        why: the faults of wider modes, and the trials left out; empty if there is nothing to report.
        may_pass: whether a wider mode failed for a reason that may pass by itself.
    """

    mode: ServingMode
    why: tuple[str, ...]
    may_pass: bool = False


def remembered_or_proved(
    memo: Path | None,
    fingerprint: str,
    *,
    max_batch: int,
    draft_ngram: bool,
    device: str,
    prove: Callable[[], Verdict],
) -> Verdict:
    """The verdict on a model in the JSON file `memo`, else that of `prove`; without a `memo`, always the latter."""
    versions = {name: version(name) for name in _VERSIONS}
    parts = json.dumps([fingerprint, max_batch, draft_ngram, device, versions], sort_keys=True)
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
        return Verdict(
            ServingMode(Batching[entry["rows"]], memory=entry["memory"] is True),
            tuple(str(reason) for reason in entry["why"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


MOST_S: Final = 30.0
"""About as long as the trials of each mode may take. Later starts do not catch up on trials that are left out."""

_TRIAL_COSTS: Final = 3.0
"""The reference and one trial together take so many times as long as the reference."""

_TEXT: Final = (
    "The harbour lay quiet before the storm. Two boats came in late, their lamps lit, and nobody on the pier could "
    "tell which of them had been missing since Tuesday. `for i in range(10): print(i * i)` was written on the wall, "
    "in chalk; below it, in another hand: 3.14159, 2.71828 and the date, 17 May 1893. Ask the keeper, it said."
)

_log = logging.getLogger(__name__)


def prove(
    model: Any,
    loaded: LoadedModel,
    *,
    max_batch: int,
    draft_ngram: bool = False,
    most_s: float = MOST_S,
) -> Verdict:
    """Find out how `model` may be served.

    Args:
        model: an mlx-lm model, evaluated on this thread.
        max_batch: most sequences that will run together.
        draft_ngram: whether rows will get drafts.
        most_s: seconds. Longer trials are left out, and so are long sequences for which memory is short.
    """
    runs_in_rows = why_not_in_rows(model, loaded.spec) is None
    try:
        plans, left_out = _plan(model, loaded, max_batch, runs_in_rows, most_s)
        precision = _precision(model, loaded)
        trials = [(one, Reference(model, one)) for one in plans]
    except Exception as error:  # the model itself cannot run a sequence of more than one token in one pass
        alone = f"alone: {one_line(error)}"
        return Verdict(WIDEST_FIRST[-1], (alone,), may_pass(error))

    def found_in(mode: ServingMode, limit: Limit, *, with_rows: bool) -> Found:
        try_one = partial(
            try_plan, model, replace(loaded, mode=mode), max_batch=max_batch, draft_ngram=draft_ngram, limit=limit
        )
        found = all_found(try_one(*trial) for trial in trials if with_rows or not trial[0].is_for_rows)
        _log.debug("tried %s: %s", mode, found)
        return found

    why = [left_out] if left_out else []
    if not can_be_batched(model):
        why.append(f"{Batching.BATCHED}: mlx-lm cannot put caches of this model's kind into one batch")
    found = _widest(found_in, _candidates(model, loaded, runs_in_rows), precision)
    if found.may_pass and most_s > 0.0:  # long sequences, perhaps, need more memory than there is
        return prove(model, loaded, max_batch=max_batch, draft_ngram=draft_ngram, most_s=0.0)
    return replace(found, why=(*why, *found.why))


def _widest(found_in: Callable[..., Found], candidates: Iterable[ServingMode], precision: str) -> Verdict:
    """The first of `candidates` that is right, and the faults of those before it."""
    limit = Limit.of(precision)
    if not limit.at_every_step:  # a sequence that runs alone shows how much is rounding
        single = found_in(ServingMode(Batching.ONE_AT_A_TIME), limit, with_rows=True)
        limit = Limit.of(precision, rounding=single.apart)
    right_when_fresh: set[Batching] = set()
    why: list[str] = []
    passing = False
    for candidate in candidates:
        if candidate.batching in right_when_fresh:
            return Verdict(candidate, tuple(why), passing)
        found = found_in(candidate, limit, with_rows=candidate.batching == Batching.ROWS)
        passing = passing or found.may_pass
        if found.fresh is None and found.restored is None:
            return Verdict(candidate, tuple(why), passing)
        if found.fresh is None:
            right_when_fresh.add(candidate.batching)
        why.append(f"{candidate}: {found.fresh or f'restored: {found.restored}'}")
    return Verdict(WIDEST_FIRST[-1], tuple(why), passing)


def _candidates(model: Any, loaded: LoadedModel, runs_in_rows: bool) -> Iterator[ServingMode]:
    """Modes to try, the widest first, without mlx-lm's own, with which the others are compared."""
    batched = can_be_batched(model)
    for mode in WIDEST_FIRST:
        if mode.batching == Batching.ROWS and not runs_in_rows:
            continue
        if mode.batching in (Batching.BATCHED, Batching.SINGLE_PREFILL) and not batched:
            continue
        if mode.batching != Batching.AS_MLX_LM and (loaded.spec.can_be_stored or not mode.memory):
            yield mode


def _plan(
    model: Any, loaded: LoadedModel, max_batch: int, runs_in_rows: bool, most_s: float
) -> tuple[list[TrialPlan], str]:
    """The sequences to try: across windows and sparse budgets, and with common beginnings, if there is time.

    Returns:
        the plans, and the trials left out, as a text for the log; empty if there are none.
    """
    most = loaded.context_tokens
    # After real text: after random tokens a model's distribution is flat, and differences drown in noise.
    ids = loaded.tokenizer.encode(_TEXT, special_start=False)
    text_ids = [token for token in ids if token < loaded.vocabulary and token not in loaded.tokenizer.eos_ids]
    kv_heads = {layer.n_kv_heads for layer in loaded.spec.layers}
    make = partial(plan, text_ids, kv_heads=kv_heads, max_batch=max_batch, most=most)
    windows = {layer.window_tokens for layer in loaded.spec.layers}
    wanted = sorted(n for n in spans(getattr(model, "args", None), windows) if SHORTEST_SPAN < n < most)
    crossing = {n: make(span=n) for n in wanted if n + 2 * MOST_AFTER_SPAN <= most}
    of_rows = [plan_in_two_groups(text_ids), *([plan_of_alike(text_ids)] if loaded.spec.has_only_full_layers else [])]
    of_rows = [one for one in of_rows if runs_in_rows and max_batch > 1 and one.longest <= most]
    longer = [*crossing.values(), *of_rows]
    reached = _reached(model, longer, most_s / _TRIAL_COSTS)
    tried = {n for n, one in crossing.items() if one.longest <= reached}
    untried = [f"sequences longer than {n} tokens" for n in wanted if n not in tried]
    untried += ["common beginnings" for one in of_rows if one.shares and one.longest > reached]
    plans = [crossing[max(tried)] if tried else make(), *(x for x in of_rows if x.longest <= reached or not x.shares)]
    return plans, f"not tried: {', '.join(untried)}" if untried else ""


def _reached(model: Any, plans: Sequence[TrialPlan], within_s: float) -> int:
    """Tokens of the longest sequence of a plan whose reference takes at most `within_s`. Measured by a prefill that
    stops after that time, because short prefills are much slower for each token."""
    if not plans:
        return 0
    longest = max(plans, key=lambda one: one.longest)
    ids = max((sequence.ids for sequence in longest.sequences), key=len)
    within_s /= max(one.n_tokens / one.longest for one in plans)
    caches, done, began = make_prompt_cache(model), 0, time.perf_counter()
    while done < len(ids):
        chunk = ids[done : done + min(max(64, done // 2), REFERENCE_CHUNK_TOKENS)]
        logits = model(mx.array([chunk]), cache=caches)
        mx.eval(logits[:, -1], [cache.state for cache in caches])
        if time.perf_counter() - began > within_s:
            break
        done += len(chunk)
    return done


def _precision(model: Any, loaded: LoadedModel) -> str:
    """The dtype of the logits of a pass, or `IN_8_BITS`."""
    precision = str(model(mx.array([[0, 1]])).dtype).rpartition(".")[2]
    is_packed = any(layer.is_packed for layer in loaded.spec.layers)
    return IN_8_BITS if precision == "float32" and is_packed else precision
