"""The doctor's checks: what each finds, and that they leave Redis and the store as they were."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.support.server_fixture import connection  # noqa: F401
from tests.worker.models.tiny_gguf import metadata, random_weights, write_gguf

from stoker_shared.errors import ModelNotLoadable, StoreUnusable
from stoker_worker import doctor
from stoker_worker.doctor import Check, Finding, Status
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.memory.database import NAME
from stoker_worker.memory.database_file import FORMAT
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import GenerationEnginePort, LoadedModel, ModelProviderPort
from stoker_worker.ports.model import Batching
from stoker_worker.settings import EMBEDDED, WorkerSettings, read_settings


def made(checks: Iterable[Check]) -> dict[str, Finding]:
    return {name: look() for name, look in checks}


def test_a_check_that_raises_is_a_failure_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> Finding:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "_checks", lambda _: iter([("it", look), ("next", lambda: doctor.ok("seen"))]))
    found = dict(doctor.examine(WorkerSettings()))
    assert (found["it"].status, found["it"].line, found["next"].line) == (
        *(Status.FAIL, "RuntimeError: two lines", "seen"),
    )
    assert found["it"].advice


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (" sleep                1", Status.WARN),
        (" sleep                10 (sleep prevented by powerd, caffeinate)", Status.WARN),
        (" sleep                0", Status.OK),
    ],
)
def test_a_mac_that_will_sleep_is_noticed(line: str, status: Status) -> None:
    pmset = f"System-wide power settings:\n standby              1\n{line}\n displaysleep         5\n"
    assert doctor.sleep_in(pmset).status == status


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("rq", "no-such-package-of-stoker"))
    found = doctor.packages()
    assert (found.status, found.line) == (Status.FAIL, "not installed: no-such-package-of-stoker")


@pytest.mark.mlx
def test_a_macs_memory_for_models_is_that_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played: there is no Metal here. The names are those that mlx-lm reads there."""
    import mlx.core as mx

    info = {"device_name": "Apple M2", "memory_size": 24 * 2**30, "max_recommended_working_set_size": 16 * 2**30}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert doctor.device().line == "Metal: Apple M2, 16.0 GB for models and caches"


@pytest.fixture
def configured(connection: Redis) -> Iterator[Redis]:  # noqa: F811
    """A connection to a server whose settings are put back."""
    names = ("maxmemory-policy", "maxmemory", "appendonly")
    before = {name: str(connection.config_get(name)[name]) for name in names}
    yield connection
    for name, value in before.items():
        connection.config_set(name, value)


def test_nothing_is_wrong_with_a_server_of_the_workers_own() -> None:
    found = made(doctor.redis_checks(EMBEDDED))
    names = ["redis", "redis memory", "redis persistence", "clock"]
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys(names, Status.OK)


def test_settings_that_lose_jobs_and_a_server_that_is_nearly_full_are_found(redis_url: str, configured: Redis) -> None:
    configured.config_set("maxmemory", int(configured.info("memory")["used_memory"] * 1.1))
    assert doctor.redis_memory(configured).status == Status.WARN
    configured.config_set("maxmemory-policy", "allkeys-lru")
    configured.config_set("appendonly", "no")
    found = made(doctor.redis_checks(redis_url))
    assert found["redis memory"].status == Status.FAIL
    assert "noeviction" in found["redis memory"].advice
    assert found["redis persistence"].status == Status.WARN


def test_a_server_that_is_away_ends_its_checks_and_tells_no_password() -> None:
    found = made(doctor.redis_checks("redis://user:geheim@127.0.0.1:1"))
    assert [(name, finding.status) for name, finding in found.items()] == [("redis", Status.FAIL)]
    assert "geheim" not in found["redis"].line


def test_a_clock_that_differs_is_found(connection: Redis, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert doctor.clock(connection).status == Status.OK
    seconds, microseconds = connection.time()
    monkeypatch.setattr(connection, "time", lambda: (seconds + 3600, microseconds))
    found = doctor.clock(connection)
    assert found.status == Status.WARN
    assert found.line.endswith("s behind the server's")


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    found = made(doctor.store_checks(tmp_path / "a" / "b"))
    assert {finding.status for name, finding in found.items() if name != "store disk"} == {Status.OK}
    assert not list(tmp_path.iterdir())


def test_a_store_in_use_is_looked_at_beside_its_worker(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with closing(AgentCacheStore(folder)):
        before = sorted(folder.rglob("*"))
        found = made(doctor.store_checks(folder))
        assert sorted(folder.rglob("*")) == before
    assert found["store format"].line == f"format {FORMAT}"


def test_a_store_that_others_can_read_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert "chmod 700" in doctor.store_rights(tmp_path).advice


def test_caches_without_a_database_are_a_fault(tmp_path: Path) -> None:
    """No worker starts on such a store."""
    (tmp_path / "blocks" / "x").mkdir(parents=True)
    assert doctor.store_format(tmp_path).status is Status.FAIL
    assert doctor.store_format(tmp_path / "none").status is Status.OK


def test_a_database_that_is_missing_is_a_fault_also_without_caches(tmp_path: Path) -> None:
    with closing(AgentCacheStore(tmp_path)) as store:
        store.parts.database.commit(lambda connection: None)
    for path in tmp_path.glob(f"{NAME}*"):
        path.unlink()
    assert doctor.store_format(tmp_path).status is Status.FAIL
    with pytest.raises(StoreUnusable):
        AgentCacheStore(tmp_path)


def test_a_log_without_its_database_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}-wal").touch()
    assert doctor.store_format(tmp_path).status is Status.FAIL
    with pytest.raises(StoreUnusable):
        AgentCacheStore(tmp_path)


def test_a_replacement_of_the_database_that_a_crash_interrupted_is_no_fault(tmp_path: Path) -> None:
    with closing(AgentCacheStore(tmp_path)) as store:
        store.parts.database.commit(lambda connection: None)
    (tmp_path / NAME).rename(tmp_path / f"{NAME}.new-2026-11-22T154926.024539Z")
    assert doctor.store_format(tmp_path).status is Status.OK
    AgentCacheStore(tmp_path).close()
    assert doctor.store_format(tmp_path).line == f"format {FORMAT}"


def test_a_store_that_the_worker_would_refuse_is_found(tmp_path: Path) -> None:
    with closing(AgentCacheStore(tmp_path)):
        pass
    (tmp_path / NAME).write_bytes(bytes(8192))
    found = doctor.store_format(tmp_path)
    assert found.status == Status.FAIL
    assert "stoker-worker memory restore" in found.line


def test_a_disk_that_is_nearly_full_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, status in ((2**20, Status.FAIL), (2**30, Status.WARN), (2**40, Status.OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert doctor.store_disk(tmp_path).status == status


def test_a_shared_store_that_works_one_that_is_away_and_one_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "there").mkdir()
    there, away, none = (
        doctor.shared_store(url) for url in (f"file://{tmp_path}/there", f"file://{tmp_path}/away", "ftp://somewhere")
    )
    assert [there.status, away.status, none.status] == [Status.OK, Status.FAIL, Status.FAIL]
    assert "does not overwrite" in there.line
    assert "is the share mounted?" in away.line
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]


def test_without_the_extra_the_advice_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.shared_store("file:///mnt/shared").advice == "pip install 'stoker[shared]'"


class Provider(ModelProviderPort):
    """The scripted engine, with a model of another mode, or one that is refused."""

    def __init__(self, batching: Batching | None) -> None:
        self._batching = batching

    def load(self) -> tuple[GenerationEnginePort, LoadedModel]:
        if self._batching is None:
            raise ModelNotLoadable("no such model")
        engine, loaded = ScriptedProvider(max_batch=16, steps_per_s=1e6).load()
        return engine, replace(loaded, mode=replace(loaded.mode, batching=self._batching))

    def leave_thread(self) -> None: ...


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("batching", "status"), [(Batching.ROWS, Status.OK), (Batching.ONE_AT_A_TIME, Status.WARN), (None, Status.FAIL)]
)
def test_a_model_that_is_refused_or_served_slowly_is_found(batching: Batching | None, status: Status) -> None:
    found = made(doctor.model_checks("owner/model", Provider(batching)))
    assert found["model"].status == status
    assert ("model memory" in found) == (batching is not None)


@pytest.mark.mlx
def test_weights_larger_than_the_memory_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    monkeypatch.setattr(doctor, "memory_for_models", lambda: 1000)
    refusing: Any = None
    found = made(doctor.model_checks(str(tmp_path), refusing))
    assert list(found) == ["model"]
    assert "choose a smaller" in found["model"].advice


@pytest.mark.mlx
def test_a_tiny_model_is_loaded_and_proved(tmp_path: Path) -> None:
    from stoker_worker.engine.provider import MlxProvider
    from stoker_worker.models.gguf import import_gguf

    weights, _ = random_weights(tied=True)
    write_gguf(tmp_path / "tiny.gguf", metadata(), weights)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    settings = read_settings({"store": tmp_path / "store", "model": str(tmp_path / "tiny"), "max_batch": 8})
    found = made(doctor.model_checks(str(tmp_path / "tiny"), MlxProvider(settings)))
    assert [finding.status for finding in found.values()] == [Status.OK, Status.OK]
    assert "sequences of 1024 tokens" in found["model memory"].line
