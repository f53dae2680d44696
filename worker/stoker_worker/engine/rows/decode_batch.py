"""The rows that decode: each pass over them feeds every row's next token and draws the one after it. Engine thread.

Owns the order of the rows, their next tokens and their ends. A pass is dispatched before the tokens of the pass before
it are read, so the model does not wait for Python. There are two exceptions: a pass with drafts, and the pass after the
first tokens of a batch, because on a CPU dispatching a pass takes nearly as long as the pass.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from stoker_worker.engine.generator import TakenOut, TokenOutput
from stoker_worker.engine.rows.attention import Step, StepCache
from stoker_worker.engine.rows.groups import RowGroups
from stoker_worker.engine.rows.row import Drafts, Row, drawn, processed
from stoker_worker.engine.rows.shared_prefix import SharedPrefix, split
from stoker_worker.engine.sampling import Place, guided
from stoker_worker.models.cache_probe import leaves, nested


class DecodeBatch:
    def __init__(self, model: Any, *, draft_ngram: bool = False) -> None:
        self._model = model
        self._nesting = make_prompt_cache(model)
        self._is_full = [type(cache) is KVCache for cache in leaves(self._nesting)]
        self.drafts = Drafts() if draft_ngram and all(self._is_full) else None
        self._groups = RowGroups()
        self._others: list[Any] = []  # mlx-lm's batch caches of windows and recurrent layers
        self._step = Step(self._groups.groups)
        self._step_caches = [StepCache(self._step, layer) for layer in range(sum(self._is_full))]
        self._next_tokens: Any = None  # (rows,)
        self._logprobs: Any = None  # (rows, vocabulary), from which the next tokens were drawn; zeros for a new row
        self._undispatched: list[mx.array] = []  # arrays of the pass before, if the first tokens were output before it

    def __len__(self) -> int:
        return len(self._groups.order())

    @property
    def prefixes(self) -> list[SharedPrefix | None]:
        return self._groups.prefixes

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' own caches, without their prefixes."""
        return self._groups.nbytes + sum(int(cache.nbytes) for cache in self._others)

    # --- joining ---

    def join(self, rows: Sequence[Row], caches: Sequence[list[Any]], last_tokens: list[int]) -> None:
        """`caches` hold each row's prompt after its prefix and without its last token."""
        before, of_rows = self._groups.order(), [self._split(own) for own in caches]
        self._groups.place((row, full) for row, (full, _) in zip(rows, of_rows, strict=True))
        for row in rows:
            row.begin_context()
        of_layers = zip(*(others for _, others in of_rows), strict=True)
        merged = [of_layer[0].merge(list(of_layer)) for of_layer in of_layers]
        tokens = mx.array(last_tokens, mx.uint32)
        if before:
            for cache, more in zip(self._others, merged, strict=True):
                cache.extend(more)
            self._next_tokens = mx.concatenate([self._next_tokens, tokens])
            if self._logprobs is not None:
                logprobs = mx.zeros((len(rows), self._logprobs.shape[1]), self._logprobs.dtype)
                self._logprobs = mx.concatenate([self._logprobs, logprobs])
        else:
            self._others, self._next_tokens = merged, tokens
        self._reorder([*before, *rows])

    # --- a step ---

    def step(self) -> list[TokenOutput]:
        """Feed each row's next token, and drafts of those after it; returns those that are in the rows' caches now."""
        mx.async_eval(*self._undispatched)  # type: ignore[no-untyped-call]
        self._groups.dissolve_outgrown()
        before = self._groups.order()
        drafts = self.drafts.of_step(before, self._next_tokens) if self.drafts else {}
        if drafts:
            self._groups.set_apart(drafts)
            self._reorder(before)
        order, fed, logprobs = self._groups.order(), self._next_tokens, self._logprobs
        inputs, of_inputs = fed, order
        if drafts:
            pairs = list(zip(order, fed.tolist(), strict=True))
            inputs = mx.array([x for row, token in pairs for x in (token, *drafts.get(row, ()))], mx.uint32)
            of_inputs = [row for row in order for _ in range(1 + len(drafts.get(row, ())))]
        self._step.begin([1 + len(drafts.get(group.rows[0], ())) for group in self._groups.groups])
        logits = self._model(inputs[:, None], cache=self._join(self._step_caches, self._others))[:, -1, :]
        contexts: list[mx.array] = []
        logits = processed(of_inputs, inputs, logits, contexts)
        if any(row.guide for row in order):
            mx.async_eval(logits, *contexts)  # type: ignore[no-untyped-call]
            logits = guided(logits, _places(of_inputs, order, fed))
        self._logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._next_tokens = drawn(of_inputs, self._logprobs)
        of_pass = [self._next_tokens, self._logprobs, *contexts]
        self._undispatched = of_pass if _are_first_tokens(order) else []
        if not self._undispatched:
            mx.async_eval(*of_pass)  # type: ignore[no-untyped-call]
        accepted = self._accept(order, drafts) if drafts else {}
        outputs, ended = [], []
        for index, (row, token) in enumerate(zip(order, fed.tolist(), strict=True)):
            right = accepted.get(row, [])
            row.tokens += [token, *(drafted for drafted, _ in right)]
            row.take_back(len(drafts.get(row, ())) - len(right))
            new = [(token, logprobs[index]), *right] if row.has_generated else []
            row.has_generated = True
            for one, of_one in new:
                row.n_generated += 1
                is_last = one in row.end_ids or row.n_left <= 0
                outputs.append(TokenOutput(row.uid, one, of_one, self._caches(row) if is_last else None))
                if is_last:
                    ended.append(row)
        self._drop(ended)
        return outputs

    def _accept(self, order: list[Row], drafts: dict[Row, list[int]]) -> dict[Row, list[tuple[int, mx.array]]]:
        """Keep the right part of each draft, and the token after it as the row's next one.

        Returns:
            the tokens that are right, each with the log-probabilities that its row drew it from.
        """
        assert self.drafts is not None
        own, kept, found, first = self._next_tokens.tolist(), [], {}, 0
        for row in order:
            draft, n = drafts.get(row, []), 0
            if draft:
                n = self.drafts.accepted(row, draft, own[first:])
                self._groups.trim(row, len(draft) - n)
            found[row] = [(token, self._logprobs[first + i]) for i, token in enumerate(draft[:n])]
            kept.append(first + n)
            first += 1 + len(draft)
        self._next_tokens, self._logprobs = self._next_tokens[mx.array(kept)], self._logprobs[mx.array(kept)]
        return found

    # --- leaving ---

    def take_out(self, uid: int) -> TakenOut:
        row, index = self._find(uid)
        own, others = self._own_caches(row)
        mx.eval([cache.state for cache in (*own, *others) if not cache.empty()])
        caches = self._whole(row, own, others)
        pending = int(self._next_tokens[index].item()) if row.has_generated else None
        logprobs = self._logprobs[index] if row.has_generated else None
        self._drop([row])
        return TakenOut(caches, len(row.tokens), pending, logprobs)

    def remove(self, uid: int) -> None:
        self._drop([self._find(uid)[0]])

    def caches(self, uid: int) -> list[Any]:
        """A row's caches from its first token on, not evaluated."""
        return self._caches(self._find(uid)[0])

    def share(self, uid: int, n_tokens: int) -> SharedPrefix:
        """Let other rows refer to the first `n_tokens` tokens of a row, or to those that others refer to already. All
        layers are full attention."""
        row, before = self._find(uid)[0], self._groups.order()
        if row.prefix is None:
            caches = self._caches(row)
            self._groups.remove([row])
            row.prefix, rest = split(caches, n_tokens)
            self._groups.place([(row, list(leaves(rest)))])
            self._reorder(before)
        return row.prefix

    def _find(self, uid: int) -> tuple[Row, int]:
        return next((row, index) for index, row in enumerate(self._groups.order()) if row.uid == uid)

    def _caches(self, row: Row) -> list[Any]:
        return self._whole(row, *self._own_caches(row))

    def _own_caches(self, row: Row) -> tuple[list[KVCache], list[Any]]:
        """Those after its prefix, and those that are not of full attention."""
        index = self._groups.order().index(row)
        return self._groups.of(row).own(row), [cache.extract(index) for cache in self._others]

    def _whole(self, row: Row, own: list[KVCache], others: list[Any]) -> list[Any]:
        """A row's caches from its first token on. Its prefix is not copied before they are evaluated."""
        return self._join(own if row.prefix is None else row.prefix.whole(own), others)

    def _drop(self, leaving: Sequence[Row]) -> None:
        before = self._groups.order()
        self._groups.remove(leaving)
        self._reorder(before)

    # --- order ---

    def _reorder(self, known: list[Row]) -> None:
        """Bring next tokens, log-probabilities and the other layers from the order `known` into that of the groups."""
        order = self._groups.order()
        if not order:
            self._next_tokens, self._logprobs, self._others, self._undispatched = None, None, [], []
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


def _are_first_tokens(order: Sequence[Row]) -> bool:
    """True if the tokens to be read are the first of all rows. Beside others, the next step would take twice as
    long."""
    return any(row.has_generated for row in order) and not any(row.n_generated for row in order)


def _places(of_inputs: Sequence[Row], order: Sequence[Row], fed: Any) -> list[Place]:
    """The rows with a guide; each has one input. Waits for the pass before."""
    pairs = zip(order, fed.tolist(), strict=True)
    return [
        (of_inputs.index(row), row.guide, token if row.has_generated else None) for row, token in pairs if row.guide
    ]
