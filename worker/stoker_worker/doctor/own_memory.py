"""Self-test: a turn is prefilled, saved, restored from disk and continued, as an agent's is; in a store of its own."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from stoker_worker.doctor.answers import compared
from stoker_worker.doctor.check import Check, Finding, fail, ok
from stoker_worker.doctor.sequences import Texts, run, work_of
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import (
    CompletedGeneration,
    Delivery,
    GenerationEnginePort,
    LoadedModel,
    Restored,
    Transcript,
    Turn,
)

_AGENT: Final = "doctor"
_TRIED_TOKENS: Final = 256
_PREFILL_S: Final = 8.0
_MOST_TOKENS: Final = 4096
_ANSWER: Final = 8
_MORE: Final = 24
_MB: Final = 2**20


class OwnMemory:
    """One agent's two turns. Its stores have no RAM cache: what is restored comes from files."""

    def __init__(self, engine: GenerationEnginePort, model: LoadedModel, folder: Path) -> None:
        """
        Args:
            folder: an empty folder on the store's disk.
        """
        self._engine = engine
        self._model = model
        self._folder = folder
        self._texts = Texts(model)
        self._first: CompletedGeneration | None = None
        self._prompt: tuple[int, ...] = ()
        self._restored: Restored | None = None

    def checks(self) -> Iterator[Check]:
        yield Check("prefill", self._prefill)
        if self._first is None:
            return
        if not self._model.has_memory:
            yield Check("restore", lambda: ok("not applicable: this model runs without memory"))
            return
        yield Check("save", self._save)
        yield Check("restore", self._restore)
        if self._restored is not None:
            yield Check("restored equals fresh", self._restored_equals_fresh)

    def _prefill(self) -> Finding:
        """A prompt that takes about `_PREFILL_S`, by the rate of a short one."""
        tried = run(self._engine, work_of(self._ids(_TRIED_TOKENS), 1))
        rate = len(self._ids(_TRIED_TOKENS)) / max(tried.timing.prefill_s, 1e-6)
        self._prompt = self._ids(max(_TRIED_TOKENS, min(_MOST_TOKENS, int(_PREFILL_S * rate))))
        self._first = run(self._engine, work_of(self._prompt, _ANSWER, save_from=0))
        seconds = max(self._first.timing.prefill_s, 1e-6)
        n, rate = len(self._prompt), len(self._prompt) / seconds
        line = f"{rate:.0f} tokens/s: {n} tokens in {seconds:.2f} s"
        return ok(line, prompt_tokens=n, prefill_s=round(seconds, 3), tokens_per_s=round(rate, 1))

    def _save(self) -> Finding:
        assert self._first is not None
        began = time.perf_counter()
        with closing(AgentCacheStore(self._folder)) as store:
            opened = time.perf_counter()
            store.save(
                Turn(
                    base=store.open_agent(_AGENT),
                    delivery=Delivery(job_id=_AGENT, created_at="0"),
                    transcript=self._transcript(self._first),
                    model=self._model,
                    cache_salt=None,
                    cache=self._first.cache,
                    result={},
                )
            )
            seconds = time.perf_counter() - opened
        n_bytes = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        line = f"{n_bytes / _MB / seconds:.0f} MB/s: {n_bytes / _MB:.1f} MB in {seconds:.3f} s"
        return ok(line, bytes=n_bytes, save_s=round(seconds, 4), open_s=round(opened - began, 4))

    def _restore(self) -> Finding:
        """From disk into the engine's memory; the file cache of the system may still have it."""
        prompt = self._second_prompt()
        with closing(AgentCacheStore(self._folder)) as store:
            agent = store.open_agent(_AGENT)
            began = time.perf_counter()
            restored = store.restore(prompt, agent=agent, model=self._model, salt=None, max_tokens=_ANSWER)
            seconds = time.perf_counter() - began
        if restored.prefix is None:
            return fail(f"nothing was restored: {restored.miss_reason}", "send this file to the project")
        self._restored = restored
        n_tokens = restored.prefix.n_tokens
        spec = self._model.spec
        n_bytes = n_tokens * spec.bytes_per_token + spec.snapshot_bytes(n_tokens)
        line = f"{n_bytes / _MB / seconds:.0f} MB/s: {n_tokens} tokens, {n_bytes / _MB:.1f} MB in {seconds:.3f} s"
        return ok(line, tokens=n_tokens, bytes=n_bytes, restore_s=round(seconds, 4),
                  mb_per_s=round(n_bytes / _MB / seconds, 1))  # fmt: skip

    def _restored_equals_fresh(self) -> Finding:
        assert self._restored is not None
        prompt, prefix = self._second_prompt(), self._restored.prefix
        restored = run(self._engine, work_of(prompt, _ANSWER, prefix=prefix))
        fresh = run(self._engine, work_of(prompt, _ANSWER))
        if not restored.cached_tokens:
            return fail("the engine did not use the restored prefix", "send this file to the project")
        return compared(self._model, [restored.generated_ids], [fresh.generated_ids], "restored", "fresh")

    def _ids(self, n_tokens: int) -> tuple[int, ...]:
        return self._texts.ids(self._texts.fitting(n_tokens, 2 * _ANSWER + _MORE))

    def _second_prompt(self) -> tuple[int, ...]:
        assert self._first is not None
        return (*self._prompt, *self._first.generated_ids[: self._first.kept], *self._texts.ids(_MORE, begin=1))

    def _transcript(self, done: CompletedGeneration) -> Transcript:
        ids = (*self._prompt, *done.generated_ids[: done.kept])
        text = self._model.tokenizer.decode(ids)
        return Transcript(ids, self._model.tokenizer_fingerprint, messages=None, text=text, ended_by="length")
