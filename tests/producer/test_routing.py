"""From the models that a job names to its route, by the records of live workers."""

import json

import pytest

from stoker.cascade.routing import NobodyServes
from stoker_shared.errors import InvalidRequest

pytestmark = pytest.mark.server

CHECK = {"contains": "yes"}


@pytest.fixture
def serve(connection):
    def serve(name, queue, model, started_at=1.0):
        record = {"queues": [queue], "model": model, "context_tokens": 9, "mode": "m", "host": "h", "pid": 1}
        connection.sadd("rq:workers", f"rq:worker:stoker-{name}")
        connection.set(f"stoker:worker:stoker-{name}", json.dumps({**record, "started_at": started_at}))

    return serve


@pytest.mark.parametrize("models", [["small", "large"], ["small"], "auto"])
def test_several_models_are_refused_for_a_job_that_writes_an_agents_memory(producer, connection, serve, models):
    serve("a", "q-small", "small")
    serve("b", "q-large", "large")
    with pytest.raises(InvalidRequest, match=r"^models: only .* no agent's memory, .*: give cache 'read' or 'off', or"):
        producer.submit(prompt="x", agent_id="a", models=models, check=CHECK)
    assert [queue.waiting for queue in producer.queues()] == [0, 0]
    for fields in ({"agent_id": "a", "cache": "read"}, {"agent_id": "a", "cache": "off"}, {}):
        producer.submit(prompt="x", models=models, check=CHECK, **fields)


def test_a_queue_serves_the_model_of_the_worker_that_was_started_last(producer, serve):
    serve("killed", "generate", "small", started_at=1.0)
    serve("after it", "generate", "large", started_at=2.0)
    producer.submit(prompt="x", models="auto", check=CHECK)
    with pytest.raises(NobodyServes, match=r"no live worker serves model 'small'; 'large' in queue 'generate': [^;]*$"):
        producer.submit(prompt="x", models=["small", "large"], check=CHECK)
