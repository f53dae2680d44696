"""Jobs about agents' memory without a disk (`AgentJobsPort`). Any thread."""

from tests.in_memory.agent_memory import AgentMemory, SavedCache, SavedVersion

from stoker_shared.agents import (
    AgentForgotten,
    AgentForked,
    AgentInfo,
    AgentRequest,
    AgentResult,
    AgentRolledBack,
    PastVersion,
    read_agent_result,
)
from stoker_shared.errors import AgentExists, AgentNotFound, AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.ports import AgentJobsPort, Delivery


class InMemoryAgentJobs(AgentJobsPort):
    def __init__(self, memory: AgentMemory) -> None:
        self._memory = memory
        self._forgotten: dict[tuple[str, Delivery], AgentForgotten] = {}

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        if request.action == "info":
            return None
        with self._memory.lock:
            if request.action == "forget":
                is_forgotten = self._memory.is_forgotten(request.agent_id, delivery)
                return None if is_forgotten else self._forgotten.get((request.agent_id, delivery))
            known = self._memory.answer(request.changed_agent, delivery)
            return None if known is None else read_agent_result(known)

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        if request.action == "info":
            with self._memory.lock:
                return self._info(request.agent_id, delivery)
        self._memory.before_write(request.target or request.agent_id)
        with self._memory.lock:
            number = self._memory.newest(request.agent_id).number
            if request.expect_version not in (None, number):
                raise AgentVersionConflict(
                    f"agent {request.agent_id!r} is at version {number}, not {request.expect_version}"
                )
            if request.action == "forget":
                return self._forget(request.agent_id, delivery)
            if request.action == "fork":
                assert request.target is not None  # the request is valid
                return self._fork(request.agent_id, request.target, delivery)
            return self._roll_back(request.agent_id, request.version, delivery)

    def _info(self, agent_id: str, delivery: Delivery) -> AgentInfo:
        memory, versions = self._memory, self._memory.agents.get(agent_id, [])
        is_unsaved = agent_id in memory.unsaved
        if not versions:
            state = "unsaved" if is_unsaved else "ok"
            return AgentInfo(job_id=delivery.job_id, agent_id=agent_id, exists=is_unsaved, state=state)
        newest = versions[-1]
        transcript, own = newest.transcript, set(newest.cache.chain.addresses if newest.cache else ())
        messages, text = transcript.messages, transcript.text
        return AgentInfo(
            job_id=delivery.job_id,
            agent_id=agent_id,
            exists=True,
            version=len(versions),
            tokens=len(transcript.token_ids),
            messages=None if messages is None else len(messages),
            text_chars=None if text is None else len(text),
            cached_tokens=len(newest.cache.chain.token_ids) if newest.cache else 0,
            own_bytes=4 * len(transcript.token_ids),
            block_bytes=self._bytes_of(own),
            shared_bytes=self._bytes_of(own & memory.used_by_others(agent_id, count_on=False)),
            last_used=newest.saved_at,
            state="unsaved" if is_unsaved else "ok",
            problem="its last turn was not saved" if is_unsaved else None,
            versions=tuple(
                PastVersion(
                    version=number, tokens=len(x.transcript.token_ids), job_id=x.delivery.job_id, saved_at=x.saved_at
                )
                for number, x in enumerate(versions[:-1], start=1)
            )[-100:],
        )

    def _forget(self, agent_id: str, delivery: Delivery) -> AgentForgotten:
        memory = self._memory
        versions = memory.agents.get(agent_id, [])
        caches: list[SavedCache] = [version.cache for version in versions if version.cache is not None]
        there = {address for cache in caches for address in cache.chain.addresses} & memory.blocks.keys()
        going = there - memory.used_by_others(agent_id)
        forgotten = AgentForgotten(
            job_id=delivery.job_id,
            agent_id=agent_id,
            existed=bool(versions) or agent_id in memory.unsaved,
            version=len(versions),
            blocks=len(going),
            block_bytes=self._bytes_of(going),
            shared_blocks=len(there) - len(going),
        )
        for address in going:
            del memory.blocks[address]
        memory.agents.pop(agent_id, None)
        memory.unsaved.discard(agent_id)
        if forgotten.existed:
            self._forgotten[agent_id, delivery] = forgotten
        return forgotten

    def _fork(self, source: str, target: str, delivery: Delivery) -> AgentForked:
        memory = self._memory
        if source in memory.unsaved:
            raise AgentTranscriptUnreadable(f"the transcript of agent {source!r}: its last turn was not saved")
        if source not in memory.agents:
            raise AgentNotFound(f"there is no agent {source!r}")
        if target in memory.agents or target in memory.unsaved:
            raise AgentExists(f"there is an agent {target!r} already")
        newest = memory.agents[source][-1]
        forked = AgentForked(
            job_id=delivery.job_id,
            agent_id=source,
            target=target,
            version=1,
            from_version=len(memory.agents[source]),
            tokens=len(newest.transcript.token_ids),
        )
        result = forked.model_dump(mode="json")
        memory.add_version(target, SavedVersion(delivery, newest.transcript, result, newest.cache))
        return forked

    def _roll_back(self, agent_id: str, version: int | None, delivery: Delivery) -> AgentRolledBack:
        versions = self._memory.agents.get(agent_id, [])
        if not versions:
            raise AgentNotFound(f"there is no agent {agent_id!r}")
        to = len(versions) - 1 if version is None else version
        if not 1 <= to <= len(versions):
            raise AgentNotFound(f"agent {agent_id!r} has no version {to}: it is at version {len(versions)}")
        goal = versions[to - 1]
        back = AgentRolledBack(
            job_id=delivery.job_id,
            agent_id=agent_id,
            version=len(versions) + 1,
            to_version=to,
            from_version=len(versions),
            tokens=len(goal.transcript.token_ids),
        )
        cache = goal.cache.full_blocks() if goal.cache else None
        result = back.model_dump(mode="json")
        self._memory.add_version(agent_id, SavedVersion(delivery, goal.transcript, result, cache))
        return back

    def _bytes_of(self, addresses: set[str]) -> int:
        blocks = (self._memory.blocks.get(address, ()) for address in addresses)
        return sum(keys.nbytes + values.nbytes for block in blocks for keys, values in block)
