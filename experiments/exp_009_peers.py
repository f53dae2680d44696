"""EXP-009, peers: turns of agents and a backlog of mixed jobs, through this worker and through mlx_lm.server.

Both keep running, serve the same model in the same dtype with the same BLAS, and take turns: while one works the other
waits. Run: ``python experiments/exp_009_peers.py``.
"""

import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench import Bench, main
from common import Json, machine, note, spread
from exp_009_report import render
from prompts import text_of

from stoker import Producer
from stoker_worker.embedded_redis.server import EmbeddedServer
from stoker_worker.models.blas import find_blas

REPORT = "EXP-009-peers.md"
AGENTS = 8
PLACES = 16
MOST_ROUND, LEAST_RATE = 0.9, 1.3
KINDS = ("English", "German", "French", "Spanish", "Python", "Portuguese")

Message = dict[str, str]


class Peer(Protocol):
    """A server of one model. All answers are greedy."""

    def turns(self, conversations: Mapping[str, Sequence[Message]], max_tokens: int) -> dict[str, str]:
        """The next answer of each agent; a conversation ends with the user's new message."""
        ...

    def backlog(self, jobs: Sequence["Job"]) -> list[str]:
        """The answers of independent jobs, as fast as the server can take them."""
        ...


@dataclass(frozen=True)
class Job:
    prompt: str
    max_tokens: int


class Stoker:
    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._n_backlogs = 0

    def turns(self, conversations: Mapping[str, Sequence[Message]], max_tokens: int) -> dict[str, str]:
        tickets = {
            agent: self._producer.submit(
                agent_id=agent, messages=[messages[-1]], context="append", max_tokens=max_tokens
            )
            for agent, messages in conversations.items()
        }
        return {agent: ticket.result(timeout_s=900).text for agent, ticket in tickets.items()}

    def backlog(self, jobs: Sequence[Job]) -> list[str]:
        self._n_backlogs += 1
        tickets = self._producer.submit_many(
            {
                "agent_id": f"backlog {self._n_backlogs} {n}",
                "messages": [_user(job.prompt)],
                "max_tokens": job.max_tokens,
            }
            for n, job in enumerate(jobs)
        )
        return [ticket.result(timeout_s=1800).text for ticket in tickets]


class MlxLmServer:
    def __init__(self, port: int) -> None:
        self._port = port

    def turns(self, conversations: Mapping[str, Sequence[Message]], max_tokens: int) -> dict[str, str]:
        with ThreadPoolExecutor(len(conversations)) as threads:
            answers = threads.map(lambda messages: self._answer(messages, max_tokens), conversations.values())
            return dict(zip(conversations, answers, strict=True))

    def backlog(self, jobs: Sequence[Job]) -> list[str]:
        with ThreadPoolExecutor(2 * PLACES) as threads:  # so that none of its places waits for a client
            return list(threads.map(lambda job: self._answer([_user(job.prompt)], job.max_tokens), jobs))

    def _answer(self, messages: Sequence[Message], max_tokens: int) -> str:
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0.0}
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1800)
            try:
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                reply = json.loads(connection.getresponse().read())
                return str(reply["choices"][0]["message"].get("content") or "")
            except ConnectionResetError:
                time.sleep(0.1)  # it listens to five new clients at a time, and turns the others away
            finally:
                connection.close()

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


# --- the processes ---


@contextmanager
def _stoker(model: Path, folder: Path) -> Iterator[Stoker]:
    options = [
        "--max-batch",
        str(PLACES),
        "--dtype",
        "float32",
        "--store",
        str(folder / "store"),
        "--model",
        str(model),
    ]
    with EmbeddedServer(folder / "redis") as server, Producer(server.url) as producer:
        log = folder / "stoker.log"
        command = [sys.executable, "-m", "stoker_worker", "run", "--redis", server.url, *options]
        with _process(command, log) as process:
            _wait(process, log, lambda: "ready: model" in log.read_text())
            yield Stoker(producer)


@contextmanager
def _mlx_lm_server(model: Path, folder: Path) -> Iterator[MlxLmServer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", str(model), "--port", str(port), "--decode-concurrency", str(PLACES)]
    options += ["--prompt-cache-size", str(2 * AGENTS), "--log-level", "WARNING"]
    peer, log = MlxLmServer(port), folder / "mlx_lm.log"
    blas = find_blas()  # the library that the worker loads by itself
    environment = {**os.environ, **({"LD_PRELOAD": blas} if blas else {})}
    with _process([sys.executable, "-m", "mlx_lm.server", *options], log, environment) as process:
        _wait(process, log, peer.is_ready)
        yield peer


@contextmanager
def _process(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", log: Path, is_ready: Callable[[], bool]) -> None:
    while not is_ready():
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)


def _as_float32(bench: Bench, folder: Path) -> Path:
    """The model as this worker runs it on a CPU: mlx_lm.server would multiply with the packed weights, much slower."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    source = Path(bench.source)
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(kept))
    weights = dict(tree_flatten(bench.network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


# --- the measurements ---


def turns(bench: Bench, peers: Mapping[str, Peer], *, n_tokens: int, max_tokens: int, rounds: int) -> Json:
    """The first round prefills each agent's first message; every later one adds a question."""
    histories: dict[str, dict[str, list[Message]]] = {name: {} for name in peers}
    for n in range(AGENTS):
        first = text_of(bench.encode, KINDS[n % len(KINDS)], n_tokens - n)
        for history in histories.values():
            history[f"agent {n}"] = [_user(first)]
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    same = True
    for n in range(rounds + 1):
        for name in list(peers) if n % 2 else reversed(list(peers)):
            note(f"round {n} of {rounds}: {name}")
            history = histories[name]
            began = time.perf_counter()
            answers = peers[name].turns(history, max_tokens)
            seconds[name].append(time.perf_counter() - began)
            for agent, answer in answers.items():
                history[agent] += [{"role": "assistant", "content": answer}, _user(f"And then, {n}?")]
        first, *others = histories.values()
        same = same and all(other == first for other in others)
    ours, theirs = seconds["stoker"], seconds["mlx_lm.server"]
    return {
        "agents": AGENTS,
        "tokens_at_first": n_tokens,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "first_s": {name: round(found[0], 2) for name, found in seconds.items()},
        "later_s": {name: spread(found[1:], digits=2) for name, found in seconds.items()},
        "first_ratio": round(ours[0] / theirs[0], 3),
        "later_ratio": spread([a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]),
        "same_answers": same,
    }


def backlog(bench: Bench, peers: Mapping[str, Peer], *, n_jobs: int, most_tokens: int, rounds: int) -> Json:
    """Jobs whose prompts have log-normal lengths, 8 to 48 tokens generated; other prompts in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    same = True
    for n in range(rounds):
        drawn = random.Random(n)
        lengths = [min(most_tokens, max(16, int(drawn.lognormvariate(4.5, 1.0)))) for _ in range(n_jobs)]
        jobs = [
            Job(text_of(bench.encode, drawn.choice(KINDS), length, seed=1000 * n + i), drawn.randint(8, 48))
            for i, length in enumerate(lengths)
        ]
        answers = {}
        for name in list(peers) if n % 2 else reversed(list(peers)):
            note(f"backlog {n + 1} of {rounds}: {name}")
            began = time.perf_counter()
            answers[name] = peers[name].backlog(jobs)
            seconds[name].append(time.perf_counter() - began)
        first, *others = answers.values()
        same = same and all(other == first for other in others)
    return {
        "jobs": n_jobs,
        "most_tokens": most_tokens,
        "seconds": {name: spread(found, digits=1) for name, found in seconds.items()},
        "rate": spread(  # of ours to theirs
            [b / a for a, b in zip(seconds["stoker"], seconds["mlx_lm.server"], strict=True)]
        ),
        "same_answers": same,
    }


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    facts = machine(bench.facts)
    model = _as_float32(bench, folder / "model")
    with ExitStack() as stack:
        peers: dict[str, Peer] = {
            "stoker": stack.enter_context(_stoker(model, folder)),
            "mlx_lm.server": stack.enter_context(_mlx_lm_server(model, folder)),
        }
        if quick:
            taken = turns(bench, peers, n_tokens=60, max_tokens=4, rounds=1)
            jobs = backlog(bench, peers, n_jobs=4, most_tokens=60, rounds=1)
        else:
            taken = turns(bench, peers, n_tokens=1000, max_tokens=32, rounds=6)
            jobs = backlog(bench, peers, n_jobs=60, most_tokens=1000, rounds=3)
    checks = {
        "a_later_round_takes_at_most_0_9_of_mlx_lm_servers": taken["later_ratio"]["median"] <= MOST_ROUND,
        "the_backlog_at_1_3_of_its_rate": jobs["rate"]["median"] >= LEAST_RATE,
        "all_answers_equal": taken["same_answers"] and jobs["same_answers"],
    }
    return {
        "machine": facts,
        "verdict": {"passed": all(checks.values()), **checks},
        "places": PLACES,
        "turns": taken,
        "backlog": jobs,
    }


if __name__ == "__main__":
    main(__doc__ or "", "009", REPORT, run, render)
