"""The lineup chooses what a walk along the whole list would choose."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker_worker.rq_worker.lineup import Lineup

AGENTS = ("a", "b", "c", None)
JOBS = [f"job-{n}" for n in range(30)]


def agent_of(job_id):
    return AGENTS[int(job_id.removeprefix("job-")) % len(AGENTS)]


def walk(job_ids, limit, busy, suspects, nothing_runs):
    """What is to be chosen, said the plain way: from the head on."""
    chosen, taken = [], set(busy)
    for job_id in job_ids:
        if len(chosen) == limit:
            break
        if job_id in suspects:
            waits = bool(chosen) or not nothing_runs
            return (chosen, True) if waits else ([job_id], False)
        if agent_of(job_id) not in taken:
            chosen.append(job_id)
            taken |= {agent_of(job_id)} - {None}
    return chosen, False


class LineupMachine(RuleBasedStateMachine):
    """Against a plain list, of which the first `learned` have been read."""

    def __init__(self):
        super().__init__()
        self.lineup = Lineup()
        self.waiting = []
        self.known = set()
        self.suspects = set()

    def remove(self, job_ids):
        self.waiting = [job_id for job_id in self.waiting if job_id not in job_ids]
        self.known -= set(job_ids)

    @rule(job_ids=st.lists(st.sampled_from(JOBS), unique=True, max_size=6))
    def come_in_behind(self, job_ids):
        self.remove(job_ids)
        self.waiting += job_ids
        self.lineup.append(job_ids)

    @rule(job_ids=st.lists(st.sampled_from(JOBS), unique=True, max_size=6))
    def come_in_before(self, job_ids):
        self.remove(job_ids)
        self.waiting[:0] = job_ids
        self.lineup.prepend(job_ids)

    @rule(job_id=st.sampled_from(JOBS))
    def go(self, job_id):
        self.remove([job_id])
        self.lineup.discard(job_id)

    @rule()
    def start_over(self):
        self.waiting, self.known = [], set()
        self.lineup.clear()

    @rule(count=st.integers(1, 8), suspects=st.sets(st.sampled_from(JOBS), max_size=3))
    def learn(self, count, suspects):
        for job_id in self.lineup.unlearned(count):
            assert job_id not in self.known
            (self.suspects.add if job_id in suspects else self.suspects.discard)(job_id)
            self.lineup.learn(job_id, agent_of(job_id), suspect=job_id in suspects)
            self.known.add(job_id)

    @rule(
        limit=st.integers(1, 6),
        busy=st.sets(st.sampled_from("abc")),
        nothing_runs=st.booleans(),
        claim=st.booleans(),
    )
    def choose(self, limit, busy, nothing_runs, claim):
        unread = next((n for n, job_id in enumerate(self.waiting) if job_id not in self.known), len(self.waiting))
        wanted = walk(self.waiting[:unread], limit, busy, self.suspects, nothing_runs)
        assert self.lineup.choose(limit, busy, nothing_runs=nothing_runs) == wanted
        for job_id in wanted[0] if claim else ():
            self.go(job_id)

    @invariant()
    def its_ends_are_those_of_the_list(self):
        assert len(self.lineup) == len(self.waiting)
        first, last = self.lineup.first(3), self.lineup.last(3)
        assert first == self.waiting[: len(first)]
        assert last == self.waiting[::-1][: len(last)]
        assert bool(first) == bool(last) == bool(self.waiting)


TestLineup = LineupMachine.TestCase


@given(st.lists(st.sampled_from(JOBS), unique=True))
def test_everything_is_chosen_once_agent_by_agent_in_order(job_ids):
    lineup = Lineup()
    lineup.append(job_ids)
    for job_id in lineup.unlearned(100):
        lineup.learn(job_id, agent_of(job_id), suspect=False)
    chosen = []
    while found := lineup.choose(2, (), nothing_runs=True)[0]:
        for job_id in found:
            lineup.discard(job_id)
        chosen += found
    assert sorted(chosen) == sorted(job_ids)
    for agent in "abc":
        assert [j for j in chosen if agent_of(j) == agent] == [j for j in job_ids if agent_of(j) == agent]
