"""Self-test: generated tokens per second in batches of several widths."""

import time
from collections.abc import Iterator
from typing import Final

from stoker_shared.errors import EngineFailed
from stoker_worker.doctor.check import Check, Finding, ok
from stoker_worker.doctor.sequences import Texts, work_of
from stoker_worker.ports import GenerationEnginePort, LoadedModel
from stoker_worker.ports.model import Batching

WIDTHS: Final = (1, 8, 16, 32)
_PROMPT: Final = 64
_MOST_TOKENS: Final = 900
_WARM_STEPS: Final = 4
_FILLING_S: Final = 120.0


def checks(engine: GenerationEnginePort, model: LoadedModel, *, seconds: float) -> Iterator[Check]:
    """
    Args:
        seconds: how long each width is measured.
    """
    is_single = model.mode.batching in (Batching.ONE_AT_A_TIME, Batching.AS_MLX_LM)
    widest = 1 if is_single else model.max_batch.jobs
    for width in WIDTHS:
        name = f"decode, batch {width}"
        if width <= widest:
            yield Check(name, lambda width=width: decode(engine, model, width, seconds))  # type: ignore[misc]
        else:
            yield Check(name, lambda: ok(f"not applicable: the worker would run {widest} at once", batch=None))


def decode(engine: GenerationEnginePort, model: LoadedModel, width: int, seconds: float) -> Finding:
    """Raises `EngineFailed`: they do not decode together."""
    texts = Texts(model)
    n_answer = min(_MOST_TOKENS, max(1, model.context_tokens - _PROMPT))
    n_prompt = texts.fitting(_PROMPT, n_answer)
    uids = [engine.submit(work_of(texts.ids(n_prompt, begin=number), n_answer)) for number in range(width)]
    try:
        _fill(engine, width)
        n_tokens, elapsed = _measure(engine, seconds)
    finally:
        for uid in uids:
            engine.cancel(uid)
    rate = n_tokens / elapsed
    line = f"{rate:.1f} tokens/s, {1000 * width / rate:.1f} ms a step"
    return ok(line, batch=width, tokens_per_s=round(rate, 2), measured_s=round(elapsed, 2))


def _fill(engine: GenerationEnginePort, width: int) -> None:
    """Until all decode, and a few steps more: the first ones compile kernels."""
    deadline = time.monotonic() + _FILLING_S
    while (n := sum(one.stage == "decode" for one in engine.progress().values())) < width:
        if engine.step() or time.monotonic() > deadline:
            raise EngineFailed(f"only {n} of {width} sequences decode together")
    for _ in range(_WARM_STEPS):
        engine.step()


def _measure(engine: GenerationEnginePort, seconds: float) -> tuple[int, float]:
    """Tokens and seconds until the time is over or the first sequence ends."""
    began, before = time.perf_counter(), _generated(engine)
    n_tokens, elapsed = 0, 0.0
    while elapsed < seconds:
        if engine.step():
            break
        n_tokens, elapsed = _generated(engine) - before, time.perf_counter() - began
    if not n_tokens:
        raise EngineFailed("no token was generated")
    return n_tokens, elapsed


def _generated(engine: GenerationEnginePort) -> int:
    return sum(one.tokens for one in engine.progress().values())
