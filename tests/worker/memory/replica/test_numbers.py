"""No number of a version is used twice, and none is skipped over in silence: whoever slept, whatever the clocks say."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.worker.memory.agents import files_below, ids, problems_of
from tests.worker.memory.replica.sharing import Machine, SharedFolder

from stoker_shared.agent_request import build_agent_request
from stoker_shared.agent_result import AgentResult
from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.cli.main import main
from stoker_worker.memory.checksum import checksum
from stoker_worker.memory.replica import known_versions
from stoker_worker.memory.replica.objects import version_name
from stoker_worker.ports import AgentHome, Delivery

LONG = ids(2000)
Start = Callable[..., Machine]


def run(one: Machine, action: str, agent_id: str = "agent", **fields: object) -> AgentResult:
    request = build_agent_request({"action": action, "agent_id": agent_id, **fields})
    return one.store.agent_jobs.run(request, Delivery(f"{action}-{agent_id}-{time.monotonic()}", "now"))


def moved(*machines: Machine, version: int = 0) -> None:
    for one in machines:
        one.store.know_homes(lambda agent_id: AgentHome("elsewhere", version, "elsewhere" if version else "-"))


def forgotten(one: Machine, agent_id: str = "agent") -> None:
    """The agent had two turns, is forgotten, and everybody could know."""
    for n in (300, 600):
        one.agent(agent_id).say(LONG[:n])
    run(one, "forget", agent_id)
    one.write_through()


@pytest.mark.parametrize("n_turns", [0, 1, 5])
def test_a_stale_machine_takes_no_number_of_an_agent_that_was_forgotten(machine: Start, n_turns: int) -> None:
    stale, other = machine("stale"), machine("other")
    stale.agent().say(LONG[:300])
    turn = stale.agent().turn(LONG[:400])
    for n in range(n_turns):
        other.agent().say(LONG[: 310 + n])
    run(other, "forget")
    other.write_through()
    with pytest.raises(AgentVersionConflict):
        stale.store.save(turn)
    moved(stale, other)
    for one in (stale, other):
        assert (one.agent().open().number, one.agent().open().transcript) == (n_turns + 2, None)


def test_a_stale_machine_takes_no_number_of_an_agent_that_was_new_to_it(machine: Start, share: SharedFolder) -> None:
    stale, other = machine("stale"), machine("other")
    turn = stale.agent().turn(LONG[:400])
    forgotten(other)
    with pytest.raises(AgentVersionConflict):
        stale.store.save(turn)
    assert [path.name for path in files_below(share.objects / "agents")] == ["000000000003.json"]  # nothing is left


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
    other.write_through()
    assert not (share.objects / version_name("agent", 2)).exists()
    with pytest.raises(AgentVersionConflict):
        stale.store.save(turn)
    assert (stale.agent().open().number, stale.agent().tokens()) == (48, LONG[:148])
    assert not (share.objects / version_name("agent", 2)).exists()


def test_versions_go_by_the_clock_of_the_shared_store(
    machine: Start, share: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    for n in range(1, 49):
        one.agent().say(LONG[: 100 + n])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 9 * 86_400)
    one.write_through()
    assert len(files_below(share.objects / "agents")) == 48


def test_a_machine_that_slept_asks_before_it_continues(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, other = machine("asleep"), machine("other")
    asleep.agent().say(LONG[:300])
    other.agent().say(LONG[:400])
    assert asleep.agent().tokens() == LONG[:300]  # it believes to be the agent's home
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + known_versions.RECENTLY_S)
    assert asleep.agent().say(LONG[:500]) == 3


def test_a_fork_under_the_id_of_an_agent_that_was_forgotten_goes_on_after_its_numbers(machine: Start) -> None:
    one, two = machine("one"), machine("two")
    forgotten(one, "target")
    one.agent().say(LONG[:700])
    assert run(one, "fork", target="target").model_dump()["version"] == 4
    one.write_through()
    moved(one, two)
    for each in (one, two):
        assert (each.agent("target").open().number, each.agent("target").tokens()) == (4, LONG[:700])
        assert each.agent("target").cached((*LONG[:700], 1)) == 700
        assert not problems_of(each.store.local)
    assert two.agent("target").say(LONG[:800]) == 5


@pytest.mark.parametrize("is_told", [True, False])
def test_an_agent_that_was_removed_can_be_imported_again(machine: Start, tmp_path: Path, is_told: bool) -> None:
    one, two = machine("one"), machine("two")
    for n in (300, 600):
        one.agent().say(LONG[:n])
    shell(tmp_path, "export", "agent", str(tmp_path / "file"), "--with-blocks")
    shell(tmp_path, "rm", "agent", "--yes")
    if is_told:  # the shared store knows that it was removed
        one.write_through()
    assert "at version 5" in shell(tmp_path, "import", str(tmp_path / "file"), "--with-blocks")
    one.write_through()
    moved(one, two)
    for each in (one, two):
        assert (each.agent().open().number, each.agent().tokens()) == (5, LONG[:600])
        assert each.agent().cached((*LONG[:600], 1)) == 600
        assert not problems_of(each.store.local)
    assert two.agent().say(LONG[:700]) == 6


def test_the_shell_makes_no_agent_that_another_machine_has(machine: Start, tmp_path: Path, share: SharedFolder) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    two.agent("taken").say(LONG[:20])
    shell(tmp_path, "export", "agent", str(tmp_path / "file"))
    assert "AgentExists" in shell(tmp_path, "fork", "agent", "taken", is_refused=True)
    assert "AgentExists" in shell(tmp_path, "import", str(tmp_path / "file"), "--as", "taken", is_refused=True)
    share.go_away()
    assert "BucketAway" in shell(tmp_path, "fork", "agent", "new", is_refused=True)
    share.come_back()
    shell(tmp_path, "fork", "agent", "new")
    one.write_through()
    assert two.agent("new").tokens() == LONG[:300]
    assert two.agent("taken").tokens() == LONG[:20]


def shell(folder: Path, *words: str, is_refused: bool = False) -> str:
    """A command beside the worker of machine "one"."""
    done = CliRunner().invoke(main, ["memory", words[0], "--store", str(folder / "one"), *words[1:]])
    assert bool(done.exit_code) == is_refused, done.output
    return done.output


@pytest.mark.parametrize("action", ["fork", "rollback", "forget"])
def test_jobs_about_an_agent_know_which_turns_are_lost(machine: Start, share: SharedFolder, action: str) -> None:
    one, two = machine("one"), machine("two")
    for n in (300, 310):
        one.agent().say(LONG[:n])
    share.go_away()
    for n in (320, 330):
        one.agent().say(LONG[:n])
    share.come_back()  # and machine one does not
    moved(two, version=4)
    if action == "forget":
        assert run(two, "forget").model_dump()["version"] == 4
        assert (two.agent().open().number, two.agent().tokens()) == (5, ())
        return
    with pytest.raises(AgentTranscriptUnreadable, match=r"version [34]"):
        run(two, action, **({"target": "fork"} if action == "fork" else {}))
    back = run(two, "rollback", version=2).model_dump()
    assert (back["version"], back["from_version"]) == (5, 4)
    assert (two.agent().open().number, two.agent().tokens()) == (5, LONG[:310])


def test_a_forget_that_another_turn_came_before_has_not_happened(machine: Start) -> None:
    stale, other = machine("stale"), machine("other")
    stale.agent().say(LONG[:300])
    other.agent().say(LONG[:400])
    request, delivery = build_agent_request({"action": "forget", "agent_id": "agent"}), Delivery("forget", "now")
    with pytest.raises(AgentVersionConflict):
        stale.store.agent_jobs.run(request, delivery)
    assert stale.store.agent_jobs.answer(request, delivery) is None
    assert (stale.agent().open().number, stale.agent().tokens()) == (2, LONG[:400])


def test_a_version_that_a_mounted_folder_does_not_list_yet_is_found(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    one.agent().say(LONG[:300])
    assert two.agent().tokens() == LONG[:300]
    before = two.bucket.listed
    listed = {folder: before(folder) for folder in [version_name("agent", 1).rpartition("/")[0]]}
    monkeypatch.setattr(two.bucket, "listed", lambda folder, *limit: listed.get(folder) or before(folder))
    one.agent().say(LONG[:400])
    moved(two, version=2)
    assert (two.agent().open().number, two.agent().tokens()) == (2, LONG[:400])


def test_a_turn_costs_two_requests_before_its_job_is_finished(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one")
    one.agent().say(LONG[:300])
    asked: Counter[str] = Counter()
    for name in ("create", "get", "put", "has", "listed", "remove"):
        call = getattr(one.bucket, name)
        monkeypatch.setattr(one.bucket, name, lambda *args, _n=name, _c=call: (asked.update([_n]), _c(*args))[1])
    one.agent().say(LONG[:400])
    assert asked == {"create": 1, "listed": 1}
    one.write_through()
    assert sum(asked.values()) <= 9


def test_what_the_shell_has_changed_is_only_here_until_it_is_written_through(machine: Start, tmp_path: Path) -> None:
    one = machine("one")
    for n in (300, 600):
        one.agent().say(LONG[:n])
    one.write_through()
    assert not one.store.is_only_here("agent")
    shell(tmp_path, "rollback", "agent")
    assert one.store.is_only_here("agent")
    one.write_through()
    assert not one.store.is_only_here("agent")


def test_a_copied_store_gives_way_where_it_is_behind(machine: Start, tmp_path: Path) -> None:
    one = machine("one")
    for name in ("a", "b"):
        one.agent(name).say(LONG[:300])
    one.store.close()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    one, copy = machine("one"), machine("copy")
    one.agent("a").say(LONG[:400])
    turn = copy.agent("b").turn(LONG[:500])
    one.agent("b").say(LONG[:400])
    with pytest.raises(AgentVersionConflict):
        copy.store.save(turn)
    for each in (one, copy):
        for name in ("a", "b"):
            assert (each.agent(name).open().number, each.agent(name).tokens()) == (2, LONG[:400])
        each.write_through()
        assert not problems_of(each.store.local)


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
