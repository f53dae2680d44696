"""One trial of a model in one mode: the sequences to try, the engine that runs them, and the comparison of each with
itself alone. Engine thread.

The engine is the real one, with its own saving and restoring. Only two things are done from outside: sequences output
the plan's tokens, so that an early difference does not change the text, and the model's log-probabilities are observed.

Every fault of a batch found so far shows with one of the planned sequences: sequences of unequal length prefilled
together (padding on the right), sequences that join later (padding on the left), as many sequences as there are KV
heads (a mask broadcast along the wrong axis), sequences longer than a window or a sparse budget, prefill in several
chunks, and restored sequences. Rows have two more plans: two groups, and sequences that begin alike and repeat
themselves.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from stoker_shared.request import GenerationRequest
from stoker_shared.text import one_line
from stoker_worker.engine.batch_engine import BlockPoolBatchEngine, assemble
from stoker_worker.engine.generator import TokenOutput
from stoker_worker.engine.kv_memory import MOST_APART
from stoker_worker.engine.mlx_generators import REFERENCE_CHUNK_TOKENS
from stoker_worker.engine.scheduler import LEAST_SHARED
from stoker_worker.engine.sequence import Sequence as EngineSequence
from stoker_worker.ports import CompletedGeneration, GenerationWork, LoadedModel, SequenceCache, TokenizerPort

SHORTEST_SPAN: Final = 12
"""Every plan crosses so many tokens."""

MOST_AFTER_SPAN: Final = 30
"""Most tokens of a sequence after its prompt."""

_PROMPTS: Final = (6, 13, 9, 16, 7, 11, 8)
"""Lengths of prompts that need not cross anything, used in turn."""

_IN_TWO_GROUPS: Final = (6, 6 + MOST_APART + 26, 9, 6 + MOST_APART + 10)
"""Lengths of prompts that make two groups of two rows. Those of a group are so unequal that a missing mask shows."""

_ANSWERS: Final = (3, 5, 4)
"""Tokens of the first answers: sequences end at different steps, so the batch has other widths as well."""

_LONG_ANSWER: Final = 14
"""Tokens of the longest sequence's answer: it still decodes when joiners are prefilled, which pads them to its
length."""

_MORE: Final = (5, 2, 9, 3)
"""Tokens that the second turn adds."""

SECOND_ANSWER: Final = 3
_JOINERS: Final = 2

_IN_COMMON: Final = LEAST_SHARED + 40
"""Tokens with which sequences begin alike: most of them are shared, and the rest is copied."""

_REPEATED: Final = 12
"""Tokens that these sequences repeat, so that they get drafts if those are on."""


@dataclass(frozen=True)
class TrialSequence:
    """Two turns of one sequence. All its tokens are fixed beforehand, those of its answers included.

    Attributes:
        ids: prompt, answer, the second turn's new tokens, second answer.
        n_prompt, n_answer: of the first turn.
        joins: whether it joins while others decode.
    """

    ids: tuple[int, ...]
    n_prompt: int
    n_answer: int
    joins: bool

    @property
    def n_first(self) -> int:
        """Tokens after the first turn."""
        return self.n_prompt + self.n_answer

    @property
    def checkpoint(self) -> int:
        """The place in the first prompt where a model with snapshots takes one for other prompts."""
        return self.n_prompt // 2

    @property
    def n_second_prompt(self) -> int:
        return len(self.ids) - SECOND_ANSWER


@dataclass(frozen=True)
class TrialPlan:
    """The sequences of a trial, in the order in which they join.

    Attributes:
        chunk_tokens: prompt tokens of a sequence in one step.
        shares: whether sequences that begin alike may share their beginning.
        is_for_rows: whether it is tried in rows only.
    """

    sequences: tuple[TrialSequence, ...]
    chunk_tokens: int
    shares: bool = False
    is_for_rows: bool = False

    @property
    def longest(self) -> int:
        return max(len(sequence.ids) for sequence in self.sequences)

    @property
    def n_tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


def plan(
    text_ids: Sequence[int], *, kv_heads: Collection[int], max_batch: int, span: int = SHORTEST_SPAN, most: int
) -> TrialPlan:
    """A plan in which three sequences of unequal length, if so many may run, cross `span`: from the start, while
    decoding, and as a joiner, which is padded.

    Args:
        text_ids: token ids of some text, at least 64; each sequence begins at another place in it.
        kv_heads: numbers of KV heads among the model's layers.
        span: tokens; at least `SHORTEST_SPAN`, and `MOST_AFTER_SPAN` less than `most`.
        most: tokens that a sequence may have.
    """
    width = min(max_batch, max([2, *kv_heads]))
    joiners = min(_JOINERS, max_batch)
    lengths = [(_PROMPTS[i % len(_PROMPTS)], _ANSWERS[i % len(_ANSWERS)]) for i in range(width + joiners)]
    lengths[width - 2] = span - 2, _LONG_ANSWER // 2  # crosses the span while it decodes
    lengths[width - 1] = min(span + span // 3 + 3, max(span + 6, most - MOST_AFTER_SPAN)), _LONG_ANSWER
    for i in range(width, len(lengths)):  # of unequal length, so that not every padding is a multiple of a block
        lengths[i] = span + 5 + 4 * (i - width), 9 - 2 * (i - width)
    return _with_chunks([_sequence(text_ids, i, *length, joins=i >= width) for i, length in enumerate(lengths)])


def plan_in_two_groups(text_ids: Sequence[int]) -> TrialPlan:
    """For rows: two short sequences and two long ones, more than `MOST_APART` tokens apart."""
    sequences = [_sequence(text_ids, i, n, _ANSWERS[i % len(_ANSWERS)]) for i, n in enumerate(_IN_TWO_GROUPS)]
    return replace(_with_chunks(sequences), is_for_rows=True)


def plan_of_alike(text_ids: Sequence[int]) -> TrialPlan:
    """For rows of full attention: sequences that begin alike, one of which joins. Their answers repeat tokens of the
    prompt, but for the last token."""
    common = _text(text_ids, 0, _IN_COMMON)
    sequences = []
    for number, n_apart in enumerate((5, 19, 11)):
        own = _text(text_ids, 17 * (number + 1), n_apart)
        again = common[_IN_COMMON - 3 * _REPEATED :][: 2 * _REPEATED]
        more = _text(text_ids, 29 * number, 1 + _MORE[number] + SECOND_ANSWER)
        ids = (*common, *own, *again, *more)
        n_prompt = _IN_COMMON + n_apart + _REPEATED
        sequences.append(TrialSequence(ids, n_prompt, _REPEATED + 1, joins=number == 2))
    return TrialPlan(tuple(sequences), chunk_tokens=LEAST_SHARED // 2 + 3, shares=True, is_for_rows=True)


def _with_chunks(sequences: Sequence[TrialSequence]) -> TrialPlan:
    longest = max(sequence.n_prompt for sequence in sequences)
    # Neither a whole prompt, nor half of one, nor a divisor of a window: cuts fall everywhere.
    return TrialPlan(tuple(sequences), chunk_tokens=max(4, 3 * longest // 5))


def _sequence(
    text_ids: Sequence[int], number: int, n_prompt: int, n_answer: int, *, joins: bool = False
) -> TrialSequence:
    n_tokens = n_prompt + n_answer + _MORE[number % len(_MORE)] + SECOND_ANSWER
    return TrialSequence(_text(text_ids, 17 * number, n_tokens), n_prompt, n_answer, joins)


def _text(text_ids: Sequence[int], start: int, n_tokens: int) -> tuple[int, ...]:
    # Each repetition of the text begins one token later, or a long sequence would repeat one short text.
    return tuple(text_ids[(start + i + i // len(text_ids)) % len(text_ids)] for i in range(n_tokens))


class _PlannedTokens:
    """Draws a sequence's planned tokens in order; mlx-lm draws one more than it outputs. Replaces the request's
    sampling, and implements `Sampling`."""

    processors: tuple[Any, ...] = ()
    error: Exception | None = None

    def __init__(self, planned: TrialSequence, n_prompt: int) -> None:
        self.planned = planned
        self.sampler = self
        self._ids = planned.ids[n_prompt:]
        self.start(0)

    def start(self, n_drawn: int) -> None:
        self._n_drawn = n_drawn

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._n_drawn += 1
        return mx.array([self._ids[min(self._n_drawn, len(self._ids)) - 1]])

    def take_back(self, n_tokens: int) -> None:
        self._n_drawn -= n_tokens


Logprobs = NDArray[np.float32]

IN_8_BITS: Final = "8 bits"
"""The precision of a float32 model whose caches have 8 bits. Keys that differ in the last place may round to different
codes, so a sequence in a batch differs from itself alone about as much as in half precision."""

_MOST_APART: Final = {"float32": 5e-3, IN_8_BITS: 0.05, "float16": 0.05, "bfloat16": 0.07}
"""Largest allowed difference between a sequence in a batch and the same one alone, by the model's precision: root mean
square of the difference of their log-probabilities, in standard deviations of those of the sequence alone."""

_TIMES_ROUNDING: Final = 4.0
"""A further limit, except in float32: so many times the difference that rounding makes for one sequence run alone in
steps. Among all architectures right modes were at most 1.3 times as far apart, attention after a shared prefix 2.6
times, and wrong modes at least 7 times."""

_SHARE_OF_STEPS: Final = 0.75
"""Except in float32, this share of all steps has to be right, so that a fault in every third step is seen."""

_ENOUGH_BYTES: Final = 1 << 50  # a trial is not about the pool


@dataclass(frozen=True)
class Limit:
    """How much a sequence may differ from itself alone.

    Attributes:
        apart: in the unit of `_MOST_APART`.
        at_every_step: whether it holds at every step, or at half of a sequence's steps and three quarters of all steps:
            in half precision a mixture of experts may choose another expert for one token.
    """

    apart: float
    at_every_step: bool

    @classmethod
    def of(cls, precision: str, rounding: float | None = None) -> "Limit":
        """`precision` is the dtype of the logits, or `IN_8_BITS`; `rounding` is the largest difference seen when
        sequences ran alone in steps, if known."""
        most = _MOST_APART.get(precision, _MOST_APART["float32"])
        # Where steps and one pass happen to round alike, any other rounding must not count as a fault.
        apart = most if rounding is None else min(most, max(most / 4, _TIMES_ROUNDING * rounding))
        return cls(apart, at_every_step=precision == "float32")


@dataclass(frozen=True)
class Found:
    """The faults that a trial found.

    Attributes:
        fresh: the fault of sequences without a restored prefix; ``None`` if there is none.
        restored: likewise, of sequences restored from their own caches.
        apart: the largest difference seen, in the unit of `_MOST_APART`.
        may_pass: whether the fault may pass by itself.
    """

    fresh: str | None
    restored: str | None
    apart: float
    may_pass: bool = False


def all_found(trials: Iterable[Found]) -> Found:
    """The first fault of each kind that several trials found."""
    found = list(trials)
    return Found(
        next((x.fresh for x in found if x.fresh is not None), None),
        next((x.restored for x in found if x.restored is not None), None),
        max(x.apart for x in found),
        any(x.may_pass for x in found),
    )


class Reference:
    """Every sequence alone and uncached, in `mlx_lm.generate`'s chunks: the standard for a batch."""

    def __init__(self, model: Any, plan: TrialPlan) -> None:
        self._alone = {sequence.ids: _alone(model, sequence) for sequence in plan.sequences}

    def apart(self, sequence: TrialSequence, n_tokens: int, logprobs: Logprobs) -> float:
        """The difference between `logprobs` after the sequence's first `n_tokens` tokens, its prompt at least, and
        those of the sequence alone."""
        alone = self._alone[sequence.ids][n_tokens - sequence.n_prompt]
        seen = np.isfinite(alone)
        spread = float(alone[seen].std()) or 1.0
        distance = math.sqrt(float(np.mean((alone[seen] - logprobs[seen]) ** 2))) / spread
        return distance if math.isfinite(distance) else math.inf


def may_pass(error: Exception) -> bool:
    """True if another try may end otherwise: MLX raises `RuntimeError` when memory is short."""
    return isinstance(error, (RuntimeError, MemoryError))


def try_plan(
    model: Any,
    loaded: LoadedModel,
    plan: TrialPlan,
    reference: Reference,
    *,
    max_batch: int,
    draft_ngram: bool,
    limit: Limit,
) -> Found:
    """Run `plan` in the mode of `loaded`; if that has memory, its sequences then continue from their own caches."""
    trial = _Trial(model, loaded, plan, max_batch=max_batch, draft_ngram=draft_ngram)
    fresh = trial.first_turn()
    fault, apart = _fault(fresh, reference, limit) if trial.error is None else (trial.error, math.inf)
    if fault is not None or not loaded.has_memory:
        trial.close()
        return Found(fault, None, apart, trial.may_pass)
    again = trial.second_turn()
    trial.close()
    if trial.error is not None:
        return Found(None, trial.error, math.inf, trial.may_pass)
    fault, apart_again = _fault(again, reference, limit)
    return Found(None, fault, max(apart, apart_again))


_Observed = tuple[TrialSequence, int, Logprobs]
"""A sequence, a number of its tokens, and the log-probabilities after them."""


def _fault(observed: Iterable[_Observed], reference: Reference, limit: Limit) -> tuple[str | None, float]:
    """The fault, if any, of the sequence that differs most from itself alone, and that difference. If the limit need
    not hold at every step, the steps of all sequences together are judged, too."""
    by_sequence: dict[TrialSequence, list[float]] = defaultdict(list)
    for sequence, n_tokens, logprobs in observed:
        by_sequence[sequence].append(reference.apart(sequence, n_tokens, logprobs))
    judge: Callable[[list[float]], float] = max if limit.at_every_step else median
    judged = [(judge(seen), f"a sequence of {sequence.n_prompt} tokens") for sequence, seen in by_sequence.items()]
    if not limit.at_every_step:
        steps = sorted(step for seen in by_sequence.values() for step in seen)
        judged.append((steps[int(_SHARE_OF_STEPS * len(steps))], "a quarter of the sequences' steps"))
    apart, where = max(judged)
    return (None if apart <= limit.apart else f"{where} is {apart:.2g} standard deviations from itself alone"), apart


class _Trial:
    def __init__(self, model: Any, loaded: LoadedModel, plan: TrialPlan, *, max_batch: int, draft_ngram: bool) -> None:
        self._plan = plan
        self._snapshots = bool(loaded.spec.snapshot_layers)
        self._observed: list[_Observed] = []
        self._caches: dict[TrialSequence, SequenceCache] = {}
        self.error: str | None = None
        self.may_pass = False
        self._engine = assemble(
            model,
            replace(loaded, tokenizer=cast(TokenizerPort, _NoText())),
            max_bytes=_ENOUGH_BYTES,
            max_batch=max_batch,
            prefill_tokens=plan.chunk_tokens,
            max_step_s=math.inf,
            draft_ngram=draft_ngram,
            make=partial(_WatchedEngine, self),
        )

    def close(self) -> None:
        self._engine.close()

    def planned(self, ids: tuple[int, ...]) -> TrialSequence:
        """The sequence that begins with these tokens."""
        return next(sequence for sequence in self._plan.sequences if sequence.ids[: len(ids)] == ids)

    def first_turn(self) -> list[_Observed]:
        """Some sequences from the start, and the others after each of those has a token."""
        at_once = [sequence for sequence in self._plan.sequences if not sequence.joins]
        uids = {self._submit(one, one.n_prompt, one.n_answer): one for one in at_once}
        while self.error is None and min((one.tokens for one in self._engine.progress().values()), default=1) < 1:
            self._step(uids)
        uids |= {self._submit(one, one.n_prompt, one.n_answer): one for one in self._plan.sequences if one.joins}
        return self._run(uids)

    def second_turn(self) -> list[_Observed]:
        """The sequences continue from their own caches, each from another place, beside one without a cache."""
        uids = {}
        *restored, fresh = self._plan.sequences
        for number, sequence in enumerate(restored):
            prefix = self._caches[sequence].up_to(self._place(sequence, number))
            uids[self._submit(sequence, sequence.n_second_prompt, SECOND_ANSWER, prefix)] = sequence
        uids[self._submit(fresh, fresh.n_second_prompt, SECOND_ANSWER)] = fresh
        return self._run(uids)

    def _place(self, sequence: TrialSequence, number: int) -> int:
        """Tokens to restore: up to the end of the first turn, up to its last prompt token, or up to another place."""
        places = (
            sequence.n_first,
            sequence.n_prompt - 1,
            sequence.checkpoint if self._snapshots else sequence.n_prompt,
        )
        return places[number % len(places)]

    def _submit(
        self, sequence: TrialSequence, n_prompt: int, n_answer: int, prefix: SequenceCache | None = None
    ) -> int:
        request = GenerationRequest(agent_id="trial", prompt="trial", max_tokens=n_answer)
        shares, at = ("trial",) if self._plan.shares else None, (sequence.checkpoint,)
        work = GenerationWork(request, sequence.ids[:n_prompt], prefix, shares=shares, checkpoints_at=at)
        return self._engine.submit(work)

    def _run(self, uids: dict[int, TrialSequence]) -> list[_Observed]:
        while self.error is None and self._engine.in_flight:
            self._step(uids)
        observed, self._observed = self._observed, []
        return observed

    def _step(self, uids: dict[int, TrialSequence]) -> None:
        for completion in self._engine.step():
            if completion.error is not None:
                self.error = str(completion.error)
            if completion.cache is not None:
                self._caches[uids[completion.uid]] = completion.cache

    def note(self, sequence: TrialSequence, n_tokens: int, logprobs: Any) -> None:
        """The log-probabilities after a sequence's first `n_tokens` tokens."""
        self._observed.append((sequence, n_tokens, np.asarray(logprobs.astype(mx.float32)).reshape(-1)))

    def broke(self, error: Exception) -> None:
        self.may_pass = self.may_pass or may_pass(error)
        self.error = self.error or one_line(error)


class _WatchedEngine(BlockPoolBatchEngine):
    """Its sequences output the tokens of the trial's plan, and the trial sees their log-probabilities."""

    def __init__(self, trial: _Trial, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._trial = trial

    def _make_sequence(self, uid: int, work: GenerationWork) -> EngineSequence:
        sequence = super()._make_sequence(uid, work)
        sequence.sampling = _PlannedTokens(self._trial.planned(work.prompt_ids), sequence.n_prompt)
        return sequence

    def _advance(self, outputs: Iterable[TokenOutput]) -> Iterator[CompletedGeneration]:
        outputs, n_new = list(outputs), Counter[int]()
        for output in outputs:
            sequence = self._scheduler.decoding[output.uid]
            assert isinstance(sequence.sampling, _PlannedTokens)
            self._trial.note(sequence.sampling.planned, sequence.n_tokens + n_new[output.uid], output.logprobs)
            n_new[output.uid] += 1
        return super()._advance(outputs)

    def _start_over(self, error: Exception) -> Iterator[CompletedGeneration]:
        self._trial.broke(error)
        return iter(())


class _NoText:
    """Replaces the tokenizer: no token ends a sequence, and nothing is decoded."""

    eos_ids: frozenset[int] = frozenset()

    def fork(self) -> "_NoText":
        return self

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def _alone(model: Any, sequence: TrialSequence) -> Logprobs:
    """Log-probabilities (tokens, vocabulary) after the last token of its prompt and each one that follows."""
    caches, after, n_last = make_prompt_cache(model), [], sequence.n_prompt - 1
    for start in range(0, len(sequence.ids), REFERENCE_CHUNK_TOKENS):
        ids = sequence.ids[start : start + REFERENCE_CHUNK_TOKENS]
        logits = model(mx.array([ids]), cache=caches)[0]
        mx.eval([cache.state for cache in caches])
        if start + len(ids) > n_last:
            logits = logits[max(0, n_last - start) :].astype(mx.float32)
            after.append(np.asarray(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    return np.concatenate(after)
