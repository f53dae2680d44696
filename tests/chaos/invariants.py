"""What has to be so after a chaos run, one by one: design 7 and the order of docs/lifecycle.md."""

import json
from base64 import b64decode
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from redis import Redis
from tests.chaos.hooks import generations
from tests.chaos.oracle import Oracle
from tests.chaos.plan import QUEUES, PlannedJob
from tests.chaos.storm import Storm
from tests.chaos.traffic import ENDED, Traffic

from stoker_worker.memory.access import StoreAccess, look_at
from stoker_worker.memory.record import TurnRecord, replay
from stoker_worker.rq_worker.connect import EXECUTION_LEASE_S

REGISTRIES = ("wip", "finished", "failed", "canceled", "scheduled", "deferred", "ready")
IS_REGISTERED = {"finished": "finished", "failed": "failed", "stopped": "failed", "canceled": "canceled"}
SUCCESSFUL = b"1"


@dataclass
class Found:
    """A job as it was found; `state` is ``None`` where its hash is gone."""

    plan: PlannedJob
    state: str | None
    places: list[str]
    entries: list[dict[bytes, bytes]]
    reason: str

    @property
    def result(self) -> dict[str, Any]:
        [entry] = [entry for entry in self.entries if entry[b"type"] == SUCCESSFUL]
        result: dict[str, Any] = json.loads(b64decode(entry[b"return_value"]))
        return result


class Aftermath:
    """Redis and the store when all is done."""

    def __init__(self, connection: Redis, traffic: Traffic, storm: Storm, oracle: Oracle) -> None:
        self._connection, self._storm, self._oracle = connection, storm, oracle
        self.store: StoreAccess = look_at(storm.store)
        places = self._places()
        acknowledged = [self._find(job, places) for job in traffic.acknowledged]
        in_doubt = [self._find(job, places) for job in traffic.in_doubt]
        # Where the server went away before it answered, the job is there whole or not at all.
        self.jobs = acknowledged + [job for job in in_doubt if job.state is not None]
        self.by_id = {job.plan.job_id: job for job in self.jobs}
        self.agents = {job.plan.agent for job in self.jobs}
        self._log = storm.log_of_all()

    def broken(self) -> list[str]:
        """What does not hold, a line or two for each."""
        broken = [*self._storm.problems]
        for check in (
            self.every_job_has_ended_in_exactly_one_state,
            self.each_ended_as_its_kind_does,
            self.only_poison_is_lost_too_often,
            self.no_id_stands_in_two_places,
            self.nothing_is_left_of_any_worker,
            self.finished_jobs_have_one_result_and_retries_are_counted,
            self.attempts_are_counted,
            self.each_turn_is_in_its_agents_history_once,
            self.turns_of_an_agent_are_in_the_order_of_its_queues,
            self.every_answer_is_that_of_the_conversation_before_it,
            self.so_is_every_answer_that_no_history_holds,
            self.the_store_is_whole,
        ):
            try:
                check()
            except Exception as error:  # also what cannot be read at all
                broken.append(f"{check.__name__}: {type(error).__name__}: {error}")
        return broken

    def ends(self) -> dict[str | None, int]:
        return dict(Counter(job.state for job in self.jobs))

    # --- one by one ---

    def every_job_has_ended_in_exactly_one_state(self) -> None:
        for job in self.jobs:
            if job.state is None:  # its ttl ended in the queue, or it was deleted
                assert job.plan.short_lived or job.plan.withdraw == "delete", job
                assert job.places == [], job
            else:
                assert job.state in ENDED, job
                assert job.places == [f"{IS_REGISTERED[job.state]}:{job.plan.queue}"], job

    def each_ended_as_its_kind_does(self) -> None:
        for job in self.jobs:
            withdrawn = {"canceled", "stopped", None} if job.plan.withdraw else set()
            expired = {None} if job.plan.short_lived else set()
            assert job.state in job.plan.ends | withdrawn | expired, job
            assert "restored cache" not in job.reason, job  # the scripted engine looks at every restored token
            if job.state == "failed" and not job.plan.is_poison:
                late = job.plan.options["job_timeout"] == 1
                why = "GenerationTimedOut: " if late else f"EngineFailed: number {job.plan.index}"
                assert job.reason.startswith(why), job

    def only_poison_is_lost_too_often(self) -> None:
        for job in self.jobs:
            if job.state == "failed":
                assert ("WorkerLostTooOften" in job.reason) == job.plan.is_poison, job

    def no_id_stands_in_two_places(self) -> None:
        twice = {job_id: places for job_id, places in self._places().items() if len(places) > 1}
        assert twice == {}

    def nothing_is_left_of_any_worker(self) -> None:
        for pattern in (
            "rq:wip:*",
            "rq:execution*",
            "rq:queue:*",
            "rq:workers*",
            "stoker:lease:*",
            "rq:scheduler-lock*",
        ):
            left = [key for key in self._connection.keys(pattern) if not self._is_left_by_rq(key.decode())]
            assert left == [], [(key, self._connection.ttl(key)) for key in left]

    def _is_left_by_rq(self, key: str) -> bool:
        """An execution that stands in no registry and expires by itself.

        A cancel or delete of a running job by RQ's way leaves it, and its worker, if that dies then, cannot see to it.
        """
        kind, job_id = [*key.split(":"), ""][1:3]
        if kind not in {"execution", "executions"} or not 0 < self._connection.ttl(key) <= EXECUTION_LEASE_S + 60:
            return False
        return job_id in self.by_id and self.by_id[job_id].plan.withdraw is not None

    def finished_jobs_have_one_result_and_retries_are_counted(self) -> None:
        for job in self.jobs:
            types = Counter(entry[b"type"] for entry in job.entries)
            assert types[SUCCESSFUL] == (job.state == "finished"), job
            assert sum(types.values()) <= 1, job
            runs = generations(self._storm.seen, job.plan.request["metadata"])
            retry = job.plan.options.get("retry")
            if job.state == "failed" and retry:
                assert runs >= 1 + retry.max, (job, runs)
            if job.state == "finished":
                assert runs >= 1 + job.plan.flaky, (job, runs)

    def attempts_are_counted(self) -> None:
        """Exactly, but for what an engine took with it that broke, and answers out of the history."""
        # From the log: one may be killed on its way out, when it has given its jobs back.
        uncounted = self._log.count(" the engine broke\n") + self._storm.uncounted_deaths
        for job in self.jobs:
            if job.state == "finished":
                deaths, attempt = self._storm.deaths[job.plan.job_id], job.result["attempt"]
                assert attempt <= 3, job
                assert attempt <= 1 + deaths + uncounted, (job, deaths)
                answered = f"job {job.plan.job_id} answered from the agent's history" in self._log
                begins_anew = job.plan.options.get("retry") is not None
                assert attempt >= 1 + deaths or answered or begins_anew, (job, deaths)

    def each_turn_is_in_its_agents_history_once(self) -> None:
        """A finished `readwrite` job's turn. A failed one's is not; a withdrawn one's is only if its save came before
        its end: canceled or deleted between the save and the finalising, or saved by a worker that then died."""
        for agent in self.agents:
            turns = [record.delivery.job_id for record in self._history(agent)]
            assert len(turns) == len(set(turns)), (agent, turns)
            jobs = [job for job in self.jobs if job.plan.agent == agent]
            finished = {job.plan.job_id for job in jobs if job.state == "finished" and job.plan.cache == "readwrite"}
            assert finished <= set(turns), (agent, finished - set(turns))
            for job_id in set(turns) - finished:
                job = self.by_id[job_id]
                assert job.plan.cache == "readwrite", job
                assert job.plan.withdraw, job
            for version, job_id in enumerate(turns, start=1):
                if job_id in finished:
                    report = self.by_id[job_id].result["cache"]
                    assert (report["agent_version"], report["saved"]) == (version, True), (job_id, version)

    def turns_of_an_agent_are_in_the_order_of_its_queues(self) -> None:
        for agent in self.agents:
            turns = [self.by_id[record.delivery.job_id].plan for record in self._history(agent)]
            for queue in QUEUES:
                line = [plan.index for plan in turns if plan.queue == queue and plan.keeps_order]
                assert all(before < after for before, after in pairwise(line)), (agent, queue, line)

    def every_answer_is_that_of_the_conversation_before_it(self) -> None:
        """Each version is made of the one before it, the job's prompt and the answer, token by token."""
        for agent in self.agents:
            ids: tuple[int, ...] = ()
            text = ""
            for version, record in enumerate(self._history(agent), start=1):
                plan = self.by_id[record.delivery.job_id].plan
                if plan.context == "full":
                    ids, text = (), ""
                prompt_ids = (*ids, *self._oracle.encode(plan.prompt))
                answer, said = self._oracle.answer(prompt_ids, plan)
                ids, text = (*prompt_ids, *answer), text + plan.prompt + said
                stored = replay(self._chain(agent, version))
                assert stored.token_ids == ids, (agent, version)
                assert stored.text == text, (agent, version)
                assert record.result["text"] == said, (agent, version)
                job = self.by_id[plan.job_id]
                assert job.state != "finished" or job.result == record.result, job

    def so_is_every_answer_that_no_history_holds(self) -> None:
        for job in self.jobs:
            if job.state == "finished" and job.plan.cache != "readwrite":
                version = job.result["cache"]["agent_version"] if job.plan.context == "append" else None
                ids = replay(self._chain(job.plan.agent, version)).token_ids if version else ()
                _, said = self._oracle.answer((*ids, *self._oracle.encode(job.plan.prompt)), job.plan)
                assert job.result["text"] == said, job

    def the_store_is_whole(self) -> None:
        assert self.store.verify() == []

    # --- reading ---

    def _history(self, agent: str) -> list[TurnRecord]:
        records = self.store.agent(agent).read_records()
        newest = self.store.agent(agent).read().version.number
        numbers = [number for number in sorted(records) if number <= newest]
        assert numbers == list(range(1, newest + 1)), (agent, numbers)
        return [records[number] for number in numbers]

    def _chain(self, agent: str, version: int) -> list[TurnRecord]:
        records = self._history(agent)[:version]
        start = max(at for at, record in enumerate(records) if record.keeps_nothing)
        return records[start:]

    def _places(self) -> dict[str, list[str]]:
        """Every list and registry an id stands in, once for each time."""
        found: dict[str, list[str]] = {}
        for queue in QUEUES:
            entries = [(f"list:{queue}{x}", self._connection.lrange(f"rq:queue:{queue}{x}", 0, -1))
                       for x in ("", ":intermediate")]  # fmt: skip
            entries += [(f"{kind}:{queue}", self._connection.zrange(f"rq:{kind}:{queue}", 0, -1))
                        for kind in REGISTRIES]  # fmt: skip
            for place, ids in entries:
                for entry in ids:
                    found.setdefault(entry.decode().split(":")[0], []).append(place)
        return found

    def _find(self, plan: PlannedJob, places: dict[str, list[str]]) -> Found:
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hmget(f"rq:job:{plan.job_id}", "status", "exc_info")
            pipeline.xrange(f"rq:results:{plan.job_id}")
            (status, _), stream = pipeline.execute()
        entries = [entry for _, entry in stream]
        failures = [entry[b"exc_string"] for entry in entries if b"exc_string" in entry]
        reason = unpacked(failures[-1]) if failures else ""
        return Found(plan, status.decode() if status else None, places.get(plan.job_id, []), entries, reason)


def unpacked(exc_string: bytes) -> str:
    import zlib

    return zlib.decompress(b64decode(exc_string)).decode()
