"""The rows that decode: each pass over them feeds every row's next token and draws the one after it. Engine thread.

Owns the order of the rows, their next tokens and their ends. A pass is dispatched before the tokens of the pass before
it are read, so the model does not wait for Python.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, TokenBuffer, make_prompt_cache

from stoker_worker.engine.generator import TakenOut, TokenOutput
from stoker_worker.engine.rows.layer_caches import Step, StepCache
from stoker_worker.engine.rows.room import MOST_SHARED_TOKENS
from stoker_worker.engine.rows.row_group import RowGroup
from stoker_worker.models.cache_probe import leaves, nested


@dataclass(eq=False)
class Row:
    """
    Attributes:
        tokens: those in its cache.
        sampler, processors: as in `SequenceStart`.
        context: the tokens as an array, for processors.
        has_generated: whether its next token was generated; until then that is the last one of the prompt.
    """

    uid: int
    tokens: list[int]
    max_tokens: int
    sampler: Any
    processors: Sequence[Any]
    context: Any = None
    has_generated: bool = False
    n_generated: int = 0

    @property
    def n_left(self) -> int:
        return self.max_tokens - self.n_generated


@dataclass(frozen=True)
class Joiner:
    """A row whose caches hold its prompt without `last_token`."""

    row: Row
    caches: list[Any]
    last_token: int


class DecodeBatch:
    def __init__(self, model: Any, *, eos_ids: frozenset[int]) -> None:
        self._model = model
        self._eos_ids = eos_ids
        self._nesting = make_prompt_cache(model)
        self._is_full = [type(cache) is KVCache for cache in leaves(self._nesting)]
        self._groups: list[RowGroup] = []
        self._rows: list[list[Row]] = []  # of each group
        self._others: list[Any] = []  # mlx-lm's batch caches of windows and recurrent layers
        self._step = Step(self._groups)
        self._step_caches = [StepCache(self._step, layer) for layer in range(sum(self._is_full))]
        self._next_tokens: Any = None  # (rows,)
        self._logprobs: Any = None  # (rows, vocabulary), from which the next tokens were drawn; zeros for a new row

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self._groups) + sum(int(cache.nbytes) for cache in self._others)

    def _order(self) -> list[Row]:
        return [row for rows in self._rows for row in rows]

    # --- joining ---

    def join(self, joiners: Sequence[Joiner]) -> None:
        before = self._order()
        self._place(joiners)
        for joiner in joiners:
            if joiner.row.processors:
                joiner.row.context = TokenBuffer(list(joiner.row.tokens))
        others = zip(*(self._split(joiner.caches)[1] for joiner in joiners), strict=True)
        merged = [caches[0].merge(list(caches)) for caches in others]
        tokens = mx.array([joiner.last_token for joiner in joiners], mx.uint32)
        if before:
            for cache, more in zip(self._others, merged, strict=True):
                cache.extend(more)
            self._next_tokens = mx.concatenate([self._next_tokens, tokens])
            if self._logprobs is not None:
                logprobs = mx.zeros((len(joiners), self._logprobs.shape[1]), self._logprobs.dtype)
                self._logprobs = mx.concatenate([self._logprobs, logprobs])
        else:
            self._others, self._next_tokens = merged, tokens
        self._reorder([*before, *(joiner.row for joiner in joiners)])

    def _place(self, joiners: Sequence[Joiner]) -> None:
        """Put each joiner into a group; one that fits into none founds one."""
        joining: dict[int, list[Joiner]] = {}
        for joiner in sorted(joiners, key=lambda joiner: len(joiner.row.tokens)):
            n_tokens = len(joiner.row.tokens)
            number = next((i for i, group in enumerate(self._groups) if group.takes(n_tokens)), None)
            if number is None or n_tokens > MOST_SHARED_TOKENS:
                self._groups.append(RowGroup(self._split(joiner.caches)[0], joiner.row.n_left + 1))
                self._rows.append([joiner.row])
            else:
                joining.setdefault(number, []).append(joiner)
        for number, together in joining.items():
            n_left = max(joiner.row.n_left for joiner in together) + 1
            self._groups[number].add([self._split(joiner.caches)[0] for joiner in together], n_left)
            self._rows[number] += [joiner.row for joiner in together]

    # --- a step ---

    def step(self) -> list[TokenOutput]:
        """Feed each row's next token; returns those tokens, which are in the rows' caches now."""
        order, fed, logprobs = self._order(), self._next_tokens, self._logprobs
        self._dissolve_outgrown()
        self._step.begin()
        logits = self._model(fed[:, None], cache=self._join(self._step_caches, self._others))[:, -1, :]
        contexts: list[mx.array] = []
        logits = _processed(order, fed, logits, contexts)
        self._logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._next_tokens = _drawn(order, self._logprobs)
        mx.async_eval(self._next_tokens, self._logprobs, *contexts)  # type: ignore[no-untyped-call]
        outputs, ended = [], []
        for index, (row, token) in enumerate(zip(order, fed.tolist(), strict=True)):
            row.tokens.append(token)
            if not row.has_generated:
                row.has_generated = True
                continue
            row.n_generated += 1
            is_last = token in self._eos_ids or row.n_left <= 0
            outputs.append(TokenOutput(row.uid, token, logprobs[index], self._caches(row) if is_last else None))
            if is_last:
                ended.append(row)
        self._drop(ended)
        return outputs

    def _dissolve_outgrown(self) -> None:
        for number, group in enumerate(self._groups):
            if group.is_outgrown:
                rows = self._rows[number]
                self._groups[number : number + 1] = [
                    RowGroup(group.row(i), rows[i].n_left + 1) for i in range(len(rows))
                ]
                self._rows[number : number + 1] = [[row] for row in rows]
                return  # one a step

    # --- leaving ---

    def take_out(self, uid: int) -> TakenOut:
        row, index = self._find(uid)
        caches = self._caches(row)
        mx.eval([cache.state for cache in leaves(caches) if not cache.empty()])
        pending = int(self._next_tokens[index].item()) if row.has_generated else None
        logprobs = self._logprobs[index] if row.has_generated else None
        self._drop([row])
        return TakenOut(caches, len(row.tokens), pending, logprobs)

    def remove(self, uid: int) -> None:
        self._drop([self._find(uid)[0]])

    def caches(self, uid: int) -> list[Any]:
        """A row's own caches, not evaluated."""
        return self._caches(self._find(uid)[0])

    def _find(self, uid: int) -> tuple[Row, int]:
        return next((row, index) for index, row in enumerate(self._order()) if row.uid == uid)

    def _caches(self, row: Row) -> list[Any]:
        index = self._order().index(row)
        group, rows = next(pair for pair in zip(self._groups, self._rows, strict=True) if row in pair[1])
        return self._join(group.row(rows.index(row)), [cache.extract(index) for cache in self._others])

    def _drop(self, leaving: Sequence[Row]) -> None:
        before = self._order()
        for number in reversed(range(len(self._groups))):
            group, rows = self._groups[number], self._rows[number]
            gone = [row for row in leaving if row in rows]
            if len(gone) == len(rows):
                del self._groups[number], self._rows[number]
                continue
            for row in gone:
                index = rows.index(row)
                rows[index] = rows[-1]
                rows.pop()
                group.remove(index)
            group.shrink()
        self._reorder(before)

    # --- order ---

    def _reorder(self, known: list[Row]) -> None:
        """Bring next tokens, log-probabilities and the other layers from the order `known` into that of the groups."""
        order = self._order()
        if not order:
            self._next_tokens, self._logprobs, self._others = None, None, []
        elif order != known:
            where = {row.uid: index for index, row in enumerate(known)}
            indices = [where[row.uid] for row in order]
            self._next_tokens = self._next_tokens[mx.array(indices)]
            if self._logprobs is not None:
                self._logprobs = self._logprobs[mx.array(indices)]
            for cache in self._others:
                cache.filter(indices)

    def _split(self, caches: Iterable[Any]) -> tuple[list[KVCache], list[Any]]:
        """Caches of full attention, and the others."""
        pairs = list(zip(leaves(caches), self._is_full, strict=True))
        return [cache for cache, is_full in pairs if is_full], [cache for cache, is_full in pairs if not is_full]

    def _join(self, full: Iterable[Any], others: Iterable[Any]) -> list[Any]:
        """The opposite of `_split`."""
        full, others = iter(full), iter(others)
        return nested(self._nesting, (next(full) if is_full else next(others) for is_full in self._is_full))


def _processed(order: list[Row], fed: mx.array, logits: mx.array, contexts: list[mx.array]) -> mx.array:
    if not any(row.processors for row in order):
        return logits
    processed = []
    for index, row in enumerate(order):
        row_logits = logits[index : index + 1]
        if row.processors:
            context = row.context.update_and_fetch(fed[index : index + 1])
            contexts.append(context)
            for processor in row.processors:
                row_logits = processor(context, row_logits)
        processed.append(row_logits)
    return mx.concatenate(processed)


def _drawn(order: list[Row], logprobs: mx.array) -> mx.array:
    drawn = mx.argmax(logprobs, axis=-1)
    if all(row.sampler is None for row in order):
        return drawn
    return mx.concatenate(
        [
            (row.sampler(logprobs[i : i + 1]) if row.sampler else drawn[i : i + 1]).astype(mx.uint32)
            for i, row in enumerate(order)
        ]
    )
