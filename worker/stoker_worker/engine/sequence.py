"""One sequence in the engine, from submission to its end, and the token ids that end it. Pure; engine thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Self

from stoker_shared.request import GenerationRequest
from stoker_shared.result import Logprobs, TokenLogprob
from stoker_worker.engine.generator import Generator, Sampling, Scorer, SequenceStart
from stoker_worker.engine.text import GrowingText, StopScanner
from stoker_worker.ports import (
    CompletedGeneration,
    EndedBy,
    GenerationTiming,
    GenerationWork,
    SequenceCache,
    SequenceProgress,
    Snapshot,
    Stage,
    TokenizerPort,
)


@dataclass(frozen=True)
class EndIds:
    """The token ids that end a sequence.

    Attributes:
        eos: the model's own, unless they are ignored. One that ends a sequence belongs to its transcript, because a
            chat template writes it too.
        stop: the request's own. One that ends a sequence does not belong to its transcript, like a stop string: so the
            transcript's tokens are those of the text.
    """

    eos: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()

    @classmethod
    def of(cls, request: GenerationRequest, eos_ids: frozenset[int]) -> Self:
        eos = frozenset() if request.ignore_eos else eos_ids
        return cls(eos, frozenset(request.stop_token_ids) - eos)

    @property
    def all(self) -> frozenset[int]:
        return self.eos | self.stop


@dataclass
class Sequence:
    """A sequence that waits, runs in the batch, or was preempted and waits again.

    Attributes:
        generated: tokens so far. All are in its cache, but a last one that was pending when the sequence was preempted.
        caches: its own while it waits: restored ones, or those it was preempted with.
        prefix: the tokens that it shares with other sequences in the batch, from `Generator.share`.
        n_reused: tokens of the prompt that were restored instead of prefilled.
        n_cached: tokens in its caches when it joined the batch.
        n_prefilled: tokens prefilled since then.
        ended_by: how it ended. A sequence whose last token is not yet in its cache stays until it is.
        breaks: how many steps broke while it ran alone.
        n_common: by uid of another sequence, the number of leading tokens that both prompts have.
        cut_at: places where its prefill stops for a snapshot, from which others with the same beginning continue.
        at_cuts: the snapshots taken there so far, by their tokens.
        scorer: scores its prompt during prefill; ``None`` if nobody asked for that.
        growing: its text since somebody first asked for it; a sequence with stop strings has its text in `stops`.
    """

    uid: int
    work: GenerationWork
    sampling: Sampling
    stops: StopScanner | None
    end_ids: EndIds
    generator_uid: int | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    caches: list[Any] | None = None
    prefix: Any = None
    n_reused: int = 0
    n_cached: int = 0
    n_prefilled: int = 0
    ended_by: EndedBy | None = None
    breaks: int = 0
    n_common: dict[int, int] = field(default_factory=dict)
    cut_at: set[int] = field(default_factory=set)
    at_cuts: dict[int, Snapshot] = field(default_factory=dict)
    scorer: Scorer | None = None
    growing: GrowingText | None = None
    submitted_at: float = field(default_factory=time.perf_counter)
    inserted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def n_prompt(self) -> int:
        return len(self.work.prompt_ids)

    @property
    def n_reusable(self) -> int:
        """Most tokens of its prompt that it may take over from others: a model has to see the last one."""
        return self.n_prompt - 1 if self.scorer is None else min(self.scorer.n_reusable, self.n_prompt - 1)

    @property
    def error(self) -> Exception | None:
        """The error that stops it. Those of its sampling and its guide no longer count once it has its last token."""
        drawing = (self.sampling, self.work.guide) if self.ended_by is None else ()
        errors = (source.error for source in (*drawing, self.scorer) if source is not None)
        return next((error for error in errors if error is not None), None)

    @property
    def ends_in_prefill(self) -> bool:
        """True if it wants no answer, and its prompt is prefilled but for the last token."""
        return self.work.request.max_tokens == 0 and self.n_cached + self.n_prefilled >= self.n_prompt - 1

    @property
    def n_shared(self) -> int:
        return 0 if self.prefix is None else int(self.prefix.n_tokens)

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + len(self.generated)

    @property
    def n_left(self) -> int:
        return self.work.request.max_tokens - len(self.generated)

    @property
    def n_kept(self) -> int:
        """Tokens of its answer that belong to the transcript: all, or those before a stop string or a stop token."""
        if self.ended_by != "stop":
            return len(self.generated)
        return len(self.generated) - 1 if self._scanner_that_found is None else self._scanner_that_found.cut()[1]

    @property
    def _scanner_that_found(self) -> StopScanner | None:
        """`stops`, if a stop string ended the sequence."""
        return self.stops if self.stops is not None and self.stops.found else None

    @property
    def _ids_of_text(self) -> list[int]:
        """Its tokens without the one that ended it."""
        return self.generated[:-1] if self.ended_by in ("eos", "stop") else self.generated

    @property
    def n_to_save(self) -> int:
        """Tokens whose cache may be saved after its end: a prompt without an answer is not fed its last one."""
        return self.n_prompt + self.n_kept - (self.work.request.max_tokens == 0)

    @property
    def comes_to(self) -> set[int]:
        """The places of `cut_at` where it has a snapshot or will take one."""
        return {n for n in self.cut_at if n in self.at_cuts or self.n_cached + self.n_prefilled < n < self.n_prompt}

    @property
    def checkpoints(self) -> tuple[Snapshot, ...]:
        """Its snapshots for other prompts, to be returned with its cache."""
        return tuple(self.at_cuts[n] for n in self.work.checkpoints_at if n in self.at_cuts)

    def note_prefilled(self, n_tokens: int, take_snapshot: Callable[[int], Snapshot]) -> None:
        """A segment of its prefill has ended, `n_tokens` after it joined: take the snapshots that are wanted there."""
        at = self.n_cached + n_tokens
        is_saved_here = self.work.is_saved and at == self.n_prompt - 1
        if is_saved_here or at in self.cut_at:
            snapshot = take_snapshot(at)
            if is_saved_here:
                self.snapshots.append(snapshot)
            if at in self.cut_at:
                self.at_cuts[at] = snapshot

    def take_prefix(self, prefix: SequenceCache, caches: list[Any]) -> None:
        """Take over `caches`, which hold its restored prefix."""
        if prefix.n_tokens == self.n_prompt - 1:
            self.snapshots += prefix.snapshots[-1:]  # nothing is prefilled before this point
        self.caches, self.n_cached = caches, prefix.n_tokens
        self.n_reused = prefix.n_tokens

    def take_beginning(self, caches: list[Any], n_tokens: int, of: "Sequence") -> None:
        """Take over `caches`, which hold the first `n_tokens` tokens of its prompt. `of` has prefilled them."""
        self.n_reused += n_tokens - self.n_cached
        self.caches, self.n_cached = caches, n_tokens
        for n in (n for n in of.at_cuts if n <= n_tokens):  # other sequences may begin alike, too
            self.cut_at.add(n)
            self.at_cuts[n] = of.at_cuts[n]
        if self.work.is_saved and n_tokens == self.n_prompt - 1 and n_tokens in self.at_cuts:
            self.snapshots.append(self.at_cuts[n_tokens])  # nothing is prefilled before this point

    def join(self, generator: Generator) -> None:
        """Go into the generator, with the tokens that are not in its caches."""
        if self.work.guide is not None:
            self.work.guide.start(self.generated)
        ids = [*self.work.prompt_ids, *self.generated]
        # Cut just before the prompt's last token, too: there a snapshot is taken.
        inner = {n for n in (*self.cut_at, self.n_prompt - 1) if self.n_cached < n < self.n_prompt}
        cuts = sorted({self.n_cached, *inner, len(ids)})
        self.generator_uid = generator.insert(
            SequenceStart(
                segments=[ids[start:end] for start, end in pairwise(cuts)],
                caches=self.caches,
                cached_ids=ids[: self.n_cached],
                max_tokens=max(1, self.n_left),
                sampler=self.sampling.sampler,
                processors=self.sampling.processors,
                prefix=self.prefix,
                guide=self.work.guide,
                end_ids=self.end_ids.all,
                scorer=self.scorer,
            )
        )
        self.caches, self.n_prefilled = None, 0

    def restart(self) -> None:
        """Drop all caches, to start over from the tokens alone."""
        self.generator_uid, self.caches, self.prefix, self.n_cached, self.n_reused = None, None, None, 0, 0
        self.snapshots.clear()
        self.n_common.clear()
        self.at_cuts.clear()
        self.sampling.start(len(self.generated))
        if self.scorer is not None:
            self.scorer.restart()

    def add(self, token: int) -> None:
        """Add `token` to the answer, and note whether the sequence ends with it."""
        self.generated.append(token)
        is_end = token in self.end_ids.all
        if not is_end and self.stops and self.stops.add(token):
            self.ended_by = "stop"
        elif is_end or self.n_left <= 0:
            is_cut = self.stops is not None and self.stops.end()
            if is_cut or token in self.end_ids.stop:
                self.ended_by = "stop"
            else:
                self.ended_by = "eos" if is_end else "length"

    def text(self, tokenizer: TokenizerPort) -> str:
        """As `GenerationEnginePort.text`."""
        if self.stops is not None:
            return self.stops.text
        self.growing = self.growing or GrowingText(tokenizer)
        self.growing.add(self._ids_of_text[self.growing.n_tokens :])
        return self.growing.text

    def progress(self, stage: Stage) -> SequenceProgress:
        return SequenceProgress.since(self.first_token_at, stage, len(self.generated))

    def completion(
        self,
        outcome: Literal["finished", "cancelled", "failed"],
        tokenizer: TokenizerPort,
        *,
        cache: SequenceCache | None = None,
        error: Exception | None = None,
    ) -> CompletedGeneration:
        finished, carry_text = outcome == "finished", ""
        if finished and self._scanner_that_found is not None:
            text, _, carry_text = self._scanner_that_found.cut()
        else:
            text = tokenizer.decode(self._ids_of_text)
        return CompletedGeneration(
            uid=self.uid,
            outcome=outcome,
            generated_ids=tuple(self.generated),
            text=text,
            ended_by=self.ended_by if finished else None,
            stop_string=self._scanner_that_found.found if finished and self._scanner_that_found else None,
            kept=self.n_kept if finished else 0,
            carry_text=carry_text,
            cache=cache,
            cached_tokens=self.n_reused,
            logprobs=Logprobs(content=self.logprobs) if self.logprobs else None,
            prompt_logprobs=self.scorer.result() if self.scorer is not None and finished else None,
            timing=self._timing(),
            error=error,
        )

    def _timing(self) -> GenerationTiming:
        now = time.perf_counter()
        inserted = self.inserted_at or now
        first = self.first_token_at or now
        return GenerationTiming(waited_s=inserted - self.submitted_at, prefill_s=first - inserted, decode_s=now - first)
