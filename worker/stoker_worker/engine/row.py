"""One sequence in the engine, from submission to its end. Owns what is known of it; engine thread."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from stoker_shared.result import Logprobs, TokenLogprob
from stoker_worker.engine.generator import Generator, RowStart
from stoker_worker.engine.growing_text import GrowingText
from stoker_worker.engine.sampling import RowSampling
from stoker_worker.engine.stop_scanner import StopScanner
from stoker_worker.ports import EndedBy, GenerationTiming, GenerationWork, RowProgress, Snapshot, Stage, TextCodec


@dataclass
class Row:
    """A row waits, is in the batch, or was set aside and waits again.

    Attributes:
        generated: tokens said so far; all of them are in the row's cache, but for a last one that was `pending` when
            the row was set aside.
        caches: the row's own caches while it waits with some: restored ones, or those it was set aside with.
        n_reused: how many of the prompt's tokens came restored, and were not prefilled for this answer.
        n_cached: how many of its tokens were in its caches when it joined the batch.
        n_prefilled: how many have come in since.
        ended_by: how it ended; a row whose last token is not in its cache yet stays until it is.
        breaks: how often it broke a step in which it was alone.
        growing: its text, once somebody has asked for it; a row with stop strings has it in `stops`.
    """

    uid: int
    work: GenerationWork
    sampling: RowSampling
    stops: StopScanner | None
    generator_uid: int | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    caches: list[Any] | None = None
    n_reused: int = 0
    n_cached: int = 0
    n_prefilled: int = 0
    ended_by: EndedBy | None = None
    breaks: int = 0
    growing: GrowingText | None = None
    submitted_at: float = field(default_factory=time.perf_counter)
    inserted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def n_prompt(self) -> int:
        return len(self.work.prompt_ids)

    @property
    def n_tokens(self) -> int:
        """Prompt and answer so far."""
        return self.n_prompt + len(self.generated)

    @property
    def n_left(self) -> int:
        """Tokens it may still say."""
        return self.work.request.max_tokens - len(self.generated)

    @property
    def wants_snapshot(self) -> bool:
        """Whether its caches hold just what comes before the last prompt token, and are to be saved."""
        return self.work.save_from is not None and self.n_cached + self.n_prefilled == self.n_prompt - 1

    def take_prefix(self, caches: list[Any]) -> None:
        """Its restored prefix is in `caches` now: the arrays it came in may go."""
        prefix = self.work.prefix
        assert prefix is not None
        if prefix.states and prefix.n_tokens == self.n_prompt - 1:
            self.snapshots.append(Snapshot(prefix.n_tokens, prefix.states))  # nothing is prefilled before this point
        self.caches, self.n_cached = caches, prefix.n_tokens
        self.n_reused = prefix.n_tokens
        self.work = replace(self.work, prefix=None)

    def join(self, generator: Generator) -> None:
        """Go into the generator, with the tokens that its caches do not hold."""
        ids = [*self.work.prompt_ids, *self.generated]
        # Cut just before the prompt's last token: there a snapshot is taken.
        cut = max(self.n_cached, self.n_prompt - 1)
        self.generator_uid = generator.insert(
            RowStart(
                segments=[part for part in (ids[self.n_cached : cut], ids[cut:]) if part],
                caches=self.caches,
                cached_ids=ids[: self.n_cached],
                max_tokens=max(1, self.n_left),
                sampler=self.sampling.sampler,
                processors=self.sampling.processors,
            )
        )
        self.caches, self.n_prefilled = None, 0

    def restart(self) -> None:
        """Forget all caches: the row begins again with nothing but its tokens."""
        self.work = replace(self.work, prefix=None)
        self.generator_uid, self.caches, self.n_cached, self.n_reused = None, None, 0, 0
        self.snapshots.clear()
        self.sampling.start(len(self.generated))

    def all_logprobs(self) -> Logprobs | None:
        return Logprobs(content=self.logprobs) if self.work.request.logprobs else None

    def text(self, codec: TextCodec) -> str:
        """As `GenerationEnginePort.text`."""
        if self.stops is not None:
            return self.stops.text
        self.growing = self.growing or GrowingText(codec)
        ended = bool(self.generated) and self.generated[-1] in codec.eos_ids
        self.growing.add(self.generated[self.growing.n_tokens : len(self.generated) - ended])
        return self.growing.text

    def progress(self, stage: Stage) -> RowProgress:
        return RowProgress.since(self.first_token_at, stage, len(self.generated))

    def timing(self) -> GenerationTiming:
        now = time.perf_counter()
        inserted = self.inserted_at or now
        first = self.first_token_at or now
        return GenerationTiming(waited_s=inserted - self.submitted_at, prefill_s=first - inserted, decode_s=now - first)
