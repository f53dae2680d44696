"""The check of the shared store: does it answer, how fast, and does it refuse to overwrite. Leaves nothing there."""

import time
from collections.abc import Iterator
from importlib.util import find_spec

from stoker_shared.errors import StoreUnusable
from stoker_worker.doctor.check import Check, Finding, fail, ok
from stoker_worker.memory.replica.bucket import Bucket, BucketAway
from stoker_worker.memory.replica.identity import check_creates_once


def checks(url: str | None) -> Iterator[Check]:
    if url is not None:
        yield Check("shared store", lambda: answers(url))


def answers(url: str) -> Finding:
    if find_spec("obstore") is None:
        return fail("obstore is not installed, which a shared store needs", "pip install 'stoker[shared]'")
    began = time.perf_counter()
    try:
        check_creates_once(Bucket(url))
    except BucketAway as error:
        return fail(str(error), "see that it can be reached, is mounted, and may be written with this key")
    except StoreUnusable as error:
        return fail(str(error), "give another one with --shared-store")
    milliseconds = (time.perf_counter() - began) * 1000 / 4
    return ok(f"{url} answers in {milliseconds:.1f} ms, and does not overwrite", request_ms=milliseconds)
