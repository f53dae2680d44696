"""A submitted job's keys in Redis, and requests that are refused before they get there."""

import dataclasses
import threading
import zlib
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.producer.played_worker import end

import stoker.connection
import stoker.submitting
from stoker import (
    AsyncProducer,
    GenerationRequest,
    InvalidRequest,
    Message,
    Producer,
    RedisUnavailable,
    RequestTooLarge,
)
from stoker.cascade.routing import Routing
from stoker.new_job import JobOptions
from stoker.operations import Watched
from stoker.submitting import ManyFields, SubmitFields, submit_many
from stoker_shared.wire import MAX_REQUEST_BYTES

SECRET = "the launch code is 0000"


def fetch(connection: Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)


def request_of(connection: Redis, job_id: str) -> dict[str, object]:
    return fetch(connection, job_id).kwargs["request"]


def test_the_prompt_is_only_in_the_jobs_data(producer, connection):
    ticket = producer.submit(agent_id="a" * 200, prompt=SECRET)
    fields = connection.hgetall(f"rq:job:{ticket.job_id}")
    assert SECRET in zlib.decompress(fields.pop(b"data")).decode()
    assert not any(SECRET.encode() in value for value in fields.values())
    assert b"meta" not in fields
    in_utf8 = producer.submit(prompt="日" * 1000)  # so that a request within the limit stays within it
    assert len(zlib.decompress(connection.hget(f"rq:job:{in_utf8.job_id}", "data"))) < 3200
    assert fields[b"stoker_agent"] == fields[b"created_at"] + b" write " + b"a" * 200
    assert fields[b"description"] == b"generate for agent '" + b"a" * 60 + b"'"


@pytest.mark.parametrize("name", ["job_timeout_s", "result_ttl_s", "failure_ttl_s", "ttl_s"])
def test_a_time_that_is_no_number_of_whole_seconds_is_refused_by_name(producer, connection, name):
    for value in (0, -2, 1.5, "1h", True, 10**16):
        with pytest.raises(InvalidRequest, match=name):
            producer.submit(agent_id="a", prompt="x", **{name: value})
    assert connection.keys() == []


def test_every_field_of_the_request_and_every_option_is_a_keyword_argument():
    options = {field.name for field in dataclasses.fields(JobOptions) if field.init}
    choice = {"models", "min_trust"}
    assert set(SubmitFields.__annotations__) == (set(GenerationRequest.model_fields) - {"v"}) | options | choice
    assert set(ManyFields.__annotations__) == (options - {"at_front"}) | choice


def test_python_values_arrive_as_json(producer, connection):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    given: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"messages": [Message(role="system", content="s"), messages[1]], "n": 2}, {"messages": messages, "n": 2}),
        ({"prompt": "p", "guide": {"choice": ("yes", "no")}}, {"prompt": "p", "guide": {"choice": ["yes", "no"]}}),
        ({"prompt": "p", "logit_bias": {5: -2.0}}, {"prompt": "p", "logit_bias": {"5": -2.0}}),
        ({"prompt_token_ids": [1, 2], "metadata": None}, {"prompt_token_ids": [1, 2]}),
    ]
    for fields, sent in given:
        assert request_of(connection, producer.submit(**fields).job_id) == {"v": 5, **sent}


def test_a_bad_request_is_refused_before_anything_is_sent(producer, connection):
    given = {"agent_id": "a", "prompt": SECRET}
    both = {"messages": [{"role": "user", "content": "x"}]}
    for fields in ({"max_tokens": "5"}, {"prompt": ""}, both, {"temperature": float("nan")}):
        with pytest.raises(InvalidRequest) as caught:
            producer.submit(**{**given, **fields})
        assert SECRET not in str(caught.value)
    with pytest.raises(RequestTooLarge, match=str(MAX_REQUEST_BYTES)):
        producer.submit(agent_id="a", prompt="x" * MAX_REQUEST_BYTES)
    assert connection.keys() == []


def test_many_jobs_are_enqueued_in_order(producer, connection, monkeypatch):
    monkeypatch.setattr(stoker.submitting, "CHUNK_JOBS", 4)
    requests: list[Any] = [{"agent_id": "a", "prompt": f"p{i}"} for i in range(9)]
    requests.append(GenerationRequest(agent_id="a", prompt="p9"))
    tickets = producer.submit_many(iter(requests), queue="bulk", result_ttl_s=5)
    assert [request_of(connection, t.job_id)["prompt"] for t in tickets] == [f"p{i}" for i in range(10)]
    assert connection.lrange("rq:queue:bulk", 0, -1) == [t.job_id.encode() for t in tickets]
    assert fetch(connection, tickets[0].job_id).result_ttl == 5


def test_many_jobs_are_not_put_at_the_back_if_they_were_meant_for_the_front(producer, connection):
    options: dict[str, Any] = {"at_front": True}
    with pytest.raises(InvalidRequest, match="at_front"):
        producer.submit_many([{"prompt": "x"}], **options)
    assert connection.keys() == []


def test_a_generators_requests_are_enqueued_as_they_come_and_never_held_all_at_once(producer, connection):
    there = []

    def requests():
        for n in range(350):
            there.append(connection.llen("rq:queue:generate"))
            yield {"agent_id": "a", "prompt": f"p{n}"}

    assert len(producer.submit_many(requests())) == 350
    assert there[0] == 0
    assert there[-1] == 300
    with pytest.raises(InvalidRequest, match=r"request 120: max_tokens"):
        producer.submit_many({"agent_id": "a", "prompt": "x", "max_tokens": 1 - 2 * (n // 120)} for n in range(500))
    assert connection.llen("rq:queue:generate") == 450


def test_one_bad_request_among_many_enqueues_none_and_is_named_by_its_place(producer, connection):
    assert producer.submit_many([]) == []
    requests: list[Any] = [{"agent_id": "a", "prompt": "x"}, {"agent_id": "a", "prompt": SECRET, "max_tokens": -1}]
    with pytest.raises(InvalidRequest, match=r"request 1: max_tokens") as caught:
        producer.submit_many(requests)
    assert SECRET not in str(caught.value)
    assert connection.keys() == []


@pytest.mark.parametrize(
    ("n_jobs", "prompt", "chunks"),
    [(200, "x", [100, 100]), (201, "x", [100, 100, 1]), (3, "x" * 5_000_000, [1, 1, 1])],
)
def test_a_chunk_is_bounded_in_jobs_and_in_bytes(n_jobs, prompt, chunks):
    request = GenerationRequest(agent_id="a", prompt=prompt)
    operation = submit_many("generate", iter([request] * n_jobs), Routing("generate"), {}, None)
    assert [len(step.keys) for step in played(operation) if isinstance(step, Watched)] == chunks


def test_a_list_that_its_owner_empties_meanwhile_is_enqueued_whole():
    requests = [GenerationRequest(agent_id="a", prompt="x")] * 201
    n_jobs = 0
    for step in played(submit_many("generate", requests, Routing("generate"), {}, None)):
        requests.clear()
        n_jobs += len(step.keys) if isinstance(step, Watched) else 0
    assert n_jobs == 201


def played(operation):
    """The operation's steps; each is answered as if it had been carried out."""
    step = next(operation)
    while True:
        yield step
        try:
            step = operation.send([])
        except StopIteration:
            return


# --- connection ---


@pytest.mark.server
@pytest.mark.parametrize("protocol", [2, 3])
def test_a_result_is_waited_for_with_either_protocol(redis_url, connection, protocol):
    with Producer(f"{redis_url}?protocol={protocol}") as producer:
        ticket = producer.submit(agent_id="a", prompt="x")
        late = threading.Timer(0.1, end, [connection, ticket.job_id])
        late.start()
        assert ticket.result(10).job_id == ticket.job_id
        assert [result.job_id for result in producer.results([ticket], 10)] == [ticket.job_id]
        late.join()


def test_no_server_is_one_clear_error_without_the_password(monkeypatch):
    monkeypatch.setattr(stoker.connection, "_RETRIES", 1)  # each retry takes a while
    producer = Producer("redis://user:hunter2@127.0.0.1:1/3")
    calls: list[Any] = [producer.ping, lambda: producer.submit(agent_id="a", prompt="x")]
    calls += [lambda: producer.ticket("j").result(1), lambda: producer.results([producer.ticket("j")], 30)]
    for call in calls:
        with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1/3") as caught:
            call()
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    assert "hunter2" not in repr(producer)


def test_an_error_in_which_the_server_quotes_the_password_does_not_show_it(monkeypatch):
    producer = Producer("redis://:hunter2@127.0.0.1:1")

    def quoting(*args):
        from redis.exceptions import ResponseError

        raise ResponseError("unknown command `AUTH`, with args beginning with: `hunter2`")

    monkeypatch.setattr(producer._connection, "execute_command", quoting)
    with pytest.raises(RedisUnavailable, match=r"\*\*\*") as caught:
        producer.ping()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("made", [Producer, AsyncProducer])
@pytest.mark.parametrize("url", ["http://:hunter2@h", "redis://:hun@ter2@h:1x", "hunter2", "redis://:hunter2@h:1?db=x"])
def test_an_invalid_redis_url_is_refused_without_quoting_it(url, made):
    with pytest.raises(ValueError, match="not a Redis URL") as caught:
        made(url)
    assert "ter2" not in str(caught.value)


def test_a_connection_of_the_other_kind_or_that_decodes_responses_is_refused_at_once():
    kinds: list[Any] = [(Producer, Redis, AsyncRedis), (AsyncProducer, AsyncRedis, Redis)]
    for made, own, other in kinds:
        with pytest.raises(TypeError, match="expected a Redis URL or a redis"):
            made(other())
        with pytest.raises(ValueError, match="decode_responses"):
            made(own(decode_responses=True))


def test_a_queue_no_worker_could_name_is_refused(connection, producer):
    for name in ("", "a,b", " a", "a\n"):
        with pytest.raises(ValueError, match="queue name"):
            Producer(connection, queue=name)
        with pytest.raises(ValueError, match="queue name"):
            producer.submit(agent_id="a", prompt="x", queue=name)
