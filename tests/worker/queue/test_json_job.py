"""The worker reads only JSON from a job's hash, whatever another client wrote there."""

import json
import pickle
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis import Redis

from stoker_shared.errors import (
    InvalidRequest,
    PayloadRefused,
    RequestError,
    RequestTooLarge,
    RequestVersionTooNew,
)
from stoker_shared.wire import AGENT_TASK_PATH, MAX_REQUEST_BYTES, TASK_PATH
from stoker_worker.ports import UNUSED, MemoryUse
from stoker_worker.queue.json_job import JsonJob
from stoker_worker.queue.waiting import use_in

REQUEST = {"agent_id": "a", "prompt": "x"}


def restored(data: bytes, **fields: bytes) -> JsonJob:
    job = JsonJob("id", connection=Redis())
    job.restore({b"data": data, **{name.encode(): value for name, value in fields.items()}})
    return job


def payload(func=TASK_PATH, args=(), kwargs=None) -> bytes:
    return json.dumps([func, None, list(args), {"request": REQUEST} if kwargs is None else kwargs]).encode()


@pytest.mark.parametrize("data", [payload(), zlib.compress(payload())], ids=["plain", "compressed"])
def test_compressed_and_plain_payloads_carry_the_same_request(data):
    assert restored(data).read_request().agent_id == "a"
    assert use_in(data) == MemoryUse("write", "a")


@pytest.mark.parametrize(("action", "access"), [("info", "read"), ("forget", "write"), ("rollback", "write")])
def test_a_job_about_an_agent_is_read_as_such_and_uses_its_agents_memory(action, access):
    data = payload(AGENT_TASK_PATH, kwargs={"request": {"agent_id": "a", "action": action}})
    request = restored(data).read_request()
    assert (request.action, request.access) == (action, access)
    assert use_in(data) == MemoryUse(access, "a")
    with pytest.raises(InvalidRequest):
        restored(payload(kwargs={"request": {"agent_id": "a", "action": action}})).read_request()


def test_a_job_about_an_agent_is_refused_with_its_fault():
    faults: tuple[tuple[dict[str, Any], type[RequestError], str], ...] = (
        ({"action": "fork"}, InvalidRequest, "'fork' needs a 'target'"),
        ({"action": "delete"}, InvalidRequest, "action"),
        ({"action": "info", "prompt": "x"}, InvalidRequest, "prompt"),
        ({"action": "info", "expect_version": 1}, InvalidRequest, "'info' changes nothing"),
        ({"action": "forget", "version": 1}, InvalidRequest, "no other action takes one"),
        ({"action": "info", "v": 2}, RequestVersionTooNew, "v 2"),
    )
    for fields, error, words in faults:
        with pytest.raises(error, match=words):
            restored(payload(AGENT_TASK_PATH, kwargs={"request": {"agent_id": "a", **fields}})).read_request()


@contextmanager
def takes_less_than(n_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < n_bytes
    finally:
        tracemalloc.stop()


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("compress", [bytes, zlib.compress])
def test_a_pickle_is_refused_without_being_loaded(compress):
    data = compress(pickle.dumps((TASK_PATH, None, (), {"request": Bomb()})))
    with pytest.raises(PayloadRefused, match="pickle"):
        restored(data).read_request()
    assert use_in(data) == UNUSED


@pytest.mark.parametrize("field", ["meta", "result"])
def test_pickles_in_a_jobs_other_fields_are_not_loaded_either(field):
    job = restored(payload(), **{field: pickle.dumps({"x": Bomb()})})
    assert job.read_request().agent_id == "a"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (payload(func="os.system"), "os.system"),
        (payload(args=["x"]), "exactly one argument"),
        (payload(kwargs={}), "exactly one argument"),
        (payload(kwargs={"request": REQUEST, "more": 1}), "exactly one argument"),
        (payload(kwargs={"request": "text"}), "exactly one argument"),
        (b"[1, 2]", "JSON form"),
        (b"{}", "JSON form"),
        (b"\xff\xfe", "JSON form"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_that_is_no_generation_job_is_refused_by_name(data, named):
    with pytest.raises(PayloadRefused, match=named):
        restored(data).read_request()


@pytest.mark.parametrize("name", ["success_callback_name", "failure_callback_name", "stopped_callback_name"])
def test_jobs_with_callbacks_are_refused(name):
    with pytest.raises(PayloadRefused, match=r"no callbacks, .*'os\.system'"):
        restored(payload(), **{name: b"os.system"}).read_request()


def test_a_payload_that_would_unpack_to_gigabytes_is_refused_unread():
    bomb = zlib.compress(b"[" + b" " * (MAX_REQUEST_BYTES + 10_000) + b"]")
    assert len(bomb) < 100_000
    with pytest.raises(RequestTooLarge):
        restored(bomb).read_request()


@pytest.mark.parametrize("pack", [bytes, zlib.compress])
@pytest.mark.parametrize(
    "messages",
    [b"[" + b"0," * 4_190_000 + b"0]", b"[" * 100_000, b"[" + b"{}," * 2_700_000 + b"0]"],
    ids=["zeros", "nested", "empty objects"],
)
def test_millions_of_values_are_refused_before_they_are_built(messages, pack):
    """Kilobytes when compressed, gigabytes as Python's objects."""
    data = pack(b'["%s",null,[],{"request":{"messages":%b}}]' % (TASK_PATH.encode(), messages))
    job = restored(data)
    with takes_less_than(120 * 2**20):
        with pytest.raises(RequestTooLarge, match="more than"):
            job.read_request()
        assert use_in(data) == UNUSED


@pytest.mark.parametrize("field", ["meta", "dependency_ids", "retry_intervals", "webhooks", "stoker_tried"])
def test_other_fields_with_millions_of_values_are_not_built_either(field):
    value = b"[" + b"[]," * 4_000_000 + b"0]"
    with takes_less_than(80 * 2**20):
        restored(payload(), created_at=b"now", **{field: b"now " * (field == "stoker_tried") + value})


@pytest.mark.parametrize("field", ["exc_info", "result"])
def test_what_an_earlier_run_left_is_not_unpacked(field):
    bomb = zlib.compress(bytes(2**26))
    with takes_less_than(2**24):
        assert restored(payload(), **{field: bomb}).read_request().agent_id == "a"


def test_stored_bytes_that_cannot_be_read_are_kept_unchanged():
    """RQ writes a job's data again when it finishes or retries the job."""
    data = pickle.dumps(("x",))
    job = restored(data)
    with pytest.raises(RequestError):
        job.read_request()
    assert job.data == data
