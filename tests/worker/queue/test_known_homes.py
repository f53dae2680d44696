"""What a shared store is told of an agent's home."""

from stoker_worker.ports import AgentHome
from stoker_worker.queue.known_homes import KnownHomes


def test_the_home_is_as_it_was_at_the_last_claim():
    homes = KnownHomes()
    assert homes.of("x") is None
    homes.claimed("x", "mac1", 7, "disk1")
    assert homes.of("x") == AgentHome("mac1", 7, "disk1")
    homes.claimed("x", "", 8, "disk2")
    assert homes.of("x") == AgentHome(None, 8, "disk2")
    assert homes.of("y") is None


def test_only_the_agents_of_the_last_jobs_are_known(monkeypatch):
    monkeypatch.setattr("stoker_worker.queue.known_homes._MOST", 2)
    homes = KnownHomes()
    for agent_id in ("x", "y", "x", "z"):
        homes.claimed(agent_id, "", 1, "disk")
    assert [homes.of(agent_id) is None for agent_id in "xyz"] == [False, True, False]
