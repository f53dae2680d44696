"""A bucket, or a folder that several machines mount: objects by name. Any thread.

The only user of obstore. Owns the time limits and the outage: a thread of its own makes each call, so its caller waits
no longer than the limit, even on a share that hangs. Owns the first contact, too, which checks that this is the right
shared store, and that it can be trusted.
"""

import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from stoker_shared.durable_file import sync
from stoker_shared.errors import StoreUnusable
from stoker_shared.text import MASK
from stoker_worker.events import Outage
from stoker_worker.memory.database import Database, SharedNote, read_note, write_note
from stoker_worker.memory.transcripts import has_agents

T = TypeVar("T")

_log = logging.getLogger(__name__)

MARKER: Final = "stoker.json"
"""The object that marks a folder or bucket as a shared store."""
FORMAT: Final = "stoker-shared 1"

COMMIT_LIMIT_S: Final = 3.0
"""The usual limit. A finished turn waits so long for its version to be written, in an outage only the first turn.
Writing gets more time for each byte, see `_SLOWEST_BPS`."""
_SLOWEST_BPS: Final = 500_000
"""Bytes a second; a slower network counts as away."""
_REMOVAL_S: Final = 0.5
"""For each removed object, because it is a request of its own."""
READ_LIMIT_S: Final = 10.0
"""For a version, or a cache file, which may have tens of megabytes: a job waits for it."""
CACHE_LIMIT_S: Final = 60.0
"""For what nobody waits for."""
_MOST_HANGING: Final = 32
_MOST_DURABLE: Final = 2**16


class BucketAway(OSError):
    """It does not answer, or refuses. `Bucket.outage` has been told."""


@dataclass(frozen=True)
class Stored:
    """An object. `changed_at`: Unix time."""

    name: str
    n_bytes: int
    changed_at: float


class Bucket:
    """Names are relative to the URL, with slashes.

    Attributes:
        url: ``s3://bucket/prefix`` or ``file:///folder``.
        outage: told of each call that fails, and of each that succeeds.
        lags: whether a list may lack an existing object for some seconds.
        landmark: name of an object that always exists once this is set: it is missing where a share is not mounted.
    """

    def __init__(self, url: str) -> None:
        """No I/O. Raises `StoreUnusable`: the URL is none of these, or obstore is missing."""
        self.url = url
        self.outage = Outage("the shared store")
        self.landmark: str | None = None
        self._hanging = 0
        self._durable: set[Path] = set()  # folders whose names are durable
        self._lock = threading.Lock()
        check_url(url)
        self.lags = url.startswith("file:")
        self._folder = Path(unquote(urlsplit(url).path)) if self.lags else None
        try:
            import obstore
            from obstore import exceptions
        except ModuleNotFoundError as error:
            raise StoreUnusable("a shared store needs obstore: pip install 'stoker[shared]'") from error
        self._api: Any = obstore
        self._errors: Any = exceptions

    @cached_property
    def _store(self) -> Any:
        """A folder is opened on first use: it may be mounted later. Raises `OSError`."""
        self._check_mounted()
        return _opened(self.url, self._folder)

    def create(self, name: str, content: bytes) -> bool:
        """Make an object, durably; ``False``: there is one of this name. Of several calls exactly one makes it. Raises
        `BucketAway`: it may be there or not."""

        def put() -> bool:
            self._check_mounted()
            is_new = True
            try:
                self._api.put(self._store, name, content, mode="create", use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                is_new = False
            if self._folder is not None:  # also if an earlier try made it, and ended before it was durable
                self._make_durable(self._folder, name)
            return is_new

        return self._timed(put, self._limit_for(content))

    def put(self, name: str, content: bytes) -> None:
        """Raises `BucketAway`."""

        def put() -> None:
            self._check_mounted()
            self._api.put(self._store, name, content, use_multipart=False)

        self._timed(put, self._limit_for(content))

    def get(self, name: str, limit_s: float | None = None, *, first: int | None = None) -> bytes | None:
        """All of its bytes, or the `first` ones; ``None``: there is no such object. If it is refused and others are
        not, as in an archive, it counts as damaged and has no bytes. `limit_s`: by default `COMMIT_LIMIT_S`. Raises
        `BucketAway`."""

        def read() -> bytes | None:
            try:
                found = self._api.get(self._store, name)
                return bytes(found.bytes() if first is None else next(iter(found.stream(first)), b"")[:first])
            except FileNotFoundError:
                self._check_mounted()
                return None
            except self._errors.PermissionDeniedError as refusal:
                if self.landmark in (None, name):
                    raise
                self._api.get(self._store, self.landmark)
                _log.warning("the shared store %s: %s is refused: %s", self.url, name, _first_line(refusal))
                return b""

        return self._timed(read, limit_s or COMMIT_LIMIT_S)

    def has(self, name: str) -> bool:
        """Raises `BucketAway`."""
        return self.find(name) is not None

    def find(self, name: str) -> Stored | None:
        """``None``: there is no such object. Raises `BucketAway`."""

        def look() -> Stored | None:
            try:
                return _stored(self._api.head(self._store, name))
            except FileNotFoundError:
                return None

        return self._timed(look, COMMIT_LIMIT_S)

    def listed(self, folder: str, limit_s: float | None = None, *, after: str | None = None) -> list[Stored]:
        """The objects below a folder, by name. `after`: only those whose names follow this one. Raises `BucketAway`."""

        def look() -> list[Stored]:
            pages = self._api.list(self._store, prefix=folder, offset=after)
            stored = [_stored(x) for page in pages for x in page]
            if not stored:
                self._check_mounted()
            return sorted(stored, key=lambda x: x.name)

        return self._timed(look, limit_s or COMMIT_LIMIT_S)

    def remove(self, names: Iterable[str]) -> None:
        """Remove those that exist. Raises `BucketAway`."""
        names = list(names)

        def remove() -> None:
            for name in names:
                with suppress(FileNotFoundError):
                    self._api.delete(self._store, name)

        if names:
            self._timed(remove, COMMIT_LIMIT_S + _REMOVAL_S * len(names))

    def time(self) -> float:
        """Unix time by the clock that dates the objects. Raises `BucketAway`."""
        name = f"probe/{uuid.uuid4().hex}"
        self.put(name, b"")
        found = self.find(name)
        self.remove([name])
        if found is None:
            raise self.away(f"{name} is there and is not")
        return found.changed_at

    def _make_durable(self, top: Path, name: str) -> None:
        """Sync the file, its name, and the names of the folders that were made for it. Raises `OSError`."""
        sync(top / name)
        made = []
        for folder in (top / name).parents:
            is_known = folder == top or folder in self._durable
            sync(folder, to_platter=is_known)
            if is_known:
                break
            made.append(folder)
        if len(self._durable) > _MOST_DURABLE:
            self._durable = set()
        self._durable.update(made)

    def _limit_for(self, content: bytes) -> float:
        return COMMIT_LIMIT_S + len(content) / _SLOWEST_BPS

    def _timed(self, call: Callable[[], T], limit_s: float) -> T:
        done: Future[T] = Future()

        def run() -> None:
            with self._lock:
                self._hanging += 1
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
            with self._lock:
                self._hanging -= 1

        try:
            if self._hanging >= _MOST_HANGING:
                raise OSError("all calls hang")
            threading.Thread(target=run, name="shared-store-call", daemon=True).start()
            result = done.result(limit_s)
        except TookTooLong:
            raise self.away(f"no answer within {limit_s:.0f} s") from None
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise self.away(_first_line(error)) from None  # its own text may have a password
        self.outage.answered()
        return result

    def away(self, why: str) -> BucketAway:
        """The error for something wrong there; `outage` is told."""
        error = BucketAway(f"the shared store {self.url}: {why}")
        self.outage.met(error)
        return error

    def _check_mounted(self) -> None:
        """Raises `OSError`: the share is not mounted. Its folder is then empty, or one of the machine's own."""
        if self._folder is not None and not (self._folder / (self.landmark or "")).exists():
            raise OSError(f"{self._folder / (self.landmark or '')} is not there: is the share mounted?")


def _stored(meta: Any) -> Stored:
    return Stored(meta["path"], meta["size"], meta["last_modified"].timestamp())


def check_url(url: str) -> None:
    """Raises `StoreUnusable` unless it can be a shared store's URL."""
    parts = urlsplit(url)
    is_bucket = parts.scheme == "s3" and parts.netloc and "@" not in parts.netloc
    is_folder = parts.scheme == "file" and not parts.netloc and parts.path not in ("", "/")
    if not (is_bucket or is_folder) or parts.query or parts.fragment:
        raise StoreUnusable(
            "a shared store is s3://bucket/prefix or file:///folder; credentials and endpoint of a bucket come from "
            "the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION)"
        )


def _opened(url: str, folder: Path | None) -> Any:
    from obstore.store import LocalStore, S3Store

    if folder is not None:
        return LocalStore(folder)
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    return S3Store.from_url(
        url,
        # One request for each object: not every server knows bulk deletion.
        config={"disable_bulk_delete": True, "conditional_put": "etag"},
        client_options={
            "connect_timeout": "2s",
            "timeout": f"{CACHE_LIMIT_S:.0f}s",
            "allow_http": endpoint.startswith("http://"),
        },
        retry_config={"max_retries": 2},
    )


def _first_line(error: BaseException) -> str:
    """Without the user and password that the URL of an endpoint may have."""
    return re.sub(r"://[^/\s]*@", f"://{MASK}@", str(error).partition("\n")[0])[:300]


def meet(bucket: Bucket, database: Database) -> SharedNote:
    """Note that this shared store has all agents of the store, if that is true. Raises `BucketAway`: it does not
    answer, or another one is in its place; `StoreUnusable`: it cannot be one, is of another format, or the store has
    agents that it lacks; `OSError`, `Damaged`: the database cannot be read or written."""
    with database.snapshot() as connection:
        note, is_empty = read_note(connection), not has_agents(connection)
    how = f"share them first: stoker-worker memory share {bucket.url} --store {database.path.parent}"
    if note is None and not is_empty:
        raise StoreUnusable(f"not all agents of this store are in the shared store {bucket.url}; {how}")
    found = identify(bucket, is_new=note is None or note.url != bucket.url)
    if note is not None and note.id != found.id:
        if note.url == bucket.url:
            raise bucket.away("another shared store is in the place of the one that was there before")
        if not is_empty:
            raise StoreUnusable(f"the agents of this store are in the shared store {note.url}; {how}")
    if note != found:
        database.commit(partial(write_note, note=found))
    bucket.landmark = MARKER
    return found


def identify(bucket: Bucket, *, is_new: bool) -> SharedNote:
    """Which shared store it is. `is_new`: it may be made, if there is none. Raises `BucketAway`: it does not answer, or
    is not there; `StoreUnusable`: it cannot be one, or is of another format."""
    content = bucket.get(MARKER)
    if content is None and not is_new:
        raise bucket.away(f"{MARKER} is missing; it was there before")
    check_creates_once(bucket)
    if content is None:
        bucket.create(MARKER, json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode())
        content = bucket.get(MARKER) or b""
    return SharedNote(bucket.url, identity_of(bucket, content))


def identity_of(bucket: Bucket, marker: bytes) -> str:
    """The shared store's id, from its marker. Raises `StoreUnusable`."""
    try:
        fields = json.loads(marker)
        format_, identity = str(fields["format"]), str(fields["id"])
    except (ValueError, TypeError, KeyError):
        raise StoreUnusable(f"the shared store {bucket.url}: {MARKER} is damaged") from None
    if format_ != FORMAT:
        raise StoreUnusable(f"the shared store {bucket.url} is of format {format_!r}; this version reads {FORMAT!r}")
    return identity


def check_creates_once(bucket: Bucket) -> None:
    """Raises `StoreUnusable`: an object is overwritten, as by servers that do not know ``If-None-Match`` (two workers
    could write one version twice), or a second client does not find what the first has made. Raises `BucketAway`."""
    name, second = f"probe/{uuid.uuid4().hex}", Bucket(bucket.url)
    bucket.create(name, b"1")
    creates_twice = second.create(name, b"2")
    is_listed = name in [stored.name for stored in second.listed("probe")]
    bucket.remove([name])
    if creates_twice:
        raise StoreUnusable(f"the shared store {bucket.url} overwrites an object that was to be new: it is of no use")
    if not is_listed:
        raise StoreUnusable(f"the shared store {bucket.url} does not list an object that was made: it is of no use")
