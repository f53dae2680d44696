"""Processes of stoker, mlx_lm.server and vllm-mlx: the same model, places and BLAS. Experiments only; no MLX."""

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import note
from peer_clients import MLX_LM, PLACES, STOKER, VLLM_MLX, HttpServer, Job, Server, Stoker
from worker_process import ServerProcess, WorkerProcess

from stoker import Producer
from stoker_worker.embedded_redis import EmbeddedServer


@dataclass(frozen=True)
class Servers:
    """What is measured, and how to start it.

    Attributes:
        blas: library to preload; ``None``: none.
        agents: how many conversations a server is asked to keep.
        vllm_mlx: Python of its environment; ``None`` leaves it out.
    """

    model: Path
    dtype: str
    blas: str | None
    folder: Path
    agents: int
    vllm_mlx: Path | None

    @contextmanager
    def started(self, name: str) -> Iterator[tuple[dict[str, Server], Path]]:
        """All servers, without any cache, and the folder that they share."""
        folder = self.folder / name
        folder.mkdir()
        note(f"{name}: starting")
        with ExitStack() as stack:
            servers = {
                STOKER: stack.enter_context(_stoker(self.model, self.dtype, folder)),
                MLX_LM: stack.enter_context(_mlx_lm_server(self.model, self.blas, folder, self.agents)),
            }
            if self.vllm_mlx is not None:
                servers[VLLM_MLX] = stack.enter_context(_vllm_mlx(self.vllm_mlx, self.model, self.blas, folder))
            for server in servers.values():
                server.backlog("warm-up", [Job("Hello!", 2)])
            yield servers, folder


def rotated(servers: Mapping[str, Server], n: int) -> list[str]:
    """Their names; another one is first for the next `n`."""
    names = list(servers)
    return names[n % len(names) :] + names[: n % len(names)]


@contextmanager
def _stoker(model: Path, dtype: str, folder: Path) -> Iterator[Server]:
    with EmbeddedServer(folder / "redis") as redis, Producer(redis.url) as producer:
        port = _free_port()
        options = ("--model", str(model), "--dtype", dtype, "--max-batch", str(PLACES), "--metrics-port", str(port))
        with WorkerProcess(redis.url, store(folder), *options) as worker:
            yield Stoker(producer, worker, port)


def store(folder: Path) -> Path:
    """The agent memory that stoker leaves in the servers' folder."""
    return folder / "store"


@contextmanager
def _mlx_lm_server(model: Path, blas: str | None, folder: Path, agents: int) -> Iterator[Server]:
    options = ["--model", str(model), "--decode-concurrency", str(PLACES), "--log-level", "WARNING"]
    options += ["--prompt-cache-size", str(2 * agents)]  # a turn leaves two caches: of its prompt and of its end
    server = HttpServer(_free_port(), None, frozenset())
    with _served(server, [sys.executable, "-m", "mlx_lm.server", *options], folder / "mlx_lm.log", blas, {}):
        yield server


@contextmanager
def _vllm_mlx(python: Path, model: Path, blas: str | None, folder: Path) -> Iterator[Server]:
    """`python`: of an environment with vllm-mlx. It saves its caches at a stop, under the home that it is given."""
    options = ["serve", str(model), "--continuous-batching", "--max-num-seqs", str(PLACES), "--offline"]
    options += ["--completion-batch-size", str(PLACES)]
    server = HttpServer(_free_port(), str(model), frozenset((signal.SIGTERM,)))
    variables = {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-c", "from vllm_mlx.cli import main; main()", *options]
    with _served(server, command, folder / "vllm_mlx.log", blas, variables):
        yield server


@contextmanager
def _served(
    server: HttpServer, command: list[str], log: Path, blas: str | None, variables: Mapping[str, str]
) -> Iterator[None]:
    environment = {**os.environ, **variables, **({"LD_PRELOAD": blas} if blas else {})}
    command += ["--port", str(server.port)]
    server.process = process = ServerProcess(command, log, is_ready=server.is_ready, environment=environment)
    try:
        yield
    finally:
        process.stop(signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
