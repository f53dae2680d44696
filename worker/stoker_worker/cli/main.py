"""Command `stoker-worker`: makes the worker's objects from the settings and runs it. The only place that wires them."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from stoker_shared.environment import ENV_PREFIX
from stoker_shared.errors import StokerError
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples, options_under
from stoker_worker.cli.memory_commands import memory

if TYPE_CHECKING:
    from stoker_worker.ports import ModelProviderPort
    from stoker_worker.settings import WorkerSettings

log = logging.getLogger("stoker_worker")

_MISSING = "the worker's packages are missing ({}); install them with: pip install 'stoker[worker]'"


_serving = options_under("Model and queue")
_store = options_under("Agent memory")
_batch = options_under("Batch")
_ending = options_under("Starting and stopping")
_testing = options_under("Without a model")


@click.group(
    cls=LaidOutGroup,
    sections={"Worker": ("run",), "Tools": ("memory", "model"), "Try it": ("demo",)},
    context_settings=SETTINGS,
    epilog=examples(
        "stoker-worker run --model mlx-community/Qwen3-4B-4bit --store ~/.stoker",
        "stoker-worker memory ls",
        "stoker-worker demo",
    ),
)
@click.version_option(package_name="stoker")
def main() -> None:
    """Stoker's worker: drains a Redis queue into one continuous batch and keeps each agent's cache on disk."""


main.add_command(memory)


@main.command(
    epilog=examples(
        "stoker-worker run --model mlx-community/Qwen3-4B-4bit --redis embedded",
        "stoker-worker run --model ~/models/mine --queues urgent,generate --standby",
        "stoker-worker run --engine scripted --redis embedded    # for tests of your own service",
        f"{ENV_PREFIX}MAX_BATCH=8 stoker-worker run --model ~/models/mine    # each option is also a variable",
    )
)
@_serving("--model", help="Hugging Face repo id or mlx-lm folder.")
@_serving(
    "--redis", "redis_url", metavar="URL",
    help="URL, or `embedded` for a server of the worker's own.  [redis://127.0.0.1:6379]",
)  # fmt: skip
@_serving("--queues", help="Comma-separated, highest priority first.  [generate]")
@_serving("--dtype", type=click.Choice(["auto", "native", "float32"]), help="auto: float32 on a CPU.  [auto]")
@_serving("--skip-proof", is_flag=True, default=None, help="Do not try the model in a batch before serving it.")
@_serving(
    "--allow-callbacks", metavar="MODULE[,MODULE]", help="Modules whose functions jobs may name as callbacks.  [none]"
)
@_store("--store", type=click.Path(path_type=Path), help="Folder of the agents' memory.  [~/.stoker]")
@_store("--store-dtype", type=click.Choice(["native", "q8", "q4"]), help="Cache blocks on disk.  [native]")
@_store("--store-max-bytes", type=int, help="Disk space for the store.  [80 % of its own and the free space]")
@_store("--memory-max-bytes", type=int, help="RAM for caches of recent agents; 0: none.  [1/16 of all]")
@_store("--keep-versions", type=int, help="Versions of an agent that a rollback can return to.  [16]")
@_store("--agent-ttl", metavar="DURATION", help="Remove agents unused for so long: 30d, 12h, 90m, seconds.  [never]")
@_store("--share-prefixes/--no-share-prefixes", default=None, help="Use cached prefixes across agents.  [share]")
@_batch("--max-batch", type=int, help="Most jobs in flight at once.  [32, or what the KV memory holds]")
@_batch("--kv-max-bytes", type=int, help="KV memory of the batch.  [from the device]")
@_batch("--kv-bits", type=click.Choice(["8"]), help="Keep keys and values in 8 bits.  [the model's own precision]")
@_batch("--max-step-s", type=float, help="Seconds of prefill in a step; twice that while a batch fills up.  [0.5]")
@_batch("--prefill-step-tokens", type=int, help="Prompt tokens of a sequence between two decode steps, at most.")
@_batch("--draft-ngram", is_flag=True, default=None, help="Narrow batches: guess answers that repeat their context.")
@_ending("--grace-s", type=float, help="Seconds a stop waits for running jobs.  [60]")
@_ending("--burst", is_flag=True, default=None, help="Leave when the queues are empty.")
@_ending("--standby", is_flag=True, default=None, help="Wait while another worker holds the queue, then take over.")
@_ending("-v", "--verbose", is_flag=True, default=None, help="Log more.")
@_testing("--engine", type=click.Choice(["mlx", "scripted"]), help="scripted: deterministic, without a model.  [mlx]")
@_testing("--scripted-steps-per-s", type=float, help="Speed of the scripted engine.  [200]")
def run(**options: Any) -> None:
    """Run the worker until it is told to stop (SIGTERM or Ctrl-C: drain; twice: at once)."""
    with _errors_in_one_line(), _late_signals_ignored():
        settings = _settings(options)
        _configure_logging(verbose=settings.verbose)
        _run(settings)


def _configure_logging(*, verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname).1s %(threadName)-10s %(message)s",
        stream=sys.stderr,
    )
    if not verbose:
        for chatty in ("rq", "stoker_worker.rq", "httpx", "transformers"):
            logging.getLogger(chatty).setLevel(logging.WARNING)


@contextmanager
def _late_signals_ignored() -> Iterator[None]:
    """Python restores the default handlers at its exit: a late signal would make a clean stop look like a crash."""
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """An error that an operator can mend becomes one line; anything else is a bug and keeps its traceback."""
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
        problems = "; ".join(": ".join([*map(str, e["loc"]), e["msg"]]) for e in error.errors())
        raise click.UsageError(problems) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _run(settings: "WorkerSettings") -> None:
    from stoker_worker.memory.database_file import refuse_other_formats
    from stoker_worker.memory.ram_cache import default_memory_bytes
    from stoker_worker.memory.store import AgentCacheStore
    from stoker_worker.pipeline.worker import Worker
    from stoker_worker.queue.connect import open_queue
    from stoker_worker.settings import EMBEDDED

    log.info("settings: %s", settings.describe())
    provider = _provider(settings)
    with ExitStack() as cleanup:
        redis_url = settings.redis_url
        refuse_other_formats(settings.store_folder)  # before anything is made in the folder
        if redis_url == EMBEDDED:
            from stoker_worker.embedded_redis.server import EmbeddedServer

            server = EmbeddedServer(settings.store_folder / "redis", preferred_port=6379)
            redis_url = cleanup.enter_context(server).url
            log.info("own Redis server at %s", redis_url)
        # Before the queue: a worker that sleeps loses its lease but not its store, and no worker runs without a store.
        store = AgentCacheStore(
            settings.store_folder,
            max_bytes=settings.store_max_bytes,
            memory_max_bytes=default_memory_bytes() if settings.memory_max_bytes is None else settings.memory_max_bytes,
            keep_versions=settings.keep_versions,
            agent_ttl_s=settings.agent_ttl_s,
            wait=settings.standby,
        )
        cleanup.callback(store.close)
        store.start_upkeep()
        queue = cleanup.enter_context(open_queue(settings, redis_url))
        worker = Worker(settings, queue.rq_queue, store, provider)
        queue.registration.on_shutdown = worker.request_stop
        worker.install_signal_handlers()
        worker.run()
    if worker.is_still_loading():
        # All is closed. Python's own exit would wait for a download, and MLX aborts a process that ends under it.
        logging.shutdown()
        os._exit(0)


def _provider(settings: "WorkerSettings") -> "ModelProviderPort":
    """The model provider, chosen and checked before anything is opened."""
    if settings.engine == "scripted":
        from stoker_worker.engine.scripted import ScriptedProvider

        return ScriptedProvider(max_batch=settings.max_batch or 16, steps_per_s=settings.scripted_steps_per_s)
    if settings.model is None:
        raise click.UsageError("--model is missing (or --engine scripted)")
    from stoker_worker.engine.provider import MlxProvider
    from stoker_worker.models.blas import advice_without_blas, preload_blas

    preload_blas()
    if advice := advice_without_blas():
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
        from stoker_worker.models.gguf.importer import import_gguf

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
        from stoker_worker.cli.demo import run_demo

        run_demo(folder, model)
