"""Command `stoker-worker`: makes the worker's objects from the settings and runs it. Only this module wires them."""

import logging
import os
import time
from contextlib import ExitStack, closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from stoker_shared.environment import ENV_PREFIX, SHOWN, publish
from stoker_shared.errors import QueueHeld, StoreUnusable
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples
from stoker_shared.text import mask_url
from stoker_worker.cli.config_command import config
from stoker_worker.cli.doctor_command import doctor
from stoker_worker.cli.ending import cleaned_up_when_terminated, errors_in_one_line, late_signals_ignored
from stoker_worker.cli.figures_command import figures
from stoker_worker.cli.memory_commands import memory
from stoker_worker.cli.run_options import SettingsCommand, settings_from
from stoker_worker.cli.service_command import service

if TYPE_CHECKING:
    from stoker_worker.engine.provider import MlxProvider
    from stoker_worker.engine.scripted import ScriptedProvider
    from stoker_worker.memory.store import AgentCacheStore
    from stoker_worker.metrics.watch import Watch
    from stoker_worker.queue.lease import OwnStore
    from stoker_worker.settings import WorkerSettings

log = logging.getLogger("stoker_worker")

_STORE_POLL_S: Final = 1.0


@click.group(
    cls=LaidOutGroup,
    sections={
        "Worker": ("run", "service", "config", "doctor", "figures"),
        "Tools": ("memory", "model"),
        "Try it": ("demo",),
    },
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
main.add_command(config)
main.add_command(doctor)
main.add_command(figures)
main.add_command(service)


@main.command(
    cls=SettingsCommand,
    epilog=examples(
        "stoker-worker run --model mlx-community/Qwen3-4B-4bit --redis embedded",
        "stoker-worker run --model ~/models/mine --queues urgent,generate --standby",
        "stoker-worker run --engine scripted --redis embedded    # for tests of your own service",
        f"{ENV_PREFIX}MAX_BATCH=8 stoker-worker run --model ~/models/mine    # each option is also a variable",
        "stoker-worker run --config worker.toml --max-idle-s 600    # and a name in the file: max_batch = 8",
    ),
)
def run(**options: Any) -> None:
    """Run the worker until it is told to stop (SIGTERM or Ctrl-C: drain; twice: at once)."""
    with errors_in_one_line(), late_signals_ignored():
        from stoker_worker.cli.log_lines import configure_logging

        settings = settings_from(options)
        configure_logging(settings)
        _run(settings)


def _run(settings: "WorkerSettings") -> None:
    from stoker_worker.metrics.watch import Watch
    from stoker_worker.pipeline.worker import Worker
    from stoker_worker.queue.rq_queue import open_queue
    from stoker_worker.settings import EMBEDDED

    log.info("settings: %s", settings.describe())
    provider = _provider(settings)
    watch = Watch()
    watch.is_standby = settings.standby
    deposed: QueueHeld | None = None
    with ExitStack() as cleanup:
        _serve_metrics(settings, watch, cleanup)
        # The store comes before the queue: a worker that sleeps can lose its lease, but it keeps its store, and then no
        # other worker could open it. It comes before the server: a standby would use that of its predecessor, which
        # ends with the predecessor.
        agents = cleanup.enter_context(closing(_agents(settings)))
        watch.store, watch.shared_store = agents.use, agents.shared_use
        agents.start_upkeep()
        redis_url = settings.redis_url
        if redis_url == EMBEDDED:
            redis_url = _embedded_redis(settings, cleanup)
        own = _own_store(settings, agents)
        opening = open_queue(settings, redis_url, store=own, model=provider.model, metrics=watch.metrics)
        queue = cleanup.enter_context(opening)
        watch.queues = queue.depths.read
        worker = Worker(settings, queue.rq_queue, agents, provider, watch.metrics)
        watch.state = worker.state
        queue.registration.figures = watch.figures
        if not settings.ignore_shutdown_command:
            queue.registration.on_shutdown = worker.request_stop
        worker.install_signal_handlers()
        try:
            worker.run()
        except QueueHeld as error:  # it is logged
            deposed = error
    log.info("stopped")
    if worker.is_still_loading():
        # All is closed. Python's own exit would wait for a download, and MLX aborts a process that exits while it runs.
        logging.shutdown()
        os._exit(1 if deposed else 0)
    if deposed is not None:
        raise deposed


def _embedded_redis(settings: "WorkerSettings", cleanup: ExitStack) -> str:
    """Start the worker's own server, which `cleanup` stops; returns its URL."""
    from stoker_worker.embedded_redis import EmbeddedServer

    server = EmbeddedServer(settings.store_folder / "redis", first_port=6379)
    url = cleanup.enter_context(server).url
    log.info("own Redis server at %s; `stoker` finds it by %s", mask_url(url), SHOWN)
    try:
        publish(url, server.lock)
    except (OSError, RuntimeError) as error:  # a user without a home folder, or one that cannot be written
        log.warning("cannot write %s, so `stoker` needs --redis: %s", SHOWN, error)
    return url


def _agents(settings: "WorkerSettings") -> "AgentCacheStore":
    """Open the store, with the shared one behind it if there is one. Raises `StoreUnusable`."""
    from stoker_worker.memory.ram_cache import default_memory_bytes
    from stoker_worker.memory.replica.bucket import Bucket
    from stoker_worker.memory.store import AgentCacheStore

    store = AgentCacheStore(
        settings.store_folder,
        max_bytes=settings.store_max_bytes,
        memory_max_bytes=default_memory_bytes() if settings.memory_max_bytes is None else settings.memory_max_bytes,
        keep_versions=settings.keep_versions,
        agent_ttl_s=settings.agent_ttl_s,
        session_ttl_s=settings.session_ttl_s,
        shared=None if settings.shared_store is None else Bucket(settings.shared_store),
        shared_max_bps=settings.shared_store_max_bps,
        wait=settings.standby,
    )
    with ExitStack() as opened:
        opened.enter_context(closing(store))
        _meet_shared_store(settings, store)
        opened.pop_all()
    return store


def _meet_shared_store(settings: "WorkerSettings", store: "AgentCacheStore") -> None:
    """Wait for a shared store that has never answered: only its id shows which workers may serve a queue together.
    Raises `StoreUnusable`."""
    from stoker_worker.memory.database import read_note
    from stoker_worker.memory.replica.bucket import BucketAway

    if settings.shared_store is None:
        with store.parts.database.snapshot() as connection:
            note = read_note(connection)
        if note is not None:
            raise StoreUnusable(
                f"the store {settings.store_folder} is a copy of the shared store {note.url}: start the worker with "
                f"--shared-store {note.url}, or give it another folder with --store"
            )
        return
    while True:
        try:
            return store.meet()
        except BucketAway:  # it is logged
            if store.shared_id():
                return
        time.sleep(_STORE_POLL_S)


def _own_store(settings: "WorkerSettings", agents: "AgentCacheStore") -> "OwnStore":
    """The store's facts for the queue. Raises `StoreUnusable`."""
    from stoker_worker.memory.database_file import refused_if_unusable
    from stoker_worker.memory.locks import store_name
    from stoker_worker.memory.transcripts import has_agents
    from stoker_worker.queue.lease import OwnStore

    with refused_if_unusable(settings.store_folder), agents.parts.database.snapshot() as connection:
        name = store_name(settings.store_folder)
        return OwnStore(name, agents.shared_id(), has_agents(connection), agents.is_at_hand)


def _serve_metrics(settings: "WorkerSettings", watch: "Watch", cleanup: ExitStack) -> None:
    if settings.metrics_port is None:
        return
    try:
        cleanup.enter_context(watch.served(settings.metrics_port, stuck_after_s=settings.stuck_after_s))
    except OSError as error:
        raise click.ClickException(f"--metrics-port {settings.metrics_port}: {error.strerror}") from error


def _provider(settings: "WorkerSettings") -> "MlxProvider | ScriptedProvider":
    """Choose and check the model provider, before anything is opened: a worker without a model must take no lease."""
    if settings.engine == "scripted":
        from stoker_worker.engine.scripted import ScriptedProvider

        width, name = settings.max_batch or 16, settings.model or "scripted"
        return ScriptedProvider(max_batch=width, steps_per_s=settings.scripted_steps_per_s, model=name)
    from stoker_worker.engine.provider import MlxProvider
    from stoker_worker.models.blas import advice_without_blas, preload_blas

    preload_blas()
    if advice := advice_without_blas():
        log.warning(advice)
    provider = MlxProvider(settings)
    provider.check_model()
    return provider


@main.group()
def model() -> None:
    """Get models ready."""


@model.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def import_model(file: Path, folder: Path) -> None:
    """Turn a GGUF FILE of the SmolLM family (F32, F16, Q4_0, Q4_1, Q8_0) into an mlx-lm FOLDER."""
    with errors_in_one_line():
        from stoker_worker.models.gguf import import_gguf

        import_gguf(file, folder)
    click.echo(f"{folder}: ready for `stoker-worker run --model {quote(str(folder))}`")


@main.command()
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path(".demo"), help="Where it keeps things.  [.demo]"
)
@click.option("--model", help="Another model than SmolLM2-135M-Instruct.")
def demo(folder: Path, model: str | None) -> None:
    """Two agents, two turns, the worker stopped in between."""
    with errors_in_one_line(), cleaned_up_when_terminated():
        from stoker_worker.cli.demo import run_demo

        run_demo(folder, model)
