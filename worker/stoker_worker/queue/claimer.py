"""Claims from one queue the jobs that `FairQueue` chooses, as far as their agents are at home here or may be.

Owns which agents turned out to be another member's; fetcher thread. What waits in the queue is known to `QueueView`.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

from redis import Redis
from rq.queue import Queue

from stoker_shared.needs import Needs
from stoker_shared.wire import CLAIMED_KEY, COUNTS_KEY, HOMES_KEY, LEFT_KEY, MEMBERS_KEY, TAKEN_KEY
from stoker_worker.ports import Busy
from stoker_worker.queue.away import Away
from stoker_worker.queue.claim_scripts import CLAIM
from stoker_worker.queue.foreign_ids import raw
from stoker_worker.queue.hints import Hint
from stoker_worker.queue.homes import NOBODY, Home, as_field
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.lines import Lines
from stoker_worker.queue.members import Member
from stoker_worker.queue.queue_view import QueueView
from stoker_worker.queue.waiting_job import Granted, HomeRule, Waiting

_TRIES: Final = 8  # in one claim, while jobs turn out to be other workers'
_LOOKED_AROUND: Final = 500


class Claimer:
    """The waiting jobs of one queue.

    A job that was in flight when its worker was lost is quarantined. It is claimed alone, so that a job which kills its
    workers takes no other jobs down with it a second time.
    """

    def __init__(self, connection: Redis, queue_name: str, lease: Lease, rule: HomeRule) -> None:
        self._connection = connection
        self._lease = lease
        self._rule = rule
        self._key = Queue(queue_name, connection=connection).key
        claimed = CLAIMED_KEY.format(queue=queue_name, member=lease.member)
        self._homes_key = HOMES_KEY.format(queue=queue_name)
        news = [TAKEN_KEY.format(queue=queue_name), COUNTS_KEY.format(queue=queue_name)]
        homes = [self._homes_key, *(HOMES_KEY.format(queue=name) for name in lease.queues if name != queue_name)]
        self._claim_keys = [self._key, claimed, lease.keys[0], MEMBERS_KEY, LEFT_KEY, *news, *homes]
        self._claim = connection.register_script(CLAIM)
        self._view = QueueView(connection, queue_name, lease.member)
        self._waiting = self._view.waiting
        self._to_look_at: list[str] = []
        self._away = Away(connection, self._waiting.lines)
        self._has_untried = False
        self._could_travel = False

    def read_ahead(self, limit: int, busy: Busy) -> None:
        """As `QueueView.read_ahead`."""
        self._has_untried = False
        self._view.read_ahead(limit, busy)

    @property
    def has_unread(self) -> bool:
        """As `QueueView.has_unread`; also if the last claim found only jobs of other workers so far."""
        return self._view.has_unread or self._has_untried

    def agents(self) -> frozenset[str]:
        """The agents of the waiting jobs that were read and may be claimed here; the same object until they change."""
        return self._waiting.lines.agents()

    def prefer(self, is_at_hand: Callable[[str], bool]) -> None:
        """Jobs of such agents may pass others."""
        self._waiting.is_at_hand = is_at_hand

    def place_of(self, agent_id: str) -> int | None:
        """As `FairQueue.place_of`."""
        return self._waiting.place_of(agent_id)

    def next_agents(self, limit: int) -> list[str]:
        """As `FairQueue.next_agents`."""
        return self._waiting.next_agents(limit)

    def first_aside(self, limit: int, sharing: Container[str]) -> list[tuple[str, str]]:
        """As `Lines.first_aside`. `sharing`: the members that have a shared store."""
        return self._waiting.lines.first_aside(limit, with_memory_from=sharing if self._rule.memory_travels else ())

    def n_ahead(self, agent_id: str) -> int | None:
        """As `Lines.n_ahead`."""
        return self._waiting.lines.n_ahead(agent_id)

    @property
    def lines(self) -> Lines:
        """The waiting jobs that were read."""
        return self._waiting.lines

    def claim(self, limit: int, busy: Busy) -> list[Granted]:
        """Take up to `limit` jobs out of the queue, which may run beside what is busy, none of them quarantined.

        Nothing is claimed if the lease has another holder.
        """
        granted: list[Granted] = []
        for _ in range(_TRIES):
            chosen = self._waiting.choose(limit - len(granted), busy)
            found, has_put_aside = self._take(chosen)
            granted += found
            if not has_put_aside:
                break
            busy = busy.beside(one.use for one in found)
        else:
            self._has_untried = True
        return granted

    def claim_quarantined(self) -> list[Granted]:
        """As `claim`, for the oldest quarantined job. The caller sees to it that the job runs alone."""
        job_id = self.next_quarantined()
        return [] if job_id is None else self._take([job_id])[0]

    def settle_quarantined(self) -> list[Granted]:
        """If the oldest quarantined job continues what another store has, or its agent waits for a job that has gone
        on, it cannot run here: its line is put aside, or the job is granted to be failed. It need not be alone for
        that."""
        job_id = self.next_quarantined()
        if job_id is None:
            return []
        home, use = self._home_of(job_id), self._waiting.use_of(job_id)
        needs_store = use.continues and not self._rule.memory_travels
        is_elsewhere = needs_store and home.store not in (NOBODY, self._lease.store)
        return self._take([job_id])[0] if is_elsewhere or home.waits_for_another(job_id) else []

    def next_quarantined(self) -> str | None:
        """The oldest quarantined job that can be claimed, of those the server still has in the queue."""
        while (job_id := self._waiting.next_quarantined()) is not None:
            if self._connection.lpos(self._key, raw(job_id)) is not None:  # type: ignore[arg-type]
                return job_id
            self._waiting.discard(job_id)
        return None

    def needs_of(self, job_id: str) -> Needs:
        """As `FairQueue.needs_of`."""
        return self._waiting.needs_of(job_id)

    def leaves(self, hint: Hint) -> bool:
        """Whether such a job is left to other workers."""
        return self.lines.leaves(Waiting(0, "", hint.use, needs=hint.needs))

    def is_at_home(self, job_id: str) -> bool:
        """Whether a waiting job's agent is at home at this worker."""
        return self._home_of(job_id).member == self._lease.member

    def correct(self, job_id: str, hint: Hint, *, quarantined: bool) -> None:
        """As `QueueView.correct`."""
        self._view.correct(job_id, hint, quarantined=quarantined)

    def look_around(self, present: Mapping[str, Member], asked: Sequence[str]) -> None:
        """Take back the lines of agents that have no other member as their home any more, or whose store is back.

        Args:
            present: the other members of this queue.
            asked: agents that their homes may have given up: they are looked at first.
        """
        lines, could_travel = self._waiting.lines, self._could_travel
        self._could_travel = self._rule.memory_travels
        if not lines.aside:
            return
        stores = {member.store: name for name, member in present.items()}
        if self._could_travel and not could_travel:
            self._away.clear()
        self._away.look(stores)
        lines.take_back([name for name, home in lines.aside.items() if home not in present and name not in self._away])
        if not self._to_look_at:
            if not self.has_unread:
                lines.prune_aside()
            self._to_look_at = [agent_id for agent_id in lines.aside if isinstance(agent_id, str)]
        page, self._to_look_at = self._to_look_at[:_LOOKED_AROUND], self._to_look_at[_LOOKED_AROUND:]
        page = [name for name in dict.fromkeys([*asked, *page]) if name in lines.aside and name not in self._away]
        if page:
            fields: Any = [as_field(agent_id) for agent_id in page]
            entries: Any = self._connection.hmget(self._homes_key, fields)
            back = []
            for agent_id, entry in zip(page, entries, strict=True):
                home = Home.of(entry)
                head = lines.first_of(agent_id)
                if home.member not in present and head is not None and head.use.continues:
                    its_member = stores.get(home.store, NOBODY)
                    is_shared = home.version or (its_member in present and present[its_member].shared)
                    if not (self._could_travel and is_shared):
                        home = home._replace(member=its_member)
                if home.member in present:
                    lines.aside[agent_id] = home.member
                else:
                    back.append(agent_id)
            lines.take_back(back)

    def _home_of(self, job_id: str) -> Home:
        """The home of a waiting job's agent."""
        agent_id = self._waiting.use_of(job_id).agent_id
        entry: Any = None if agent_id is None else self._connection.hget(self._homes_key, as_field(agent_id))
        return Home.of(entry)

    def _take(self, chosen: Sequence[str]) -> tuple[list[Granted], bool]:
        """Claim these, as far as they are ours to claim; and whether any was put aside."""
        if not chosen:
            return [], False
        rule = self._rule
        args: list[str | bytes | int | float] = [self._lease.value, self._lease.member, self._lease.store]
        args += [self._view.moves, rule.wait_s, rule.memory_travels_as_word]
        uses = [self._waiting.use_of(job_id) for job_id in chosen]
        needs = {job_id: self._waiting.needs_of(job_id) for job_id in chosen}
        for job_id, use in zip(chosen, uses, strict=True):
            letter = b"" if use.agent_id is None else b"c" if use.continues else b"n"
            nearer = -1 if self._waiting.is_nearer_to_the_end(job_id) else 1
            args += [nearer, raw(job_id), letter + as_field(use.agent_id or "")]
        found = self._claim(keys=self._claim_keys, args=args)
        if found is None:
            return [], False
        words = iter([word.decode(errors="replace") for word in found])
        granted, has_put_aside = [], False
        for job_id, use, verdict, store, former, version in zip(chosen, uses, words, words, words, words, strict=True):
            if verdict in ("claimed", "lost"):
                self._waiting.serve(job_id)
                lost, number = verdict == "lost", int(version or 0)
                granted.append(Granted(job_id, use, store, former, number, is_lost=lost, needs=needs[job_id]))
            elif verdict == "gone":  # somebody else took it from the list
                self._waiting.discard(job_id)
            elif verdict in ("home", "away") and use.agent_id is not None:
                self._waiting.lines.put_aside(use.agent_id, store)
                has_put_aside = True
                if verdict == "away":
                    self._away.note(use.agent_id, float(former))
        return granted, has_put_aside
