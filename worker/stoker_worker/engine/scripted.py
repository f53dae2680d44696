"""An engine without a model: deterministic, at a chosen speed, for tests of stoker and of services that use it.

It implements `GenerationEnginePort` like the real one and imports no MLX. Its tokens are bytes. Its cache holds each
token's own id, and a restored prefix that does not match the prompt fails the sequence, so any mistake of the agent
memory becomes a failed job. In a prompt that is scored, every token is as likely as any other.

The answer depends on the last line of the prompt, or of the last message:

* ``say TEXT``: TEXT, then end of sequence; it may hold thinking and calls (see `SCRIPTED_ANSWERS`);
* ``if NAME say TEXT else OTHER``: the same, with OTHER if the model is not called NAME;
* ``fail WHY``: the sequence fails in the engine;
* ``break WHY``: the engine itself breaks, with every sequence in it;
* ``crash``: the process kills itself as ``kill -9`` would;
* anything else: words made from a hash of the whole prompt, until ``max_tokens``; with ``fit_max_tokens``, a few.

If the answer has to have a form (`response_format`, `guide`, a forced call), it has it: see `_GuidedScript`.
"""

import hashlib
import json
import math
import os
import random
import signal
import time
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from stoker_shared.answer_parts import Edge
from stoker_shared.errors import EngineFailed, TemplateError
from stoker_shared.message import Message
from stoker_shared.result import PromptLogprobs, TokenLogprob, TopLogprob
from stoker_worker.engine.sequence import EndIds, Sequence
from stoker_worker.engine.text import StopScanner
from stoker_worker.ports import (
    AnswerFormat,
    CompletedGeneration,
    GenerationEnginePort,
    GenerationWork,
    LoadedModel,
    ModelProviderPort,
    SequenceCache,
    SequenceProgress,
    Stage,
    TokenMask,
)
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from stoker_worker.ports.model import Batching, MaxBatch, ServingMode

VOCABULARY: Final = 258
"""Token ids of the scripted tokenizer: bytes, the end, and the mark of a role."""

_LOGPROB: Final = -math.log(VOCABULARY)
_FIRST_TOP: Final = ord("!")


def even_scores(work: GenerationWork, decode: Callable[[abc.Sequence[int]], str]) -> PromptLogprobs | None:
    """Scores of a prompt in which all tokens are equally likely; ``None`` if it is not to be scored."""
    n_top, start = work.request.prompt_logprobs, work.request.prompt_logprobs_start
    if n_top is None:
        return None
    top = [TopLogprob(token=decode([_FIRST_TOP + n]), logprob=_LOGPROB) for n in range(n_top)]
    scored = [
        TokenLogprob(token=decode([token]), logprob=_LOGPROB, top_logprobs=top)
        for token in work.prompt_ids[max(1, start) :]
    ]
    return PromptLogprobs(start=start, content=scored if start else [None, *scored])


_THINK: Final = "<think>", "</think>"
_CALL: Final = "<tool_call>", "</tool_call>"


def _parse_call(text: str, _tools: abc.Sequence[Mapping[str, Any]] | None) -> Any:
    return json.loads(text)


SCRIPTED_ANSWERS: Final = AnswerFormat(
    think_start_ids=tuple(_THINK[0].encode()),
    think_end_ids=tuple(_THINK[1].encode()),
    tool_start=_CALL[0],
    tool_end=_CALL[1],
    tool_start_ids=tuple(_CALL[0].encode()),
    tool_parser="json_tools",
    parse_call=_parse_call,
    edges=(
        Edge("normal", _THINK[0], "reasoning"),
        Edge("reasoning", _THINK[1], "normal"),
        Edge("normal", _CALL[0], "tool"),
        Edge("reasoning", _CALL[0], "tool"),
        Edge("tool", _CALL[1], "normal"),
    ),
)


def said_by(model: str, line: str) -> str | None:
    """The text that a prompt's last line asks the model of this name for; ``None`` if it asks for none."""
    if line.startswith("if ") and " say " in line:
        name, _, texts = line.removeprefix("if ").partition(" say ")
        text, _, other = texts.partition(" else ")
        return text if name == model else other
    return line.removeprefix("say ") if line.startswith("say ") else None


def cache_of(token_ids: tuple[int, ...]) -> SequenceCache:
    """One layer: keys (1, tokens, 1) in float32, and their negatives as values."""
    keys = np.asarray(token_ids, dtype=np.float32).reshape(1, -1, 1)
    return SequenceCache(len(token_ids), layers=((keys, -keys),))


def wrong_prefix(work: GenerationWork) -> EngineFailed | None:
    """The error of a restored prefix that is not the cache of the prompt's first tokens; ``None`` if it is."""
    if (prefix := work.prefix) is None:
        return None
    ((keys, values),) = prefix.layers
    expected = np.asarray(work.prompt_ids[: prefix.n_tokens], dtype=np.float32).reshape(1, -1, 1)
    if np.array_equal(keys, expected) and np.array_equal(values, -expected):
        return None
    return EngineFailed("the restored cache is not that of the prompt's tokens")


END: Final = 256
"""The end-of-sequence token; tokens below it are bytes."""

_ROLE_MARK: Final = 257
_MARK_OF_BYTE: Final = {0: END, 1: _ROLE_MARK}
_BYTE_OF_MARK: Final = {mark: byte for byte, mark in _MARK_OF_BYTE.items()}


class ScriptedTokenizer:
    """Implements `TokenizerPort`, with a chat template of one line per message."""

    eos_ids: frozenset[int] = frozenset({END})
    max_token_bytes: int = 5

    def fork(self) -> "ScriptedTokenizer":
        return self

    def encode(self, text: str, *, special_start: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: abc.Sequence[int]) -> str:
        return bytes(_BYTE_OF_MARK.get(token, token) for token in token_ids).decode(errors="replace")

    def render(
        self,
        messages: abc.Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: abc.Sequence[abc.Mapping[str, Any]] | None,
        template_kwargs: abc.Mapping[str, Any] | None,
    ) -> str:
        spoken = [(message.role, message.content or "") for message in messages]
        sent = [content for role, content in spoken if role != "assistant"]  # an answer may contain end tokens
        if any(mark in content for content in sent for mark in "\x00\x01"):
            raise TemplateError("the scripted template does not accept the characters 0 and 1")
        turns = "".join(f"\x01{role}\n{content}\x00\n" for role, content in spoken)
        return turns + ("\x01assistant\n" if add_generation_prompt else "")

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        return rendered.removeprefix(after) if rendered.startswith(after) else None

    def encode_rendered(self, rendered: str) -> list[int]:
        return [_MARK_OF_BYTE.get(byte, byte) for byte in rendered.encode()]


_SPEC: Final = ModelCacheSpec(
    layers=(LayerSpec(LayerKind.FULL, n_kv_heads=1, key_dim=1, value_dim=1),), dtype="float32"
)


class _Script:
    """Replaces a model's sampling: repeats an answer's tokens. Implements `Sampling`."""

    sampler: Any = None
    processors: Any = ()
    error: Exception | None = None

    def __init__(self, work: GenerationWork, end_ids: frozenset[int], model: str) -> None:
        self._min_tokens = work.request.min_tokens
        line = _last_line(work)
        self.words = line.split(" ", 1)
        said = said_by(model, line)
        self._digest = digest = hashlib.sha256(np.asarray(work.prompt_ids, dtype=np.uint32).tobytes()).hexdigest()
        if said is None and work.request.has_form:
            said = digest[:4]
        if said is not None:
            if work.request.must_call:  # a call begins with the same byte as thinking, so there is none before it
                said = said.rpartition(_THINK[1])[2]
            self._tokens: list[int] = [*said.encode(), END]
        else:
            self._tokens = list("".join(f"{digest[at : at + 4]} " for at in range(0, len(digest), 4)).encode())
            if work.request.fit_max_tokens:
                self._tokens.append(END)
        self._end_ids = end_ids
        self._endless = [token for token in self._tokens if token not in end_ids] or self._tokens

    def token(self, n_drawn: int) -> int:
        """The token after the first `n_drawn`; none that ends the answer before `min_tokens`."""
        tokens = self._endless if n_drawn < self._min_tokens else self._tokens
        return int(tokens[n_drawn % len(tokens)])

    def start(self, n_drawn: int) -> None:
        """There is nothing to make."""


_VISIBLE: Final = frozenset(range(33, 127))
_PLAIN: Final = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_NEAREST_FIRST: Final = (*(frozenset({token}) for token in (END, *b'"}]),:')), _PLAIN, _VISIBLE)
"""The tokens that end most grammars soonest come first."""

_OPENING: Final = frozenset(b"<")
"""Only the script's own text may open thinking: other thinking would not end."""

_MOST_ALIKE: Final = 4
"""After so many tokens of one kind comes a way out, or often a visible token, or any that may come: so every answer
ends."""

_WAYS_OUT: Final = tuple(b"@.+-*/=;|&%#?")
_TRIED_AGAIN_AFTER: Final = 256
"""Tokens before the same way out is tried again."""


class _GuidedScript(_Script):
    """A script under a guide.

    It takes the text's next byte wherever the guide allows it, and elsewhere a token that leads to the end soon. So a
    text that has the form becomes the answer, and another text fills the first places of the form that allow it.
    """

    def __init__(self, work: GenerationWork, end_ids: frozenset[int], model: str) -> None:
        super().__init__(work, end_ids, model)
        assert work.guide is not None
        work.guide.start(())
        self._guide = work.guide
        self._random = random.Random(self._digest)
        self._at = 0
        self._drawn: list[int] = []
        self._filled: list[frozenset[int]] = []

    def token(self, n_drawn: int) -> int:
        mask = self._guide.after(self._drawn[-1] if self._drawn else None)
        allowed = frozenset(range(VOCABULARY)) if mask is None else _bits(mask)
        if n_drawn < self._min_tokens:
            allowed = allowed - self._end_ids or allowed
        if mask is None and self._wanted not in allowed:
            self._at += 1  # a free answer that must not end yet goes on with the text from its beginning
        if self._wanted in allowed:
            self._drawn.append(self._wanted)
            self._at += 1
            self._filled.clear()
        else:
            self._drawn.append(self._between(allowed))
            self._skip_thought()
        return self._drawn[-1]

    @property
    def _wanted(self) -> int:
        return self._tokens[self._at % len(self._tokens)]

    def _between(self, allowed: frozenset[int]) -> int:
        """A token that is not the text's."""
        allowed = allowed - _OPENING or allowed
        kinds, newest = _NEAREST_FIRST, self._filled[-_MOST_ALIKE:]
        if len(newest) == _MOST_ALIKE and len({*newest}) == 1:
            tried = self._drawn[-_TRIED_AGAIN_AFTER:]
            ways_out = tuple(frozenset({token}) for token in _WAYS_OUT if token not in tried)
            kinds = (*ways_out, _VISIBLE) if self._random.random() < 0.7 else ways_out
        kind = next((kind for kind in kinds if allowed & kind), allowed)
        self._filled.append(kind)
        return self._random.choice(sorted(allowed & kind))

    def _skip_thought(self) -> None:
        """After thinking that was cut short, continue with the text behind it."""
        end = list(SCRIPTED_ANSWERS.think_end_ids)
        if self._drawn[-len(end) :] == end:
            places = range(self._at, len(self._tokens) - len(end) + 1)
            self._at = next((at + len(end) for at in places if self._tokens[at : at + len(end)] == end), self._at)


def _bits(mask: TokenMask) -> frozenset[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits[:VOCABULARY]).tolist())


class ScriptedEngine(GenerationEnginePort):
    """Up to `max_batch` sequences advance by one token per step; a step takes ``1 / steps_per_s`` seconds."""

    def __init__(self, *, max_batch: int, steps_per_s: float, model: str = "scripted") -> None:
        self._model = model
        self._tokenizer = ScriptedTokenizer()
        self._max_batch = max_batch
        self._step_s = 1.0 / steps_per_s
        self._sequences: dict[int, Sequence] = {}
        self._next_uid = 0

    @property
    def in_flight(self) -> int:
        return len(self._sequences)

    def progress(self) -> dict[int, SequenceProgress]:
        found = {}
        for n, sequence in enumerate(self._sequences.values()):
            stage: Stage = "waiting" if n >= self._max_batch else "decode" if sequence.generated else "prefill"
            found[sequence.uid] = sequence.progress(stage)
        return found

    def text(self, uid: int) -> str:
        sequence = self._sequences.get(uid)
        return "" if sequence is None else sequence.text(self._tokenizer)

    def submit(self, work: GenerationWork) -> int:
        uid, request = self._next_uid, work.request
        stops = StopScanner(self._tokenizer, request.stop, min_tokens=request.min_tokens) if request.stop else None
        end_ids = EndIds.of(request, self._tokenizer.eos_ids)
        make = _Script if work.guide is None else _GuidedScript
        script = make(work, end_ids.all, self._model)
        n_reused = work.prefix.n_tokens if work.prefix else 0
        self._sequences[uid] = Sequence(uid, work, script, stops, end_ids, n_reused=n_reused)
        self._next_uid += 1
        return uid

    def step(self) -> list[CompletedGeneration]:
        if not self._sequences:
            return []
        in_batch = [*self._sequences.values()][: self._max_batch]
        for sequence in in_batch:
            sequence.inserted_at = sequence.inserted_at or time.perf_counter()
        time.sleep(self._step_s)
        ended = [done for sequence in in_batch if (done := self._advance(sequence)) is not None]
        for done in ended:
            del self._sequences[done.uid]
        return ended

    def cancel(self, uid: int) -> CompletedGeneration | None:
        sequence = self._sequences.pop(uid, None)
        return sequence.completion("cancelled", self._tokenizer) if sequence else None

    def close(self) -> None:
        self._sequences.clear()

    def _advance(self, sequence: Sequence) -> CompletedGeneration | None:
        error = wrong_prefix(sequence.work) if not sequence.generated else None
        script = sequence.sampling
        assert isinstance(script, _Script)
        words = script.words
        if words == ["crash"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if words[0] == "break":
            raise EngineFailed(words[-1])
        if words[0] == "fail":
            error = EngineFailed(words[-1])
        if error is not None:
            return sequence.completion("failed", self._tokenizer, error=error)
        if sequence.work.request.max_tokens == 0:
            ids = sequence.work.prompt_ids[:-1]
            sequence.ended_by = "length"
        else:
            sequence.first_token_at = sequence.first_token_at or time.perf_counter()
            token = script.token(len(sequence.generated))
            if sequence.error is not None:
                return sequence.completion("failed", self._tokenizer, error=sequence.error)
            sequence.add(token)
            if sequence.ended_by is None:
                return None
            ids = (*sequence.work.prompt_ids, *sequence.generated[: sequence.n_kept])
        cache = cache_of(ids) if sequence.work.is_saved else None
        done = sequence.completion("finished", self._tokenizer, cache=cache)
        return replace(done, prompt_logprobs=even_scores(sequence.work, self._tokenizer.decode))


@dataclass(frozen=True)
class ScriptedProvider(ModelProviderPort):
    """Makes a `ScriptedEngine`. Implements `ModelProviderPort`."""

    max_batch: int
    steps_per_s: float
    model: str = "scripted"

    def load(self) -> tuple[ScriptedEngine, LoadedModel]:
        from stoker_worker.models.guides import byte_guides  # loads llguidance

        loaded = LoadedModel(
            name=self.model,
            fingerprint=hashlib.sha256(f"stoker {self.model} engine 1".encode()).hexdigest(),
            tokenizer_fingerprint=hashlib.sha256(b"stoker scripted codec 1").hexdigest(),
            context_tokens=1 << 20,
            vocabulary=VOCABULARY,
            spec=_SPEC,
            tokenizer=ScriptedTokenizer(),
            mode=ServingMode(Batching.BATCHED),
            max_batch=MaxBatch(self.max_batch),
            answer_format=SCRIPTED_ANSWERS,
            guides=byte_guides(SCRIPTED_ANSWERS, special=("<end>", "<role>")),
        )
        engine = ScriptedEngine(max_batch=self.max_batch, steps_per_s=self.steps_per_s, model=self.model)
        return engine, loaded

    def leave_thread(self) -> None:
        """Nothing here belongs to a thread."""


def _last_line(work: GenerationWork) -> str:
    request = work.request
    if request.prompt_token_ids is not None:
        text = ScriptedTokenizer().decode(request.prompt_token_ids)
    else:
        text = request.prompt if request.prompt is not None else (request.messages or ())[-1].content or ""
    return text.rsplit("\n", 1)[-1]
