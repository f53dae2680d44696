"""No number of a version is used twice, and none is skipped over in silence: whoever slept, whatever the clocks say."""

import os
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.worker.memory.agents import AgentOf, files_below, ids, make_transcript, make_turn, problems_of
from tests.worker.memory.replica.sharing import Machine, SharedFolder

from stoker_shared.errors import AgentTranscriptUnreadable, VersionTaken
from stoker_worker.cli.main import main
from stoker_worker.memory.database import checksum
from stoker_worker.memory.replica.versions import version_name
from stoker_worker.ports import LastVersion

LONG = ids(2000)
Start = Callable[..., Machine]


def forgotten(one: Machine, agent_id: str = "agent") -> None:
    """The agent had two turns, is forgotten, and everybody could know."""
    for n in (300, 600):
        one.agent(agent_id).say(LONG[:n])
    one.run("forget", agent_id)
    one.write_behind()


@pytest.mark.parametrize("n_turns", [0, 5])
def test_a_stale_machine_takes_no_number_of_an_agent_that_was_forgotten(machine: Start, n_turns: int) -> None:
    stale, other = machine("stale"), machine("other")
    stale.agent().say(LONG[:300])
    turn, first_turn = stale.agent().turn(LONG[:400]), stale.agent("new to it").turn(LONG[:400])
    forgotten(other, "new to it")
    for n in range(n_turns):
        other.agent().say(LONG[: 310 + n])
    other.run("forget")
    other.write_behind()
    for late in (turn, first_turn):
        with pytest.raises(VersionTaken):
            stale.store.save(late)
    for one in (stale, other):
        assert (one.agent().open().number, one.agent().open().transcript) == (n_turns + 2, None)


def test_a_stale_machine_takes_no_number_that_was_pruned(
    machine: Start, share: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, other = machine("stale"), machine("other")
    stale.agent().say(LONG[:100])
    turn = stale.agent().turn(LONG[:110])
    for n in range(2, 49):
        other.agent().say(LONG[: 100 + n])
    for path in files_below(share.objects / "agents")[:40]:
        then = time.time() - 2 * 86_400
        os.utime(path, (then, then))
    other.write_behind()
    assert not (share.objects / version_name("agent", 2)).exists()
    with pytest.raises(VersionTaken):
        stale.store.save(turn)
    for one in (stale, other, machine("third")):
        assert (one.agent().open().number, one.agent().tokens()) == (48, LONG[:148])


def test_versions_go_by_the_clock_of_the_shared_store(
    machine: Start, share: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    for n in range(1, 49):
        one.agent().say(LONG[: 100 + n])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 9 * 86_400)
    one.write_behind()
    assert len(files_below(share.objects / "agents")) == 48


def test_a_fork_under_the_id_of_an_agent_that_was_forgotten_goes_on_after_its_numbers(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    forgotten(one, "target")
    one.agent().say(LONG[:700])
    assert one.run("fork", target="target").model_dump()["version"] == 4
    one.write_behind()
    for each in (one, two):
        assert (each.agent("target").open().number, each.agent("target").tokens()) == (4, LONG[:700])
        assert each.agent("target").cached((*LONG[:700], 1)) == 700
        assert not problems_of(each.store)
    assert two.agent("target").say(LONG[:800]) == 5


def test_an_agent_that_was_removed_can_be_imported_again(machine: Start, tmp_path: Path) -> None:
    one, two = machine("one"), machine("two")
    for n in (300, 600):
        one.agent().say(LONG[:n])
    shell(tmp_path, "export", "agent", str(tmp_path / "file"))
    shell(tmp_path, "rm", "agent", "--yes")
    assert "at version 4" in shell(tmp_path, "import", str(tmp_path / "file"))
    one.write_behind()
    for each in (one, two):
        assert (each.agent().open().number, each.agent().tokens()) == (4, LONG[:600])
        assert not problems_of(each.store)
    assert two.agent().say(LONG[:700]) == 5


def test_the_shell_makes_no_agent_that_another_machine_has(machine: Start, tmp_path: Path, share: SharedFolder) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    two.agent("taken").say(LONG[:20])
    shell(tmp_path, "export", "agent", str(tmp_path / "file"))
    assert "AgentExists" in shell(tmp_path, "fork", "agent", "taken", is_refused=True)
    assert "AgentExists" in shell(tmp_path, "import", str(tmp_path / "file"), "--as", "taken", is_refused=True)
    share.go_away()
    assert "SharedStoreAway" in shell(tmp_path, "fork", "agent", "new", is_refused=True)
    share.come_back()
    shell(tmp_path, "fork", "agent", "new")
    one.write_behind()
    assert two.agent("new").tokens() == LONG[:300]
    assert two.agent("taken").tokens() == LONG[:20]


def shell(folder: Path, *words: str, is_refused: bool = False) -> str:
    """A command beside the worker of machine "one"."""
    done = CliRunner().invoke(main, ["memory", words[0], "--store", str(folder / "one"), *words[1:]])
    assert bool(done.exit_code) == is_refused, done.output
    return done.output


def test_a_version_that_a_mounted_folder_does_not_list_yet_is_found(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    assert two.agent().tokens() == LONG[:300]
    monkeypatch.setattr(two.bucket, "listed", lambda folder, **_: [])
    one.agent().say(LONG[:400])
    one.agent().say(LONG[:500])
    assert (two.agent().open().number, two.agent().tokens()) == (3, LONG[:500])
    three = machine("three")
    monkeypatch.setattr(three.bucket, "listed", lambda folder, **_: [])
    three.store.look("agent", LastVersion(2, "one", is_here=False))
    assert three.store.open_agent("agent").number == 3


def test_the_requests_of_a_turn(machine: Start, share: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an agent that stays: a put and a list; of one that moves by one turn: a list and a get as well."""
    one, two = machine("one"), machine("two")
    asked: Counter[str] = Counter()
    for m in (one, two):
        m.bucket.lags = False  # as a bucket
        for name in ("create", "get", "put", "find", "listed", "remove"):
            call = getattr(m.bucket, name)
            counting = lambda *args, _n=name, _c=call, **more: (asked.update([_n]), _c(*args, **more))[1]  # noqa: E731
            monkeypatch.setattr(m.bucket, name, counting)

    def turn(m: Machine, version: int, last: str) -> dict[str, int]:
        asked.clear()
        m.store.look("agent", LastVersion(version - 1, last, is_here=m is one))
        agent = AgentOf(m.store, jobs=count(900 + version))
        m.store.save(make_turn(agent, agent.open(), make_transcript(LONG[: 300 + 10 * version]), None))
        return dict(asked)

    one.agent().say(LONG[:300])
    two.agent().open()
    assert turn(one, 2, "one") == {"create": 1, "listed": 1}
    assert turn(two, 3, "one") == {"listed": 2, "get": 1, "create": 1}


def test_a_version_of_a_newer_stoker_is_an_error_by_name_until_the_upgrade(machine: Start, share: SharedFolder) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    (path,) = files_below(share.objects / "agents")
    ours = path.read_bytes()
    body = ours.partition(b"\n")[2].replace(b'"about":"{', b'"about":"{\\"new\\":1,')
    path.write_bytes(checksum(body).hex().encode() + b"\n" + body)
    with pytest.raises(AgentTranscriptUnreadable, match="its checksum does not match"):
        two.agent().open()
    two.store.close()
    path.write_bytes(ours)  # as the newer stoker reads it
    assert machine("two").agent().tokens() == LONG[:300]
