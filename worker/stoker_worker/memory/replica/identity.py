"""Which shared store a bucket is, and whether it can be trusted. The first contact of a store with it. Any thread."""

import json
import uuid
from functools import partial

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.database import Database
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.replica.objects import FORMAT, MARKER
from stoker_worker.memory.shared_note import SharedNote, has_agents, read_note, write_note


def meet(bucket: Bucket, database: Database) -> SharedNote:
    """From now on this shared store has all agents of the store.

    Raises:
        BucketAway: it does not answer, or another one is in its place.
        StoreUnusable: it cannot be one, is of another format, or the store has agents that it lacks.
        OSError, Damaged: the database cannot be read or written.
    """
    with database.snapshot() as connection:
        note, is_empty = read_note(connection), not has_agents(connection)
    how = f"share them first: stoker-worker memory share {bucket.url} --store {database.path.parent}"
    if note is None and not is_empty:
        raise StoreUnusable(f"not all agents of this store are in the shared store {bucket.url}; {how}")
    found = identify(bucket, is_new=note is None or note.url != bucket.url)
    if note == found:
        return found
    if note is not None and note.id != found.id:
        if note.url == bucket.url:
            raise bucket.away("another shared store is in the place of the one that was there before")
        if not is_empty:
            raise StoreUnusable(f"the agents of this store are in the shared store {note.url}; {how}")
    database.commit(partial(write_note, note=found))
    return found


def identify(bucket: Bucket, *, is_new: bool) -> SharedNote:
    """Which one it is.

    Args:
        is_new: it may be made, if there is none.

    Raises:
        BucketAway: it does not answer, or is not there.
        StoreUnusable: it cannot be one, or is of another format.
    """
    content = bucket.get(MARKER)
    if content is None and not is_new:
        raise bucket.away(f"{MARKER} is missing; it was there before")
    check_creates_once(bucket)
    if content is None:
        bucket.create(MARKER, json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}).encode())
        content = bucket.get(MARKER) or b""
    found = SharedNote(bucket.url, identity_of(bucket, content))
    bucket.landmark = MARKER
    return found


def identity_of(bucket: Bucket, marker: bytes) -> str:
    """Which shared store it is, wherever it is mounted, by the content of its marker. Raises `StoreUnusable`."""
    try:
        fields = json.loads(marker)
        format_, identity = str(fields["format"]), str(fields["id"])
    except (ValueError, TypeError, KeyError):
        raise StoreUnusable(f"the shared store {bucket.url}: {MARKER} is damaged") from None
    if format_ != FORMAT:
        raise StoreUnusable(f"the shared store {bucket.url} is of format {format_!r}; this version reads {FORMAT!r}")
    return identity


def check_creates_once(bucket: Bucket) -> None:
    """Servers that do not know ``If-None-Match`` overwrite: two workers could then write one version twice. Also that a
    second client finds what the first has made. Raises `StoreUnusable`, `BucketAway`."""
    name, second = f"probe/{uuid.uuid4().hex}", Bucket(bucket.url)
    bucket.create(name, b"1")
    creates_twice = second.create(name, b"2")
    is_listed = name in [stored.name for stored in second.listed("probe")]
    bucket.remove([name])
    if creates_twice:
        raise StoreUnusable(f"the shared store {bucket.url} overwrites an object that was to be new: it is of no use")
    if not is_listed:
        raise StoreUnusable(f"the shared store {bucket.url} does not list an object that was made: it is of no use")
