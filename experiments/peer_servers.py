"""Processes of stoker, mlx_lm.server and vllm-mlx: the same model, places and BLAS. Experiments only; no MLX."""

import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import Json, note
from worker_process import ServerProcess, WorkerProcess

from stoker import GenerationResult, Producer
from stoker_worker.embedded_redis import EmbeddedServer

# --- how clients ask stoker and the servers beside it, greedily, and what their answers have in common ---

PLACES = 16
STOKER, MLX_LM, VLLM_MLX = "stoker", "mlx_lm.server", "vllm-mlx"
_PATIENCE_S = 1800.0

Message = dict[str, str]
Conversed = Mapping[str, Sequence[Message]]
"""By agent."""


@dataclass(frozen=True)
class Job:
    prompt: str
    max_tokens: int
    system: str | None = None

    @property
    def messages(self) -> list[Message]:
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), user(self.prompt)]


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        n_prompt: the prompt's tokens, as the server counts them.
        n_cached: of them, those that it did not prefill; ``None``: it does not tell.
    """

    text: str
    n_prompt: int
    n_cached: int | None = None


class Stoker:
    """
    Attributes:
        survived: the signals after which it still has its caches.
    """

    survived = frozenset((signal.SIGTERM, signal.SIGKILL))

    def __init__(self, producer: Producer, worker: WorkerProcess) -> None:
        self._producer, self.restart = producer, worker.restart

    def turns(self, conversations: Conversed, max_tokens: int) -> dict[str, Answer]:
        """The next answer of each agent; a conversation ends with the user's new message."""

        def ask(agent: str) -> Answer:
            message = conversations[agent][-1]
            ticket = self._producer.submit(agent_id=agent, messages=[message], context="append", max_tokens=max_tokens)
            return _answer(ticket.result(_PATIENCE_S))

        return _each_by_itself(ask, conversations)

    def backlog(self, name: str, jobs: Sequence[Job]) -> list[Answer]:
        """The answers of independent jobs, as fast as the server can take them."""
        tickets = self._producer.submit_many(
            {"agent_id": job_agent(name, n), "messages": job.messages, "max_tokens": job.max_tokens}
            for n, job in enumerate(jobs)
        )
        return list(map(_answer, self._producer.results(tickets, _PATIENCE_S)))


class HttpServer:
    """A peer behind OpenAI's chat completions, with the methods of `Stoker`."""

    def __init__(self, port: int, model: str | None, survived: frozenset[signal.Signals]) -> None:
        self.port, self._model, self.survived = port, model, survived
        self.process: ServerProcess | None = None

    def turns(self, conversations: Conversed, max_tokens: int) -> dict[str, Answer]:
        return _each_by_itself(lambda agent: self._ask(conversations[agent], max_tokens), conversations)

    def backlog(self, name: str, jobs: Sequence[Job]) -> list[Answer]:
        with ThreadPoolExecutor(2 * PLACES) as threads:  # so that none of its places waits for a client
            return list(threads.map(lambda job: self._ask(job.messages, job.max_tokens), jobs))

    def restart(self, with_signal: signal.Signals) -> float:
        assert self.process is not None
        return self.process.restart(with_signal)

    def is_ready(self) -> bool:
        try:
            with self._response("GET", "/health", {}, 5.0) as response:
                return response.status == 200
        except OSError:
            return False

    def _ask(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        body: Json = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0.0}
        body |= {"model": self._model} if self._model else {}
        while True:
            try:
                with self._response("POST", "/v1/chat/completions", body, _PATIENCE_S) as response:
                    if response.status != 200:
                        raise RuntimeError(response.read())
                    return _whole(json.load(response))
            except ConnectionResetError:
                time.sleep(0.1)  # mlx_lm.server listens to five new clients at a time, and turns the others away

    @contextmanager
    def _response(self, method: str, path: str, body: Json, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()


def _whole(reply: Json) -> Answer:
    text, usage = reply["choices"][0]["message"].get("content") or "", reply["usage"]
    n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Answer(text, usage["prompt_tokens"], n_cached=n_cached)


Server = Stoker | HttpServer


def _each_by_itself(ask: Callable[[str], Answer], agents: Collection[str]) -> dict[str, Answer]:
    """Each agent is a client of its own."""
    with ThreadPoolExecutor(len(agents)) as threads:
        return dict(zip(agents, threads.map(ask, agents), strict=True))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def job_agent(backlog: str, n: int) -> str:
    """The agent whose memory stoker saves a backlog's job in."""
    return f"{backlog} {n}"


def _answer(result: GenerationResult) -> Answer:
    return Answer(result.text, result.usage.prompt_tokens, result.usage.cached_tokens)


@dataclass(frozen=True)
class Servers:
    """What is measured, and how to start it.

    Attributes:
        blas: library to preload; ``None``: none.
        agents: how many conversations a server is asked to keep.
        vllm_mlx: Python of its environment; ``None`` leaves it out.
        cache_bytes: RAM for caches of conversations that do not run; vllm-mlx then has its tier on disk, too. ``None``:
            as each has it by itself.
    """

    model: Path
    dtype: str
    blas: str | None
    folder: Path
    agents: int
    vllm_mlx: Path | None
    cache_bytes: int | None = None

    @contextmanager
    def started(self, name: str) -> Iterator[tuple[dict[str, Server], Path]]:
        """All servers, without any cache, and the folder that they share."""
        folder = self.folder / name
        folder.mkdir()
        note(f"{name}: starting")
        with ExitStack() as stack:
            servers = {
                STOKER: stack.enter_context(_stoker(self, folder)),
                MLX_LM: stack.enter_context(_mlx_lm_server(self, folder)),
            }
            if self.vllm_mlx is not None:
                servers[VLLM_MLX] = stack.enter_context(_vllm_mlx(self, self.vllm_mlx, folder))
            for server in servers.values():
                server.backlog("warm-up", [Job("Hello!", 2)])
            yield servers, folder


def rotated(servers: Mapping[str, Server], n: int) -> list[str]:
    """Their names; another one is first for the next `n`."""
    names = list(servers)
    return names[n % len(names) :] + names[: n % len(names)]


@contextmanager
def _stoker(of: Servers, folder: Path) -> Iterator[Server]:
    with EmbeddedServer(folder / "redis") as redis, Producer(redis.url) as producer:
        options = ["--model", str(of.model), "--dtype", of.dtype, "--max-batch", str(PLACES)]
        options += _limit("--memory-max-bytes", of.cache_bytes)
        with WorkerProcess(redis.url, store(folder), *options) as worker:
            yield Stoker(producer, worker)


def store(folder: Path) -> Path:
    """The agent memory that stoker leaves in the servers' folder."""
    return folder / "store"


def _mlx_lm_server(of: Servers, folder: Path) -> AbstractContextManager[Server]:
    options = ["--model", str(of.model), "--decode-concurrency", str(PLACES), "--log-level", "WARNING"]
    options += ["--prompt-cache-size", str(2 * of.agents)]  # a turn leaves two caches: of its prompt and of its end
    options += _limit("--prompt-cache-bytes", of.cache_bytes)
    server = HttpServer(_free_port(), None, frozenset())
    return _served(server, [sys.executable, "-m", "mlx_lm.server", *options], folder / "mlx_lm.log", of.blas, {})


def _vllm_mlx(of: Servers, python: Path, folder: Path) -> AbstractContextManager[Server]:
    """`python`: of an environment with vllm-mlx. It saves its caches at a stop, under the home that it is given."""
    options = ["serve", str(of.model), "--continuous-batching", "--max-num-seqs", str(PLACES), "--offline"]
    options += ["--completion-batch-size", str(PLACES)]
    if of.cache_bytes is not None:
        options += ["--cache-memory-mb", str(of.cache_bytes // 2**20), "--ssd-cache-dir", str(folder / "ssd")]
    server = HttpServer(_free_port(), str(of.model), frozenset((signal.SIGTERM,)))
    variables = {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-c", "from vllm_mlx.cli import main; main()", *options]
    return _served(server, command, folder / "vllm_mlx.log", of.blas, variables)


def _limit(option: str, n_bytes: int | None) -> list[str]:
    return [] if n_bytes is None else [option, str(n_bytes)]


@contextmanager
def _served(
    server: HttpServer, command: list[str], log: Path, blas: str | None, variables: Mapping[str, str]
) -> Iterator[Server]:
    environment = {**os.environ, **variables, **({"LD_PRELOAD": blas} if blas else {})}
    command += ["--port", str(server.port)]
    server.process = process = ServerProcess(command, log, is_ready=server.is_ready, environment=environment)
    try:
        yield server
    finally:
        process.stop(signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
