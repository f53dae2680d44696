"""An existing store gets a shared one: by a command that can be repeated, and that merges nothing."""

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.worker.memory.agents import Agent, files_below, ids, open_store, problems_of
from tests.worker.memory.replica.sharing import BOTH, Machine, Share

from stoker_shared.errors import AgentVersionConflict, SharedStoreAway, StoreUnusable
from stoker_worker.cli.main import main
from stoker_worker.memory.replica import sharing
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.replica.versions import version_name
from stoker_worker.memory.store_parts import opened
from stoker_worker.memory.transcripts import FULL_EVERY

LONG = ids(2000)
Start = Callable[..., Machine]


def say_alone(folder: Path, **turns: int) -> None:
    """Agents of a store without a shared one, by their numbers of turns."""
    alone = open_store(folder)
    for name, n_turns in turns.items():
        agent = Agent(alone, name)
        for n in range(agent.open().number + 1, agent.open().number + 1 + n_turns):
            agent.say(LONG[: 20 * n])
    alone.close()


def share_store(folder: Path, share: Share, *words: str) -> tuple[int, dict]:
    command = ["memory", "share", "--json", "--store", str(folder), share.url, *words]
    done = CliRunner().invoke(main, command)
    return done.exit_code, json.loads(done.stdout)


def flip_in_row(database: Path, agent_id: str, becomes: str) -> None:
    """Change an agent's id in its row alone, not in the indexes."""
    content = database.read_bytes()
    for found in re.finditer(re.escape(agent_id.encode()), content):
        database.write_bytes(content[: found.start()] + becomes.encode() + content[found.end() :])
        with closing(sqlite3.connect(database)) as reader:
            if (becomes,) in reader.execute("SELECT agent_id FROM agents NOT INDEXED").fetchall():
                return
    raise AssertionError("no row has this id")


def refuses(one: Machine) -> None:
    """The machine's worker does not start."""
    with pytest.raises(StoreUnusable, match="memory share"):
        one.store.meet()
    one.store.close()


@BOTH
def test_agents_of_before_there_was_a_shared_store_go_on_at_another_worker(
    machine: Start, share: Share, tmp_path: Path
) -> None:
    say_alone(tmp_path / "one", agent=40, other=1)
    one = machine("one")
    with pytest.raises(StoreUnusable, match="memory share"):
        one.store.meet()
    with pytest.raises(SharedStoreAway, match="memory share"):
        one.agent().open()
    one.store.close()
    code, done = share_store(tmp_path / "one", share)
    assert (code, done) == (0, {"agents": 2, "put": 2, "n_refused": 0, "refused": {}})
    assert share_store(tmp_path / "one", share) == (0, done | {"put": 0})
    one, two = machine("one"), machine("two")
    one.store.meet()
    assert two.agent().say(LONG[:900]) == 41
    assert (one.agent().tokens(), one.agent().say(LONG[:910])) == (LONG[:900], 42)
    assert two.agent("other").tokens() == LONG[:20]
    assert not [problem for m in (one, two) for problem in problems_of(m.store)]


def test_a_worker_with_an_empty_store_needs_no_command(machine: Start) -> None:
    one = machine("one")
    one.store.meet()
    one.agent().say(LONG[:20])
    one.store.close()
    machine("one").store.meet()


def test_an_interrupted_share_goes_on(
    machine: Start, share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_PAGE", 2)
    say_alone(tmp_path / "one", **{f"agent{n}": 20 for n in range(5)})

    def interrupt(done: sharing.Shared) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path / "one") as parts, pytest.raises(KeyboardInterrupt):
        sharing.share(parts, Bucket(share.url), on_page=interrupt)
    made = files_below(share.objects / "agents")
    made[-1].unlink()  # the last version of one agent: its chain was half put
    refuses(machine("one"))
    assert share_store(tmp_path / "one", share)[1] == {"agents": 5, "put": 4, "n_refused": 0, "refused": {}}
    two = machine("two")
    assert [two.agent(f"agent{n}").open().number for n in range(5)] == [20] * 5


@pytest.mark.parametrize("damage", ["CAST(result AS BLOB)", "replace(result, 'job', 'JOB')"])
def test_a_damaged_answer_is_refused_elsewhere_and_keeps_no_agent_here(
    machine: Start, share: Share, tmp_path: Path, damage: str
) -> None:
    alone = open_store(tmp_path / "one")
    turn = Agent(alone).turn(LONG[:20])
    alone.save(turn)
    alone.parts.database.commit(lambda connection: connection.execute(f"UPDATE deliveries SET result = {damage}"))
    alone.close()
    assert share_store(tmp_path / "one", share)[0] == 0
    one, two = machine("one"), machine("two")
    for _ in range(2):
        two.store.look("agent")
        with pytest.raises(AgentVersionConflict, match="its answer is not kept any more"):
            two.store.answer("agent", turn.delivery)
        for n in range(FULL_EVERY):  # one of these versions is whole, and has the ends of all deliveries
            one.agent().say(LONG[: 21 + n % 2])
    assert one.run("forget").model_dump()["existed"]


def test_an_answer_that_is_damaged_here_is_given_elsewhere_from_the_shared_store(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    turn = one.agent().turn(LONG[:20])
    one.store.save(turn)
    damage = "UPDATE deliveries SET result = replace(result, 'job', 'JOB')"
    one.store.parts.database.commit(lambda connection: connection.execute(damage))
    for n in range(FULL_EVERY):  # one of these versions is whole, and has the ends of all deliveries
        one.agent().say(LONG[: 21 + n % 2])
    two.store.look("agent")
    assert two.store.answer("agent", turn.delivery) == turn.result


@pytest.mark.parametrize("number", [3, 40])
def test_an_agent_that_another_worker_makes_at_the_same_time_is_named(
    share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    say_alone(tmp_path / "one", agent=20)  # of which the last ones are needed

    def create(bucket: Bucket, name: str, content: bytes) -> bool:
        if name == version_name("agent", 20):
            real(bucket, version_name("agent", number), content)
        return real(bucket, name, content)

    real = Bucket.create
    monkeypatch.setattr(Bucket, "create", create)
    assert list(share_store(tmp_path / "one", share)[1]["refused"]) == ["agent"]


def test_agents_that_are_other_ones_there_are_named_and_stay_as_they_are(
    machine: Start, share: Share, tmp_path: Path
) -> None:
    there = machine("there")
    for name in ("longer", "shorter", "same number", "gone"):
        for n in range({"longer": 5, "shorter": 1, "same number": 2, "gone": 3}[name]):
            there.agent(name).say(ids(50 + n, seed=9))
    say_alone(tmp_path / "one", **{"longer": 2, "shorter": 2, "same number": 2, "mine": 2})
    code, done = share_store(tmp_path / "one", share)
    assert (code, done["agents"], sorted(done["refused"])) == (1, 1, ["longer", "same number", "shorter"])
    refuses(machine("one"))
    assert there.agent("shorter").tokens() == ids(50, seed=9)
    for name in done["refused"]:
        CliRunner().invoke(main, ["memory", "rm", "--yes", "--store", str(tmp_path / "one"), name])
    assert share_store(tmp_path / "one", share)[0] == 0
    one = machine("one")
    assert (one.agent("longer").open().number, one.agent("mine").open().number) == (5, 2)


def test_an_agent_that_lacks_its_last_turn_is_named_until_that_is_settled(
    machine: Start, share: Share, tmp_path: Path
) -> None:
    """Elsewhere an `append` would go on without the turn."""

    def run(*words: str) -> None:
        done = CliRunner().invoke(main, ["memory", words[0], "--store", str(tmp_path / "one"), *words[1:]])
        assert done.exit_code == 0, done.output

    say_alone(tmp_path / "one", agent=2)
    alone = open_store(tmp_path / "one")
    for name in ("agent", "new"):
        alone.mark_unsaved(name)
    alone.close()
    code, done = share_store(tmp_path / "one", share)
    assert (code, sorted(done["refused"])) == (1, ["agent", "new"])
    refuses(machine("one"))
    run("rollback", "agent", "--to", "2")
    run("rm", "new", "--yes")
    assert share_store(tmp_path / "one", share)[0] == 0
    two = machine("two")
    assert (two.agent().open().number, two.agent().tokens()) == (3, LONG[:40])


def test_a_database_that_hides_an_agent_is_refused(machine: Start, share: Share, tmp_path: Path) -> None:
    """Otherwise a worker would start with the store as shared, and the agent would be nowhere else."""
    say_alone(tmp_path / "one", agent=2, reviewer=1)
    flip_in_row(tmp_path / "one" / "agents.db", "reviewer", "reviewes")
    code, done = share_store(tmp_path / "one", share)
    assert (code, done["error"]["type"]) == (1, "StoreUnusable")
    assert "memory salvage" in done["error"]["message"]
    refuses(machine("one"))
    assert CliRunner().invoke(main, ["memory", "salvage", "--store", str(tmp_path / "one")]).exit_code == 0
    code, done = share_store(tmp_path / "one", share)
    assert (code, done["agents"], list(done["refused"])) == (1, 1, ["reviewer"])
    CliRunner().invoke(main, ["memory", "rm", "--yes", "--store", str(tmp_path / "one"), "reviewer"])
    assert share_store(tmp_path / "one", share)[0] == 0


def test_an_agent_whose_id_is_no_text_any_more_is_named(machine: Start, share: Share, tmp_path: Path) -> None:
    say_alone(tmp_path / "one", agent=2, reviewer=1)
    with closing(sqlite3.connect(tmp_path / "one" / "agents.db")) as connection, connection:
        connection.execute("UPDATE agents SET agent_id = CAST(agent_id AS BLOB) WHERE agent_id = 'reviewer'")
    code, done = share_store(tmp_path / "one", share)
    assert (code, done["agents"], list(done["refused"])) == (1, 1, ["reviewer"])
    refuses(machine("one"))


def test_a_copy_that_is_behind_is_shared_as_it_is(machine: Start, share: Share, tmp_path: Path) -> None:
    say_alone(tmp_path / "one", agent=3)
    share_store(tmp_path / "one", share)
    two = machine("two")
    two.agent().say(LONG[:300])
    assert share_store(tmp_path / "one", share) == (0, {"agents": 1, "put": 0, "n_refused": 0, "refused": {}})
    assert machine("one").agent().tokens() == LONG[:300]
