"""The rules for the agents' transcripts after a chaos run: design 5 and the order of docs/lifecycle.md."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from tests.answers import without_total
from tests.chaos.deliveries import Delivery
from tests.chaos.found import Found
from tests.chaos.oracle import Oracle
from tests.chaos.plan import QUEUES

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.record import TurnRecord, replay


class Histories:
    """The store after the run."""

    def __init__(self, store: StoreAccess, jobs: Sequence[Found], oracle: Oracle) -> None:
        self._store, self._jobs, self._oracle = store, jobs, oracle
        self._by_id = {job.job_id: job for job in jobs}
        named = {sent.job.agent for job in jobs for sent in (*job.superseded, job.current)}
        self._agents = {agent for agent in named if agent is not None}

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
            turns = [record.delivery for record in history]
            assert len(turns) == len(set(turns)), (agent, turns)
            made = [self._made(record) for record in history]
            for job in self._jobs:
                for delivery in self._finished(job):
                    is_of_agent = delivery.job.agent == agent and delivery.job.cache == "readwrite"
                    times = sum(turn is delivery for turn in made)
                    assert not is_of_agent or times == 1, (agent, job, times)
            for version, (delivery, record) in enumerate(zip(made, history, strict=True), start=1):
                job = self._by_id[record.delivery.job_id]
                assert delivery.job.cache == "readwrite", job
                assert delivery.job.agent == agent, job
                if delivery is not job.current or job.state != "finished":
                    assert delivery.job.withdraw or delivery in job.superseded, job
                else:
                    report = job.result["cache"]
                    assert (report["agent_version"], report["saved"]) == (version, True), (job, version)

    def _finished(self, job: Found) -> list[Delivery]:
        """The deliveries of the job that certainly finished."""
        sent = [*job.superseded, job.current]
        before = [delivery for delivery, after in pairwise(sent) if after.met[0] == "finished"]
        return [*before, job.current] if job.state == "finished" else before

    def turns_of_an_agent_are_in_the_order_of_its_queues(self) -> None:
        for agent in self._agents:
            turns = [self._made(record).job for record in self._history(agent)]
            for queue in QUEUES:
                line = [plan.index for plan in turns if plan.queue == queue and plan.keeps_order]
                assert all(before < after for before, after in pairwise(line)), (agent, queue, line)

    def every_answer_is_that_of_the_conversation_before_it(self) -> None:
        """Each version is the one before it, the job's prompt and the answer, token by token."""
        for agent in self._agents:
            ids: tuple[int, ...] = ()
            text = ""
            for version, record in enumerate(self._history(agent), start=1):
                delivery, job = self._made(record), self._by_id[record.delivery.job_id]
                plan = delivery.job
                if plan.context == "full":
                    ids, text = (), ""
                prompt_ids = (*ids, *self._oracle.encode(plan.prompt))
                answer, said = self._oracle.answer(prompt_ids, plan)
                ids, text = (*prompt_ids, *answer), text + plan.prompt + said
                stored = replay(self._chain(agent, version))
                assert stored.token_ids == ids, (agent, version)
                assert stored.text == text, (agent, version)
                assert record.result["text"] == said, (agent, version)
                if job.state == "finished" and delivery is job.current:
                    assert without_total(job.result) == without_total(record.result), job

    def every_answer_outside_the_histories_is_right_too(self) -> None:
        for job in self._jobs:
            if job.state == "finished" and (job.plan.cache != "readwrite" or job.plan.agent is None):
                version = job.result["cache"]["agent_version"] if job.plan.context == "append" else None
                assert (job.plan.agent is None or job.plan.cache == "off") <= (version is None), job
                ids = replay(self._chain(job.plan.agent or "", version)).token_ids if version else ()
                _, said = self._oracle.answer((*ids, *self._oracle.encode(job.plan.prompt)), job.plan)
                assert job.result["text"] == said, job

    def the_store_is_whole(self) -> None:
        assert self._store.verify() == []

    # --- reading ---

    def _made(self, record: TurnRecord) -> Delivery:
        """The delivery that made the turn."""
        job, name = self._by_id[record.delivery.job_id], record.result["metadata"]["job"]
        for delivery in (*job.superseded, job.current):
            if delivery.job.name == name and delivery.created_at in {None, record.delivery.created_at}:
                return delivery
        raise AssertionError(f"no delivery made version {record.version} of {record.agent_id}: {record.delivery}")

    def _history(self, agent: str) -> list[TurnRecord]:
        records = self._store.agent(agent).read_records()
        newest = self._store.agent(agent).read().version.number
        numbers = [number for number in sorted(records) if number <= newest]
        assert numbers == list(range(1, newest + 1)), (agent, numbers)
        return [records[number] for number in numbers]

    def _chain(self, agent: str, version: int) -> list[TurnRecord]:
        records = self._history(agent)[:version]
        start = max(at for at, record in enumerate(records) if record.keeps_nothing)
        return records[start:]
