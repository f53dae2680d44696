"""EXP-008, the first token: how soon does it come without a cache, from disk and from RAM?

Each prompt is asked without a cache, and then again and again by ways that take turns: from the store's files, from the
worker's RAM cache, and from one file of mlx-lm's own `save_prompt_cache`. Run:
``python experiments/exp_008_first_token.py``.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from bench import Bench, main
from common import Json, in_turn, note, ratios, spread
from prompts import text_of
from report import Report, columns, say, yes
from timed_turns import COLD, DISK, RAM, Turns

MLX_COLD, MLX_FILE = "mlx-lm, no cache", "mlx-lm, file"
MOST_DISK = 1.15

First = tuple[float, int]
"""Seconds from a prompt's text to the first token, and that token."""


class MlxLm:
    """mlx-lm's own way: a file with a prompt's whole cache, and `stream_generate` for the rest."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        folder.mkdir()
        self._bench = bench
        self.folder = folder

    def cold(self, text: str, name: str) -> First:
        """Saves the cache of all but the prompt's last token afterwards."""
        from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache, trim_prompt_cache

        begin = time.perf_counter()
        ids = self._bench.encode(text)
        caches = make_prompt_cache(self._bench.network)
        first = self._first_token(begin, ids, caches)
        trim_prompt_cache(caches, caches[0].offset - (len(ids) - 1))
        save_prompt_cache(str(self._file(name)), caches)
        return first

    def warm(self, text: str, name: str) -> First:
        from mlx_lm.models.cache import load_prompt_cache

        begin = time.perf_counter()
        ids = self._bench.encode(text)
        return self._first_token(begin, ids[-1:], load_prompt_cache(str(self._file(name))))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _first_token(self, begin: float, ids: Sequence[int], caches: list[Any]) -> First:
        import mlx.core as mx
        from mlx_lm import stream_generate

        answer = stream_generate(self._bench.network, self._bench.tokenizer, list(ids), max_tokens=2,
                                 prompt_cache=caches)  # fmt: skip
        token = next(answer).token
        seconds = time.perf_counter() - begin
        answer.close()
        mx.synchronize()
        return seconds, int(token)


class Length:
    """One prompt, asked in every way."""

    def __init__(self, bench: Bench, turns: Turns, mlx_lm: MlxLm, n_tokens: int) -> None:
        self.name = f"{n_tokens}"
        self.text = text_of(bench.encode, "English", n_tokens)
        self.ids = bench.encode(self.text)
        self._fields = {"agent_id": self.name, "prompt": self.text, "max_tokens": 2, "cache_salt": self.name}
        self._turns, self._mlx_lm = turns, mlx_lm
        self._n_bytes = (len(self.ids) - 1) * bench.model.spec.bytes_per_token
        self.seconds: dict[str, list[float]] = {}
        self.tokens: set[int] = set()

    def ask_cold(self, rounds: int) -> None:
        for number, name in in_turn((COLD, MLX_COLD), rounds):
            if name == MLX_COLD:
                self._note(name, self._mlx_lm.cold(self.text, self.name))
            elif number:
                self._note(name, self._of_turn(COLD))
            else:
                turn = self._turns.remember(self._fields)
                self._note(name, (turn.token_s[0], turn.completion.generated_ids[0]))
            note(f"{self.name} tokens, {name}, {number + 1} of {rounds}: {self.seconds[name][-1]:.2f} s")

    def ask_warm(self, rounds: int) -> None:
        ways: dict[str, Callable[[], First]] = {
            DISK: lambda: self._of_turn(DISK),
            RAM: lambda: self._of_turn(RAM),
            MLX_FILE: lambda: self._mlx_lm.warm(self.text, self.name),
        }
        order, dice = list(ways), random.Random(self.name)
        note(f"{self.name} tokens, {rounds} rounds of all ways with a cache")
        for _ in range(rounds):
            dice.shuffle(order)  # the way before determines how much fresh memory a way needs
            for name in order:
                self._note(name, ways[name]())

    def found(self) -> Json:
        cold = {name: statistics.median(self.seconds[name]) for name in (COLD, MLX_COLD)}
        speedups = {
            name: spread([cold[of] / s for s in self.seconds[name]], digits=1)
            for of, name in ((COLD, DISK), (COLD, RAM), (MLX_COLD, MLX_FILE))
        }
        return {
            "tokens": len(self.ids),
            "mb": round(self._n_bytes / 1e6, 1),
            "first_token_ms": {
                name: spread([1000 * s for s in found], digits=1) for name, found in self.seconds.items()
            },
            "speedup": speedups,
            "disk_over_ram": ratios(self.seconds[DISK], self.seconds[RAM]),
            "same_token": len(self.tokens) == 1,
        }

    def _of_turn(self, source: str) -> First:
        turn = self._turns.run(source, self._fields, n_tokens=1)
        return turn.token_s[0], turn.completion.generated_ids[0]

    def _note(self, name: str, first: First) -> None:
        self.seconds.setdefault(name, []).append(first[0])
        self.tokens.add(first[1])


def measured(bench: Bench, folder: Path, lengths: Mapping[int, int], warm_rounds: int) -> Iterator[Json]:
    """
    Args:
        lengths: tokens of the prompts, and how often each is asked without a cache. A short one is the warm-up.
        warm_rounds: of all ways with a cache.
    """
    with closing(Turns(bench, folder)) as turns:
        mlx_lm = MlxLm(bench, folder / "mlx-lm")
        for n_tokens, cold_rounds in {32: 1, **lengths}.items():
            length = Length(bench, turns, mlx_lm, n_tokens)
            length.ask_cold(cold_rounds)
            length.ask_warm(warm_rounds if n_tokens in lengths else 1)
            if n_tokens in lengths:
                yield length.found()


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    lengths = {64: 1, 256: 1} if quick else {256: 3, 1024: 3, 2048: 2}
    rows = list(measured(bench, folder, lengths, 2 if quick else 9))
    verdict = {
        "a_larger_gain_than_mlx_lms_file_at_every_length": all(
            row["speedup"][DISK]["median"] > row["speedup"][MLX_FILE]["median"] for row in rows
        ),
        "ram_never_slower_than_disk": all(row["disk_over_ram"]["median"] >= 1 for row in rows),
        "disk_at_most_1_15_times_ram": all(row["disk_over_ram"]["median"] <= MOST_DISK for row in rows),
        "all_tokens_equal": all(row["same_token"] for row in rows),
    }
    return {"verdict": verdict, "lengths": rows}


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """Two or three lengths, each asked three times without a cache, and five times by each way with one."""
    lengths = (256, 1024, 4096) if bench.on_gpu else (256, 1024)
    for found in measured(bench, folder, dict.fromkeys(lengths, 3), 5):
        theirs, ms, tokens = found["speedup"][MLX_FILE]["median"], found["first_token_ms"], found["tokens"]
        yield {"what": f"first token: without a cache / from disk, in time: {tokens} tokens",
               "ratio": found["speedup"][DISK], "asked": f"over {theirs} (mlx-lm's own file)",
               "first": ms[COLD], "second": ms[DISK], "unit": "ms", "equal": found["same_token"],
               "headline": "restore" if tokens == lengths[-1] else ""}  # fmt: skip
        yield {"what": f"first token: from disk / from RAM, in time: {tokens} tokens",
               "ratio": found["disk_over_ram"], "asked": f"1 to {MOST_DISK}", "first": ms[DISK], "second": ms[RAM],
               "unit": "ms", "equal": found["same_token"]}  # fmt: skip


_NAMES = {COLD: "without cache", DISK: "disk", RAM: "RAM", MLX_COLD: "mlx-lm without cache",
          MLX_FILE: "mlx-lm's file"}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    rows = content["lengths"]
    number = say(rows[-1], "at {tokens:,} tokens {speedup[disk][median]} times as fast; mlx-lm's own file "
                 "{speedup[mlx-lm, file][median]}")  # fmt: skip
    speedups = [{**row, "above": yes(row["speedup"][DISK]["median"] > row["speedup"][MLX_FILE]["median"], "no")}
                for row in rows]  # fmt: skip
    return Report("the first token from disk and from RAM", number, {
        "summary": _summary(rows), "first tokens": columns(rows, FIRST_TOKENS),
        "speed-ups": columns(speedups, SPEEDUPS),
    })  # fmt: skip


def _summary(rows: list[Json]) -> str:
    ours, theirs = (
        ", ".join(f"{row['speedup'][name]['median']} at {row['tokens']}" for row in rows)
        for name in ("disk", "mlx-lm, file")
    )
    ratios = [row["disk_over_ram"]["median"] for row in rows]
    return "\n".join((
        f"From disk the first token comes so many times as fast as without a cache, by tokens: {ours}.",
        f"With mlx-lm's own file, against mlx-lm's own prefill: {theirs}.",
        say({**rows[-1]["first_token_ms"], "tokens": rows[-1]["tokens"]}, (
            "At {tokens} tokens it takes {disk[median]:.0f} ms from disk, {memory[median]:.0f} from RAM and "
            "{mlx-lm, file[median]:.0f} with mlx-lm's file."
        )),
        f"Disk takes {min(ratios)} to {max(ratios)} times as long as RAM (targets: at least 1, at most 1.15).",
    ))  # fmt: skip


FIRST_TOKENS = {
    "tokens": "{tokens}", "MB": "{mb}",
    **{f"{title}, ms": f"{{first_token_ms[{name}]}}" for name, title in _NAMES.items()},
}  # fmt: skip
SPEEDUPS = {
    "tokens": "{tokens}",
    **{_NAMES[name]: f"{{speedup[{name}]}}" for name in (DISK, RAM, MLX_FILE)},
    "disk above mlx-lm's file": "{above}", "disk / RAM": "{disk_over_ram}",
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "008", run, render)
