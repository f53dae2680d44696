"""An engine without a model: deterministic, at a chosen speed, for tests of services that use stoker, and of stoker.

It implements `GenerationEnginePort` like the real one and imports no MLX. Its tokens are bytes; its "cache" holds each
token's own id, and a restored prefix that does not match the prompt fails the sequence: whatever the agent memory does
wrong shows up as a failed job.

What it answers depends on the last line of the prompt (or of the last message):

* ``say TEXT``: TEXT, then end of sequence;
* ``fail WHY``: the sequence fails in the engine;
* ``break WHY``: the engine itself breaks, with every sequence in it;
* ``crash``: the process kills itself as ``kill -9`` would;
* anything else: words made from a hash of the whole prompt, until ``max_tokens``.
"""

import hashlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stoker_shared.errors import EngineFailed, TemplateError
from stoker_shared.request import Message
from stoker_worker.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from stoker_worker.engine.growing_text import GrowingText
from stoker_worker.engine.stop_scanner import StopScanner
from stoker_worker.ports import (
    CacheSlice,
    Completion,
    EndedBy,
    GenerationTiming,
    GenerationWork,
    LoadedModel,
    RestoredPrefix,
    RowProgress,
    Stage,
)

END: Final = 256
"""The end-of-sequence token; tokens below it are bytes."""

_ROLE_MARK: Final = 257
_MARK_OF_BYTE: Final = {0: END, 1: _ROLE_MARK}
_BYTE_OF_MARK: Final = {mark: byte for byte, mark in _MARK_OF_BYTE.items()}
_SPEC: Final = ModelCacheSpec(
    layers=(LayerSpec(LayerKind.FULL, n_kv_heads=1, key_dim=1, value_dim=1),), dtype="float32"
)


class ScriptedCodec:
    """Bytes as tokens, and a chat template of one line per message."""

    eos_ids: frozenset[int] = frozenset({END})
    max_token_bytes: int = 5

    def fork(self) -> "ScriptedCodec":
        return self

    def encode(self, text: str, *, special_start: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(_BYTE_OF_MARK.get(token, token) for token in token_ids).decode(errors="replace")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        spoken = [(message.role, message.content or "") for message in messages]
        if any(mark in content for _, content in spoken for mark in "\x00\x01"):
            raise TemplateError("the scripted template takes no characters 0 and 1")
        turns = "".join(f"\x01{role}\n{content}\x00\n" for role, content in spoken)
        return turns + ("\x01assistant\n" if add_generation_prompt else "")

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        return rendered.removeprefix(after) if rendered.startswith(after) else None

    def encode_rendered(self, rendered: str) -> list[int]:
        return [_MARK_OF_BYTE.get(byte, byte) for byte in rendered.encode()]


@dataclass
class _Row:
    uid: int
    work: GenerationWork
    script: list[int]
    stops: StopScanner | None
    growing: GrowingText = field(default_factory=lambda: GrowingText(ScriptedCodec()))
    generated: list[int] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float = 0.0


class ScriptedEngine:
    """Up to `max_batch` rows advance by one token per step; a step takes ``1 / steps_per_s`` seconds."""

    def __init__(self, *, max_batch: int, steps_per_s: float) -> None:
        self._codec = ScriptedCodec()
        self._max_batch = max_batch
        self._step_s = 1.0 / steps_per_s
        self._rows: list[_Row] = []
        self._next_uid = 0

    @property
    def in_flight(self) -> int:
        return len(self._rows)

    def progress(self) -> dict[int, RowProgress]:
        in_batch = {row.uid for row in self._rows[: self._max_batch]}
        return {row.uid: _progress(row, waits=row.uid not in in_batch) for row in self._rows}

    def text(self, uid: int) -> str:
        row = self._row(uid)
        if row is None or row.stops is not None:
            return row.stops.text if row and row.stops else ""
        row.growing.add(row.generated[row.growing.n_tokens :])
        return row.growing.text

    def submit(self, work: GenerationWork) -> int:
        stops = StopScanner(self._codec, work.request.stop) if work.request.stop else None
        self._rows.append(_Row(self._next_uid, work, _script(work), stops))
        self._next_uid += 1
        return self._rows[-1].uid

    def step(self) -> list[Completion]:
        if not self._rows:
            return []
        time.sleep(self._step_s)
        ended = [done for row in self._rows[: self._max_batch] if (done := self._advance(row)) is not None]
        gone = {done.uid for done in ended}
        self._rows = [row for row in self._rows if row.uid not in gone]
        return ended

    def cancel(self, uid: int) -> Completion | None:
        row = self._row(uid)
        if row is None:
            return None
        self._rows.remove(row)
        return Completion(uid, "cancelled", tuple(row.generated), text=self._text(row), timing=_timing(row))

    def close(self) -> None:
        self._rows.clear()

    def _row(self, uid: int) -> _Row | None:
        return next((row for row in self._rows if row.uid == uid), None)

    def _text(self, row: _Row) -> str:
        return self._codec.decode(row.generated).removesuffix("\x00")

    def _advance(self, row: _Row) -> Completion | None:
        error = _wrong_prefix(row.work) if not row.generated else None
        words = _last_line(row.work).split(" ", 1)
        if words == ["crash"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if words[0] == "break":
            raise EngineFailed(words[-1])
        if words[0] == "fail":
            error = EngineFailed(words[-1])
        if error is not None:
            return Completion(row.uid, "failed", error=error, timing=_timing(row))
        row.first_token_at = row.first_token_at or time.perf_counter()
        token = row.script[len(row.generated) % len(row.script)]
        row.generated.append(token)
        if token == END:
            return self._end(row, "eos")
        if row.stops and row.stops.add(token):
            return self._end(row, "stop")
        return self._end(row, "length") if len(row.generated) == row.work.request.max_tokens else None

    def _end(self, row: _Row, ended_by: EndedBy) -> Completion:
        text, kept, carry_text = self._text(row), len(row.generated), ""
        if ended_by == "stop" and row.stops:
            text, kept, carry_text = row.stops.cut()
        return Completion(
            uid=row.uid,
            outcome="finished",
            generated_ids=tuple(row.generated),
            text=text,
            ended_by=ended_by,
            kept=kept,
            cached_tokens=row.work.prefix.n_tokens if row.work.prefix else 0,
            carry_text=carry_text,
            cache=_cache_of((*row.work.prompt_ids, *row.generated[:kept]), row.work.save_from),
            timing=_timing(row),
        )


@dataclass(frozen=True)
class ScriptedProvider:
    """Makes a :class:`ScriptedEngine`; stands where the model provider stands."""

    max_batch: int
    steps_per_s: float
    context_tokens: int = 1 << 20

    def load(self) -> tuple[ScriptedEngine, LoadedModel]:
        loaded = LoadedModel(
            name="scripted",
            fingerprint=hashlib.sha256(b"stoker scripted engine 1").hexdigest(),
            tokenizer_fingerprint=hashlib.sha256(b"stoker scripted codec 1").hexdigest(),
            context_tokens=self.context_tokens,
            spec=_SPEC,
            codec=ScriptedCodec(),
        )
        return ScriptedEngine(max_batch=self.max_batch, steps_per_s=self.steps_per_s), loaded

    def leave_thread(self) -> None:
        """Nothing here belongs to a thread."""


def _last_line(work: GenerationWork) -> str:
    request = work.request
    text = request.prompt if request.prompt is not None else (request.messages or ())[-1].content or ""
    return text.rsplit("\n", 1)[-1]


def _script(work: GenerationWork) -> list[int]:
    """The row's tokens; without an END they repeat until `max_tokens`."""
    line = _last_line(work)
    if line.startswith("say "):
        return [*line.removeprefix("say ").encode(), END]
    digest = hashlib.sha256(np.asarray(work.prompt_ids, dtype=np.uint32).tobytes()).hexdigest()
    return list("".join(f"{digest[at : at + 4]} " for at in range(0, len(digest), 4)).encode())


def _cache_of(token_ids: Sequence[int], start: int | None) -> CacheSlice | None:
    if start is None:
        return None
    keys = np.asarray(token_ids[start:], dtype=np.float32).reshape(1, -1, 1)
    return CacheSlice(start=start, stop=len(token_ids), layers=((keys, -keys),))


def _wrong_prefix(work: GenerationWork) -> EngineFailed | None:
    prefix: RestoredPrefix | None = work.prefix
    if prefix is None:
        return None
    ((keys, values),) = prefix.layers
    expected = np.asarray(work.prompt_ids[: prefix.n_tokens], dtype=np.float32).reshape(1, -1, 1)
    if np.array_equal(keys, expected) and np.array_equal(values, -expected):
        return None
    return EngineFailed("the restored cache is not that of the prompt's tokens")


def _progress(row: _Row, *, waits: bool) -> RowProgress:
    stage: Stage = "waiting" if waits else "decode" if row.generated else "prefill"
    return RowProgress.since(row.first_token_at, stage, len(row.generated))


def _timing(row: _Row) -> GenerationTiming:
    now = time.perf_counter()
    first = row.first_token_at or now
    return GenerationTiming(waited_s=0.0, prefill_s=first - row.submitted_at, decode_s=now - first)
