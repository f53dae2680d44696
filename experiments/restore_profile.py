"""Where does the time of one restore go? For EXP-006: the product's own functions, each with a stopwatch. No model.

The stages are timed in a restore by one thread, where their times add up. A restore by all threads, and one by one
thread without stopwatches, take turns with it.
"""

import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import Json, note, spread
from stopwatch import Stopwatch
from synthetic_cache import SavedAgent, saved_agent, smollm2_layers

from stoker_worker.memory import blocks, lookup, store
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

ROOM, READ, CHECKSUM = "make room in MLX", "read from the page cache into place", "checksum"


class _TimedDigest:
    def __init__(self, watch: Stopwatch, make: Callable[[bytes], Any], header: bytes) -> None:
        digest = make(header)
        self.update, self.hexdigest = watch.timing(CHECKSUM, digest.update), digest.hexdigest


def taken_apart(folder: Path, *, blocks: int, rounds: int) -> Json:
    """Medians of `rounds` restores of SmolLM2's 30 layers. Shares are of the timed restore."""
    n_tokens, samples = blocks * BLOCK_TOKENS, []
    with saved_agent(folder / "profile", smollm2_layers(30), n_tokens) as saved:
        note(f"taking {rounds} restores apart")
        for _ in range(rounds + 1):  # the first is a warm-up
            samples.append(_by_all_threads(saved, n_tokens) | _by_one_thread(saved, n_tokens))
    kept = samples[1:]
    parts = {name: spread([one[name] for one in kept]) for name in kept[0]}
    stages = [name for name in parts if not name.startswith("total")]
    whole, mb = sum(parts[name]["median"] for name in stages), n_tokens * saved.model.spec.bytes_per_token / 1e6
    rows = [{"stage": name, "ms": parts[name], "share": round(parts[name]["median"] / whole, 3)} for name in stages]
    return {
        "blocks": blocks,
        "layers": 30,
        "mb": round(mb, 1),
        "stages": sorted(rows, key=lambda row: -row["share"]),
        "totals_ms": {name.removeprefix("total, "): one for name, one in parts.items() if name not in stages},
        "gb_s": {name: round(mb / parts[name]["median"], 2) for name in (READ, CHECKSUM, ROOM)},
    }


def _by_all_threads(saved: SavedAgent, n_tokens: int) -> dict[str, float]:
    """Milliseconds, and those of the processor: its cores' together."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    made = saved.caches(saved.restore(n_tokens))
    took, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    del made
    in_system, in_program = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    names = ("total, all threads", "total, processor in the system", "total, processor in the program")
    return {name: 1000 * seconds for name, seconds in zip(names, (took, in_system, in_program), strict=True)}


def _by_one_thread(saved: SavedAgent, n_tokens: int) -> dict[str, float]:
    watch = Stopwatch()
    with patch.object(store, "n_readers", lambda _: 1):
        begin = time.perf_counter()
        made = saved.caches(saved.restore(n_tokens))
        plain = time.perf_counter() - begin
        del made
        with _stopwatches(watch):
            model = replace(saved.model, room_type=watch.timing(ROOM, saved.model.room_type))
            timed = replace(saved, model=model)
            prefix = watch.timing("find the agent and its blocks", timed.restore)(n_tokens)
            watch.timing("hand over to the engine", timed.caches)(prefix)
    found = {"total, one thread": plain, "total, one thread with stopwatches": sum(watch.seconds.values())}
    return {name: 1000 * seconds for name, seconds in (found | watch.seconds).items()}


def _stopwatches(watch: Stopwatch) -> ExitStack:
    """The product's functions timed until the stack is closed."""
    with ExitStack() as patched:
        header = blocks.CachePiece.__dict__["header"]
        digest = partial(_TimedDigest, watch, blocks.xxh3_128)
        slicing = "choose the places of a file's parts"
        for owner, name, replacement in (
            (header, "func", watch.timing("write the header to expect", header.func)),
            (lookup._Target, "load", watch.timing(slicing, lookup._Target.load)),
            (blocks, "fill", watch.timing(READ, blocks.fill)),
            (blocks, "xxh3_128", digest),
            (blocks, "open", watch.timing("open the file", open)),
        ):
            patched.enter_context(patch.object(owner, name, replacement, create=name == "open"))
        return patched.pop_all()
