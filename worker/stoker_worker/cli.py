"""Command `stoker-worker`: settings into objects into `Worker.run`. The one place where things are wired."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from stoker_shared.errors import StokerError
from stoker_worker.memory_cli import memory

if TYPE_CHECKING:
    from stoker_worker.settings import WorkerSettings

log = logging.getLogger("stoker_worker")

_MISSING = "the worker's packages are missing ({}); install them with: pip install 'stoker[worker]'"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stoker")
def main() -> None:
    """Stoker's worker: drains a Redis queue into one continuous batch and keeps each agent's cache on disk."""


main.add_command(memory)


@main.command()
@click.option("--model", help="Hugging Face repo id or mlx-lm folder.")
@click.option(
    "--redis", "redis_url", help="URL, or `embedded` for a server of the worker's own.  [redis://127.0.0.1:6379]"
)
@click.option("--store", type=click.Path(path_type=Path), help="Folder of the agents' memory.  [~/.stoker]")
@click.option("--queues", help="Comma-separated, highest priority first.  [generate]")
@click.option("--max-batch", type=int, help="Most jobs in flight at once.  [16]")
@click.option("--dtype", type=click.Choice(["auto", "native", "float32"]), help="auto: float32 on a CPU.  [auto]")
@click.option("--skip-proof", is_flag=True, default=None, help="Do not try the model in a batch before serving it.")
@click.option("--share-prefixes/--no-share-prefixes", default=None, help="Use cached prefixes across agents.  [share]")
@click.option("--store-dtype", type=click.Choice(["native", "q8", "q4"]), help="Cache blocks on disk.  [native]")
@click.option("--store-max-bytes", type=int, help="Disk the store may take.  [80 % of what it has and what is free]")
@click.option("--memory-max-bytes", type=int, help="RAM for caches of recent agents; 0: none.  [1/16 of all]")
@click.option("--kv-max-bytes", type=int, help="KV memory of the batch.  [from the device]")
@click.option(
    "--max-step-s", type=float, help="Seconds of prefill in a step; twice that while a batch fills up.  [0.5]"
)
@click.option("--prefill-step-tokens", type=int, help="Prompt tokens of a row between two decode steps, at most.")
@click.option(
    "--engine", type=click.Choice(["mlx", "scripted"]), help="scripted: deterministic, without a model.  [mlx]"
)
@click.option("--scripted-steps-per-s", type=float, help="Speed of the scripted engine.  [200]")
@click.option(
    "--allow-callbacks", metavar="MODULE[,MODULE]", help="Modules whose functions jobs may name as callbacks.  [none]"
)
@click.option("--grace-s", type=float, help="Seconds a stop waits for running jobs.  [60]")
@click.option("--burst", is_flag=True, help="Leave when the queues are empty.")
@click.option("--standby", is_flag=True, help="Wait while another worker holds the queue, then take over.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def run(burst: bool, standby: bool, verbose: bool, **options: Any) -> None:
    """Run the worker until it is told to stop (SIGTERM or Ctrl-C: drain; twice: at once)."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname).1s %(threadName)-10s %(message)s",
        stream=sys.stderr,
    )
    if not verbose:
        for chatty in ("rq", "stoker_worker.rq", "httpx", "transformers"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
    with _errors_in_one_line(), _deaf_in_the_end():
        _run(options, burst=burst, standby=standby)


@contextmanager
def _deaf_in_the_end() -> Iterator[None]:
    """Python puts the default handlers back as it leaves: a late signal would make a clean stop look like a death."""
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """What an operator can mend is said in a line; anything else is a bug and keeps its traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(_MISSING.format(error.name)) from error
    except StokerError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error


def _settings(options: dict[str, Any]) -> "WorkerSettings":
    from stoker_worker.settings import read_settings

    try:
        return read_settings(options)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise click.UsageError(problems) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _run(options: dict[str, Any], *, burst: bool, standby: bool) -> None:
    from stoker_worker.memory.hot import default_memory_bytes
    from stoker_worker.memory.store import AgentStore
    from stoker_worker.rq_worker.connect import open_queue
    from stoker_worker.settings import EMBEDDED
    from stoker_worker.worker import Worker

    settings = _settings(options)
    log.info("settings: %s", settings.describe())
    provider = _provider(settings)
    with ExitStack() as cleanup:
        redis_url = settings.redis_url
        if redis_url == EMBEDDED:
            from stoker_worker.redis_server import EmbeddedServer

            server = EmbeddedServer(settings.store_folder / "redis", preferred_port=6379)
            redis_url = cleanup.enter_context(server).url
            log.info("own Redis server at %s", redis_url)
        # Before the queue: a worker that sleeps loses its lease, but not its store, and without it nobody can work.
        store = AgentStore(
            settings.store_folder,
            max_bytes=settings.store_max_bytes,
            memory_max_bytes=default_memory_bytes() if settings.memory_max_bytes is None else settings.memory_max_bytes,
            wait=standby,
        )
        cleanup.callback(store.close)
        queue = cleanup.enter_context(open_queue(settings, redis_url, standby=standby))
        worker = Worker(settings, queue.rq_queue, store, provider, burst=burst)
        queue.identity.on_shutdown = worker.request_stop
        worker.install_signal_handlers()
        worker.run()


def _provider(settings: Any) -> Any:
    """What makes the engine, chosen and checked before anything is opened."""
    if settings.engine == "scripted":
        from stoker_worker.engine.scripted import ScriptedProvider

        return ScriptedProvider(max_batch=settings.max_batch, steps_per_s=settings.scripted_steps_per_s)
    if settings.model is None:
        raise click.UsageError("--model is missing (or --engine scripted)")
    from stoker_worker.engine.blas import advice_without_openblas, preload_openblas
    from stoker_worker.engine.build import MlxProvider

    preload_openblas()
    if advice := advice_without_openblas():
        log.warning(advice)
    return MlxProvider(settings)


@main.group()
def model() -> None:
    """Get models ready."""


@model.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def import_model(file: Path, folder: Path) -> None:
    """Turn a GGUF FILE (Q4_0, Q4_1, Q8_0, F16) into an mlx-lm FOLDER."""
    with _errors_in_one_line():
        from stoker_worker.engine.gguf import import_gguf

        import_gguf(file, folder)
    click.echo(f"{folder}: ready for `stoker-worker run --model {folder}`")


@main.command()
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path(".demo"), help="Where it keeps things.  [.demo]"
)
@click.option("--model", help="Another model than SmolLM2-135M-Instruct.")
def demo(folder: Path, model: str | None) -> None:
    """Four agents, two turns, the worker stopped in between."""
    with _errors_in_one_line():
        from stoker_worker.demo import run_demo

        run_demo(folder, model)
