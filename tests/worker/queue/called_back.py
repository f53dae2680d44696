"""Callbacks that the tests' jobs name."""

import json
import threading
import time
from os import removedirs  # noqa: F401  what a module imports is not allowed with it

hang = threading.Event()


def note(connection, *words):
    connection.rpush("called", json.dumps(words))


def succeeded(job, connection, result):
    note(connection, "succeeded", job.id, result["text"], job.get_status(refresh=False))


def failed(job, connection, kind, error, traceback):
    note(connection, "failed", job.id, kind.__name__, str(error), job.get_status(refresh=False))


def stopped(job, connection):
    note(connection, "stopped", job.id)


def marks(job, connection, *outcome):
    connection.hset(job.key, "called_back", job.get_status(refresh=False))


def slow(job, connection, result):
    time.sleep(0.1)
    note(connection, "slow", job.id)


def raises(job, connection, *outcome):
    raise SystemExit("as a callback may")


def hangs(job, connection, *outcome):
    hang.wait(60)


def _private(job, connection, *outcome):
    note(connection, "private")


async def asynchronous(job, connection, *outcome):
    note(connection, "asynchronous")
