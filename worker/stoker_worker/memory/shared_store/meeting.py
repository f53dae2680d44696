"""The first contact of a store with its shared store: is it the right one, and can it be trusted? Any thread."""

import json
import uuid
from functools import partial

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory import unshared
from stoker_worker.memory.database import Database
from stoker_worker.memory.shared_store.bucket import Bucket
from stoker_worker.memory.shared_store.objects import FORMAT, MARKER


def meet(bucket: Bucket, database: Database) -> None:
    """From now on the store's agents are written through to this shared store.

    Raises:
        BucketAway: it does not answer, or another one is in its place.
        StoreUnusable: it cannot be one, or is of another format.
        OSError, Damaged: the database cannot be read or written.
    """
    with database.snapshot() as connection:
        noted = unshared.shared_with(connection)
    content = bucket.get(MARKER)
    if content is None:
        if noted is not None and noted.startswith(f"{bucket.url} "):
            raise bucket.away(f"{MARKER} is missing; it was there before")
        check_creates_once(bucket)
        bucket.create(MARKER, json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode())
        content = bucket.get(MARKER) or b""
    identity = identity_of(bucket, content)
    if noted != identity:
        if noted is not None and noted.startswith(f"{bucket.url} "):
            raise bucket.away("another shared store is in the place of the one that was there before")
        database.commit(partial(unshared.share_with, identity=identity))
    bucket.landmark = MARKER


def identity_of(bucket: Bucket, marker: bytes) -> str:
    """Which shared store it is, by the content of its marker. Raises `StoreUnusable`."""
    try:
        fields = json.loads(marker)
        format_, identity = str(fields["format"]), f"{bucket.url} {fields['id']}"
    except (ValueError, TypeError, KeyError):
        raise StoreUnusable(f"the shared store {bucket.url}: {MARKER} is damaged") from None
    if format_ != FORMAT:
        raise StoreUnusable(f"the shared store {bucket.url} is of format {format_!r}; this version reads {FORMAT!r}")
    return identity


def check_creates_once(bucket: Bucket) -> None:
    """Servers that do not know ``If-None-Match`` overwrite: two workers could then write one version twice. Raises
    `StoreUnusable`, `BucketAway`."""
    name = f"probe/{uuid.uuid4().hex}"
    bucket.create(name, b"1")
    creates_twice = bucket.create(name, b"2")
    bucket.remove([name])
    if creates_twice:
        raise StoreUnusable(f"the shared store {bucket.url} overwrites an object that was to be new: it is of no use")
