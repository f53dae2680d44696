"""Four workers on one queue while they are killed, put to sleep beyond their leases, drained and started again."""

import random
import time
from collections import defaultdict

import pytest
from tests.end_to_end.macs import LEASE_S, Macs
from tests.store_reader import StoreReader

from stoker_shared.errors import JobFailed
from stoker_shared.wire import MEMBERS_KEY

pytestmark = [pytest.mark.server, pytest.mark.slow]

N_WORKERS, N_AGENTS, N_JOBS, N_EPISODES = 4, 40, 800, 10


def agent_of(n):
    return f"append {n % N_AGENTS}" if n % 4 == 0 else f"full {n % N_AGENTS}"


def submit(producer, n):
    agent_id = agent_of(n)
    context = agent_id.partition(" ")[0]
    return producer.submit(agent_id=agent_id, prompt=f"say {n}", context=context, max_tokens=random.randint(4, 40))


def ended_at(connection, job_id):
    """By Redis' clock; and there is exactly one result."""
    [(stamp, _)] = connection.xrange(f"rq:results:{job_id}")
    milliseconds, _, number = stamp.decode().partition("-")
    return int(milliseconds), int(number)


@pytest.mark.parametrize("seed", [1])
def test_every_job_ends_once_and_in_its_agents_order(producer, redis_url, connection, tmp_path, seed):
    chance = random.Random(seed)
    crew = Macs(redis_url, tmp_path, N_WORKERS)
    try:
        crew.wait_until_ready()
        tickets = [submit(producer, n) for n in range(N_JOBS // 2)]
        for number in range(N_EPISODES):
            n = chance.randrange(N_WORKERS)
            act = [crew.kill, crew.kill, crew.stop, crew.sleep][number % 4]
            act(n)
            time.sleep(chance.choice((0, 0.3, 2 * LEASE_S)))
            crew.replace(n)
            tickets += [submit(producer, len(tickets)) for _ in range(N_JOBS // 2 // N_EPISODES)]
        results = [ticket.result(timeout_s=90) for ticket in tickets]
        assert all(worker.returncode is None for worker in crew.workers.values())
    except JobFailed as error:
        pytest.fail(f"{error}\n" + "\n".join(worker.log for worker in crew.workers.values()))
    finally:
        crew.end()
    by_agent = defaultdict(list)
    for ticket, result in zip(tickets, results, strict=True):
        by_agent[result.agent_id].append((ended_at(connection, ticket.job_id), result.cache.agent_version))
    for agent_id, ends in by_agent.items():
        assert ends == sorted(ends, key=lambda end: end[0]), agent_id
        if agent_id.startswith("append"):
            assert [version for _, version in ends] == list(range(1, len(ends) + 1)), agent_id
    for n in range(N_WORKERS):
        assert StoreReader(crew.store(n)).problems() == []
    assert connection.hlen(MEMBERS_KEY) == 0
    for pattern in ("stoker:claimed:*", "stoker:holder:*", "stoker:ended:*", "rq:wip:*", "rq:execution*"):
        assert connection.keys(pattern) == [], pattern
    assert {home.split()[0] for home in connection.hvals("stoker:homes:generate")} <= {b"mac%d" % n for n in range(4)}
