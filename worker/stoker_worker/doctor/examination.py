"""The order of the checks. Runs them on the calling thread, which owns MLX from then on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stoker_worker.doctor import device, model, redis_server, shared_store, speed, store_folder, system
from stoker_worker.doctor.answers import batched_equals_single
from stoker_worker.doctor.check import Check, Finding, Status
from stoker_worker.doctor.own_memory import OwnMemory
from stoker_worker.ports import ModelProviderPort
from stoker_worker.settings import WorkerSettings

MEASURED_S: Final = 6.0
"""How long each batch width is measured."""


def examine(settings: WorkerSettings) -> Iterator[tuple[str, Finding]]:
    """Every check by its name, one after the other; with a model, also the self-test."""
    for check in _of_machine(settings):
        yield check.name, check.made()
    if settings.model is None:
        return
    fits = Check("model", lambda: model.weights(str(settings.model)))
    found = fits.made()
    yield fits.name, found
    if found.status != Status.FAIL:
        with store_folder.scratch_folder(settings.store_folder) as scratch:
            yield from self_test(_provider(settings, Path(scratch)), Path(scratch), seconds=MEASURED_S)


def self_test(provider: ModelProviderPort, scratch: Path, *, seconds: float) -> Iterator[tuple[str, Finding]]:
    """
    Args:
        provider: loads the model, on this thread.
        scratch: an empty folder on the store's disk.
        seconds: how long each batch width is measured.
    """
    load = model.ModelLoad(provider)
    try:
        for check in _of_model(load, scratch, seconds):
            yield check.name, check.made()
    finally:
        load.close()


def _of_machine(settings: WorkerSettings) -> Iterator[Check]:
    yield from system.checks()
    yield from device.checks()
    yield from redis_server.checks(settings.redis_url)
    yield from store_folder.checks(settings.store_folder)
    yield from shared_store.checks(settings.shared_store)


def _of_model(load: model.ModelLoad, scratch: Path, seconds: float) -> Iterator[Check]:
    yield from load.checks()
    if (engine := load.engine) is None or (loaded := load.loaded) is None:
        return
    yield Check("batched equals single", lambda: batched_equals_single(engine, loaded))
    yield from OwnMemory(engine, loaded, scratch / "agents").checks()
    yield from speed.checks(engine, loaded, seconds=seconds)


def _provider(settings: WorkerSettings, scratch: Path) -> ModelProviderPort:
    """As the worker's own, but what it remembers between starts is not used: the model is proved anew."""
    from stoker_worker.engine.provider import MlxProvider

    return MlxProvider(settings.model_copy(update={"store": scratch / "proofs"}))
