"""The rules for the agents' transcripts after a chaos run: the order of docs/lifecycle.md."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from tests.chaos.deliveries import Delivery
from tests.chaos.found import Found
from tests.chaos.oracle import Oracle
from tests.chaos.plan import QUEUES
from tests.support.answers import without_total
from tests.support.store_reader import Kept, StoreReader

from stoker_shared.request import request_digest
from stoker_worker.memory.transcripts import delivery_key
from stoker_worker.ports import Delivery as PortDelivery


class Histories:
    """The store after the run."""

    def __init__(self, store: StoreReader, jobs: Sequence[Found], oracle: Oracle) -> None:
        self._store, self._jobs, self._oracle = store, jobs, oracle
        self._by_id = {job.job_id: job for job in jobs}
        named = {sent.job.agent for job in jobs for sent in (*job.superseded, job.current)}
        self._agents = {agent for agent in named if agent is not None}
        self._histories: dict[str, list[Kept]] = {}

    @property
    def checks(self) -> tuple[Callable[[], None], ...]:
        return (
            self.each_turn_is_in_its_agents_history_once,
            self.turns_of_an_agent_are_in_the_order_of_its_queues,
            self.every_answer_is_that_of_the_conversation_before_it,
            self.every_answer_outside_the_histories_is_right_too,
            self.the_store_is_whole,
        )

    def each_turn_is_in_its_agents_history_once(self) -> None:
        """A finished `readwrite` delivery's turn is there once. A failed delivery's turn is not. A withdrawn or
        superseded one's is there only if it was saved before the job's end, by this worker or by a lost one."""
        for agent in self._agents:
            history = self._history(agent)
            turns = [version.delivery for version in history]
            assert len(turns) == len(set(turns)), (agent, history)
            made = [self._made(agent, version) for version in history]
            for job in self._jobs:
                for delivery in self._finished(job):
                    is_of_agent = delivery.job.agent == agent and delivery.job.cache == "readwrite"
                    times = sum(turn is delivery for turn in made)
                    assert not is_of_agent or times == 1, (agent, job, times)
            for delivery, version in zip(made, history, strict=True):
                job = self._by_id[delivery.job_id]
                assert delivery.job.cache == "readwrite", job
                assert delivery.job.agent == agent, job
                if delivery is not job.current or job.state != "finished":
                    assert delivery.job.withdraw or delivery in job.superseded, job
                else:
                    report = job.result["cache"]
                    assert (report["agent_version"], report["saved"]) == (version.number, True), (job, version)

    def _finished(self, job: Found) -> list[Delivery]:
        """The deliveries of the job that certainly finished."""
        sent = [*job.superseded, job.current]
        before = [delivery for delivery, after in pairwise(sent) if after.met[0] == "finished"]
        return [*before, job.current] if job.state == "finished" else before

    def turns_of_an_agent_are_in_the_order_of_its_queues(self) -> None:
        for agent in self._agents:
            turns = [self._made(agent, version).job for version in self._history(agent)]
            for queue in QUEUES:
                line = [plan.index for plan in turns if plan.queue == queue and plan.keeps_order]
                assert all(before < after for before, after in pairwise(line)), (agent, queue, line)

    def every_answer_is_that_of_the_conversation_before_it(self) -> None:
        """Each version is the one before it, the job's prompt and the answer, token by token."""
        for agent in self._agents:
            ids: tuple[int, ...] = ()
            text = ""
            for version in self._history(agent):
                delivery = self._made(agent, version)
                job, plan = self._by_id[delivery.job_id], delivery.job
                if plan.context == "full":
                    ids, text = (), ""
                prompt_ids = (*ids, *self._oracle.encode(plan.prompt))
                answer, said = self._oracle.answer(prompt_ids, plan)
                ids, text = (*prompt_ids, *answer), text + plan.prompt + said
                assert version.transcript.token_ids == ids, (agent, version)
                assert version.transcript.text == text, (agent, version)
                assert version.result is not None
                assert version.result["text"] == said, (agent, version)
                if job.state == "finished" and delivery is job.current:
                    assert without_total(job.result) == without_total(version.result), job

    def every_answer_outside_the_histories_is_right_too(self) -> None:
        for job in self._jobs:
            if job.state == "finished" and (job.plan.cache != "readwrite" or job.plan.agent is None):
                version = job.result["cache"]["agent_version"] if job.plan.context == "append" else None
                assert (job.plan.agent is None or job.plan.cache == "off") <= (version is None), job
                ids = self._history(job.plan.agent or "")[version - 1].transcript.token_ids if version else ()
                _, said = self._oracle.answer((*ids, *self._oracle.encode(job.plan.prompt)), job.plan)
                assert job.result["text"] == said, job

    def the_store_is_whole(self) -> None:
        assert self._store.problems() == []

    # --- reading ---

    def _made(self, agent: str, version: Kept) -> Delivery:
        """The delivery that made the turn."""
        assert version.result is not None, (agent, version)
        job, name = self._by_id[version.job_id or ""], version.result["metadata"]["job"]
        for delivery in (*job.superseded, job.current):
            if delivery.job.name == name and _key_of(agent, delivery) in {None, version.delivery}:
                return delivery
        raise AssertionError(f"no delivery of {job} made this version of {agent}: {version}")

    def _history(self, agent: str) -> list[Kept]:
        if agent not in self._histories:
            history = self._histories[agent] = self._store.history(agent)
            assert [version.number for version in history] == list(range(1, len(history) + 1)), (agent, history)
        return self._histories[agent]


def _key_of(agent: str, delivery: Delivery) -> bytes | None:
    """Its key in the store; ``None`` where the producer chose the time."""
    if delivery.created_at is None:
        return None
    request = request_digest(delivery.job.request)
    return delivery_key(agent, PortDelivery(delivery.job_id, delivery.created_at, None, request))
