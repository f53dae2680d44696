"""Jobs about an agent: an earlier answer wins over everything else, and disk errors have names."""

import pytest
from tests.in_memory.queue import InMemoryQueue

from stoker_shared.agents import AgentInfo, build_agent_request
from stoker_shared.errors import AgentVersionConflict, AgentVersionNotSaved, WorkerLostTooOften
from stoker_worker.pipeline.agent_jobs import carry_out
from stoker_worker.ports import Busy

REQUEST = build_agent_request({"agent_id": "a", "action": "forget"})
DONE = AgentInfo(job_id="j", agent_id="a", exists=True)


class Store:
    def __init__(self, answered=None, error=None):
        self.answered, self.error, self.runs = answered, error, 0

    def answer(self, request, delivery):
        return self.answered

    def run(self, request, delivery):
        self.runs += 1
        if self.error is not None:
            raise self.error
        return DONE


def claimed(losses_alone=0):
    queue = InMemoryQueue()
    queue.enqueue(job_id="j", request=REQUEST)
    queue.entries["j"].losses_alone = losses_alone
    (job,) = queue.claim(1, Busy())
    return job


@pytest.mark.parametrize("losses_alone", [0, 3])
def test_a_job_that_took_effect_is_answered_however_often_it_was_lost(losses_alone):
    store = Store(answered=DONE)
    assert carry_out(REQUEST, claimed(losses_alone), store) == DONE.model_dump(mode="json")
    assert store.runs == 0


def test_a_job_that_loses_its_workers_is_not_restarted_forever():
    store = Store()
    assert carry_out(REQUEST, claimed(2), store)["job_id"] == "j"
    with pytest.raises(WorkerLostTooOften):
        carry_out(REQUEST, claimed(3), store)
    assert store.runs == 1


def test_a_failed_disk_write_fails_the_job_with_a_named_error():
    with pytest.raises(AgentVersionNotSaved, match="OSError: no space"):
        carry_out(REQUEST, claimed(), Store(error=OSError("no space")))


def test_what_a_worker_taken_for_dead_has_carried_out_meanwhile_is_the_answer():
    class Overtaken(Store):
        def run(self, request, delivery):
            self.answered = DONE
            raise AgentVersionConflict("another worker has written that version")

    assert carry_out(REQUEST, claimed(), Overtaken()) == DONE.model_dump(mode="json")
    with pytest.raises(AgentVersionConflict):
        carry_out(REQUEST, claimed(), Store(error=AgentVersionConflict("expected another version")))
