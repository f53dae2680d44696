"""Jobs about an agent: an answer given before comes before everything else, and what the disk does has a name."""

import pytest

from stoker_shared.agent_request import build_agent_request
from stoker_shared.agent_result import AgentInfo
from stoker_shared.errors import AgentVersionNotSaved, WorkerLostTooOften
from stoker_worker.agent_work import carry_out, let_go
from stoker_worker.ports import ClaimedJob, Delivery

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

    def ended(self, request, delivery):
        raise OSError("read only")


def claimed(lost_alone=0):
    return ClaimedJob("j", "q", REQUEST, Delivery("j", "2026"), 1, 0.0, 0.0, 0, None, None, lost_alone)


@pytest.mark.parametrize("lost_alone", [0, 3])
def test_a_job_that_took_effect_is_answered_however_often_it_was_lost(lost_alone):
    store = Store(answered=DONE)
    assert carry_out(REQUEST, claimed(lost_alone), store) == DONE.model_dump(mode="json")
    assert store.runs == 0


def test_a_job_that_loses_its_workers_is_not_begun_again_for_ever():
    store = Store()
    assert carry_out(REQUEST, claimed(2), store)["job_id"] == "j"
    with pytest.raises(WorkerLostTooOften):
        carry_out(REQUEST, claimed(3), store)
    assert store.runs == 1


def test_what_the_disk_did_not_take_fails_by_a_name_that_producers_know(caplog):
    with pytest.raises(AgentVersionNotSaved, match="OSError: no space"):
        carry_out(REQUEST, claimed(), Store(error=OSError("no space")))
    let_go(REQUEST, claimed(), Store())  # the job has ended: nothing that fails now may change that
    assert "read only" in caplog.text
