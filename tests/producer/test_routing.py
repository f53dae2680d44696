"""From the models that a job names to its route, by the records of live workers."""

import pytest
from tests.producer.played_worker import publish

from stoker.cascade.routing import NobodyServes
from stoker_shared.errors import InvalidRequest

pytestmark = pytest.mark.server

CHECK = {"contains": "yes"}


@pytest.mark.parametrize("models", [["small", "large"], ["small"], "auto"])
def test_several_models_are_refused_for_a_job_that_writes_an_agents_memory(producer, connection, models):
    publish(connection, "stoker-a", "q-small", model="small")
    publish(connection, "stoker-b", "q-large", model="large")
    with pytest.raises(InvalidRequest, match=r"^models: only .* no agent's memory, .*: give cache 'read' or 'off', or"):
        producer.submit(prompt="x", agent_id="a", models=models, check=CHECK)
    assert [queue.waiting for queue in producer.queues()] == [0, 0]
    for fields in ({"agent_id": "a", "cache": "read"}, {"agent_id": "a", "cache": "off"}, {}):
        producer.submit(prompt="x", models=models, check=CHECK, **fields)


def test_of_many_jobs_with_models_none_is_enqueued_if_one_cannot_have_a_route(producer, connection):
    publish(connection, "stoker-a", "q-small", model="small")
    publish(connection, "stoker-b", "q-large", model="large")
    requests = [{"prompt": "x", "check": CHECK}] * 120
    writes = {"prompt": "x", "check": CHECK, "agent_id": "a"}
    with pytest.raises(InvalidRequest, match=r"^request 120: models: "):
        producer.submit_many([*requests, writes], models=["small", "large"])
    assert [queue.waiting for queue in producer.queues()] == [0, 0]
    assert len(producer.submit_many(requests, models=["small", "large"], min_trust=0)) == 120
    assert [queue.waiting for queue in producer.queues()] == [0, 120]


def test_a_queue_serves_the_model_of_the_worker_that_was_started_last(producer, connection):
    publish(connection, "stoker-killed", "generate", model="small")
    publish(connection, "stoker-after", "generate", model="large", started_at=2.0)
    producer.submit(prompt="x", models="auto", check=CHECK)
    with pytest.raises(NobodyServes, match=r"no live worker serves model 'small'; 'large' in queue 'generate': [^;]*$"):
        producer.submit(prompt="x", models=["small", "large"], check=CHECK)
