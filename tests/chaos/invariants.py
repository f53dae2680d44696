"""The rules for the jobs after a chaos run, one by one: those of docs/lifecycle.md."""

from collections import Counter

from redis import Redis
from tests.chaos.deliveries import ENDED
from tests.chaos.found import SUCCESSFUL, Found, find_jobs, places_of_all
from tests.chaos.histories import Histories
from tests.chaos.hooks import generations
from tests.chaos.oracle import Oracle
from tests.chaos.storm import Storm
from tests.chaos.traffic import Traffic
from tests.support.store_reader import StoreReader

from stoker_worker.queue.connect import EXECUTION_TTL_S

IS_REGISTERED = {"finished": "finished", "failed": "failed", "stopped": "failed", "canceled": "canceled"}


class FollowUp:
    """Redis and the store after the run."""

    def __init__(self, connection: Redis, traffic: Traffic, storm: Storm, oracle: Oracle) -> None:
        self._connection, self._storm = connection, storm
        self.jobs = find_jobs(connection, traffic.deliveries)
        self.by_id = {job.job_id: job for job in self.jobs}
        self._histories = Histories(StoreReader(storm.crew.store), self.jobs, oracle)
        self._log = storm.crew.log_of_all()

    def broken(self) -> list[str]:
        """The broken rules, with a line or two for each."""
        broken = [*self._storm.crew.problems]
        for check in (
            self.every_job_has_ended_in_exactly_one_state,
            self.each_ended_as_its_kind_does,
            self.only_poison_is_lost_too_often,
            self.dependents_wait_only_for_what_did_not_finish,
            self.no_id_stands_in_two_places,
            self.nothing_is_left_of_any_worker,
            self.every_delivery_has_one_result_and_retries_are_counted,
            self.attempts_are_counted,
            *self._histories.checks,
        ):
            try:
                check()
            except Exception as error:  # also a value that cannot be read at all
                broken.append(f"{check.__name__}: {type(error).__name__}: {error}")
        return broken

    def ends(self) -> dict[str | None, int]:
        return dict(Counter(job.state for job in self.jobs))

    # --- the rules ---

    def every_job_has_ended_in_exactly_one_state(self) -> None:
        for job in self.jobs:
            if job.state is None:  # its ttl expired in the queue, or it was deleted
                assert job.plan.short_lived or job.plan.withdraw == "delete", job
                assert job.places == [], job
            elif job.state == "deferred":
                assert job.places == [f"deferred:{job.plan.queue}"], job
            else:
                assert job.state in ENDED, job
                assert job.places == [f"{IS_REGISTERED[job.state]}:{job.plan.queue}"], job

    def each_ended_as_its_kind_does(self) -> None:
        for job in self.jobs:
            withdrawn = {"canceled", "stopped", None} if job.plan.withdraw else set()
            expired = {None} if job.plan.short_lived else set()
            deferred = {"deferred"} if job.plan.parents else set()
            assert job.state in job.plan.ends | withdrawn | expired | deferred, job
            assert "restored cache" not in job.reason, job  # the scripted engine checks every restored token
            if job.state == "failed" and not job.plan.is_poison:
                late = job.plan.options["job_timeout"] == 1
                why = "GenerationTimedOut: " if late else f"EngineFailed: number {job.plan.index}"
                assert job.reason.startswith(why), job

    def only_poison_is_lost_too_often(self) -> None:
        for job in self.jobs:
            if job.state == "failed":
                assert ("WorkerLostTooOften" in job.reason) == job.plan.is_poison, job

    def dependents_wait_only_for_what_did_not_finish(self) -> None:
        """As with RQ's own worker: a failed parent counts if that is allowed, a canceled or stopped one never does."""
        for job in self.jobs:
            met = {"finished", "failed"} if job.plan.allow_failure else {"finished"}
            parents = [parent for name in job.plan.parents if (parent := self.by_id.get(name))]
            unmet = [parent for parent in parents if parent.state not in met]
            if job.state == "deferred":
                assert unmet, (job, parents)
            else:  # a parent whose id was used again may have finished before
                assert all(not parent.came_once for parent in unmet), (job, parents)

    def no_id_stands_in_two_places(self) -> None:
        twice = {job_id: places for job_id, places in places_of_all(self._connection).items() if len(places) > 1}
        assert twice == {}

    def nothing_is_left_of_any_worker(self) -> None:
        for pattern in (
            "rq:wip:*",
            "rq:execution*",
            "rq:queue:*",
            "rq:workers*",
            "stoker:holder:*",
            "stoker:lease:*",
            "rq:scheduler-lock*",
        ):
            left = [key for key in self._connection.keys(pattern) if not self._is_left_by_rq(key.decode())]
            assert left == [], [(key, self._connection.ttl(key)) for key in left]

    def _is_left_by_rq(self, key: str) -> bool:
        """An execution that is in no registry and expires by itself.

        RQ's own cancel or delete of a running job leaves it behind, and a worker that is lost then cannot remove it.
        """
        kind, job_id = [*key.split(":"), ""][1:3]
        if kind not in {"execution", "executions"} or not 0 < self._connection.ttl(key) <= EXECUTION_TTL_S + 60:
            return False
        return job_id in self.by_id and self.by_id[job_id].plan.withdraw is not None

    def every_delivery_has_one_result_and_retries_are_counted(self) -> None:
        for job in self.jobs:
            assert (job.state == "finished") <= (job.entries != [] and job.entries[-1][b"type"] == SUCCESSFUL), job
            sent = [*job.superseded, job.current]
            assert len(job.entries) <= sum(delivery.most_ends for delivery in sent), (job, sent)
            for plan in {delivery.job.name: delivery.job for delivery in sent}.values():
                same = [delivery for delivery in sent if delivery.job.name == plan.name]
                assert len(job.results_of(plan)) <= sum(delivery.most_ends for delivery in same), (job, same)
            for before, after in zip(job.superseded, sent[1:], strict=True):
                if after.met[0] == "finished":
                    assert job.results_of(before.job), (job, before)
            if job.state == "finished":
                assert job.result["metadata"]["job"] == job.plan.name, job
            self._retries_are_counted(job)

    def _retries_are_counted(self, job: Found) -> None:
        runs = generations(self._storm.seen, job.plan.request["metadata"])
        retry = job.plan.options.get("retry")
        if job.state == "failed" and retry:
            assert runs >= 1 + retry.max, (job, runs)
        if job.state == "finished":
            assert runs >= 1 + job.plan.flaky, (job, runs)

    def attempts_are_counted(self) -> None:
        """Exactly, except for jobs in an engine that broke and answers from the history."""
        # From the log: a worker may be killed on its way out, after it gave its jobs back.
        uncounted = self._log.count(" the engine broke\n") + self._storm.uncounted_losses
        for job in self.jobs:
            if job.state == "finished":
                worker_losses, attempt = self._storm.crew.worker_losses[job.job_id], job.result["attempt"]
                assert attempt <= 1 + worker_losses + uncounted, (job, worker_losses)
                answered = f"replayed job={job.job_id} " in self._log
                begins_anew = job.plan.options.get("retry") is not None or not job.came_once or len(job.current.met) > 1
                assert attempt >= 1 + worker_losses or answered or begins_anew, (job, worker_losses)
