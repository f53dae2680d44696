"""Where the time to a first token goes in the product, for EXP-008. No results.

The product's own functions are wrapped while one turn runs; a part within a part counts for itself alone.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from common import Json
from stopwatch import Stopwatch
from timed_turns import TimedTurn

PARTS = ("encode", "history", "find", "memory", "fill", "take over", "pass", "token", "rest")
"""The prompt to tokens; the agent's transcript from the database; the files that should be there; the engine's memory;
the cache into it, from verified files or from RAM; the engine takes the turn; the step that lets it join and begins the
pass over its last token; the step that brings the token; the rest."""


def parts_of(turn: Callable[[], TimedTurn], repeats: int) -> Json:
    """Median milliseconds of each part, over some turns that end with the first token."""
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(repeats):
        watch = Stopwatch()
        with ExitStack() as stack:
            for owner, name, part in _watched():
                stack.enter_context(patch.object(owner, name, _timed(getattr(owner, name), part, watch)))
            seconds = turn().token_s[0]
        watch.seconds["rest"] = seconds - sum(watch.seconds[name] for name in PARTS)
        for name, values in found.items():
            values.append(1000 * watch.seconds[name])
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def _timed(call: Callable[..., Any], part: str, watch: Stopwatch) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        with watch.part("token" if part == "pass" and watch.seconds["pass"] else part):
            return call(*args, **options)

    return timed


def _watched() -> list[tuple[Any, str, str]]:
    """Classes, methods, and their parts."""
    from stoker_worker.engine.batch_engine import BlockPoolBatchEngine
    from stoker_worker.engine.transfer import MlxRoom
    from stoker_worker.memory.lookup import _Target
    from stoker_worker.memory.ram_cache import RamCache
    from stoker_worker.memory.store import AgentCacheStore
    from stoker_worker.models.tokenizer import ModelTokenizer

    return [
        (ModelTokenizer, "encode", "encode"),
        (AgentCacheStore, "open_agent", "history"),
        (AgentCacheStore, "restore", "find"),
        (MlxRoom, "__init__", "memory"),
        (_Target, "load_all", "fill"),
        (RamCache, "restore", "fill"),
        (BlockPoolBatchEngine, "submit", "take over"),
        (BlockPoolBatchEngine, "step", "pass"),
    ]
