"""Damage on disk: a bad block costs time, never a wrong answer; a bad record is never a silently new conversation."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.memory.agents import (
    MODEL,
    SNAPSHOT_SPECS,
    Agent,
    files_below,
    ids,
    make_model,
    make_transcript,
    make_turn,
    open_store,
    reopen,
)

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.ports import AgentVersion, LoadedModel

LONG = ids(900)
NEXT = (*LONG[:700], 1, 2, 3)
"""The next prompt of an agent that stands at LONG[:700]: two blocks and a tail of 188 tokens."""


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """An agent at version 3, with LONG[:700] cached, and a neighbour with a conversation of the same shape."""
    store = open_store(tmp_path)
    neighbour, agent = Agent(store, "neighbour"), Agent(store)
    for length in (300, 690, 700):
        neighbour.say(ids(length, seed=9))
        agent.say(LONG[:length])
    return agent


def blocks_of(agent: Agent, tmp_path: Path) -> list[Path]:
    """The agent's two blocks, in order."""
    by_parent = {}
    for path in (tmp_path / "blocks").rglob("*.safetensors"):
        text = path.read_bytes().decode("latin-1")
        if ",".join(map(str, LONG[:256])) in text:
            by_parent[0] = path
        elif ",".join(map(str, LONG[256:512])) in text:
            by_parent[1] = path
    return [by_parent[0], by_parent[1]]


def folder_of(name: str, tmp_path: Path) -> Path:
    (path,) = {x.parent for x in tmp_path.glob("agents/*/*/*.json") if f'"{name}"' in x.read_text()}
    return path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte": lambda path: flip(path, 0),
    "header": lambda path: flip(path, 120),
    "data": lambda path: flip(path, -40),
    "last byte": lambda path: flip(path, -1),
    "cut short": truncate,
    "empty": empty,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("block", [0, 1])
def test_a_damaged_block_is_a_miss_from_there_and_is_written_anew(
    agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, block: int
) -> None:
    path = blocks_of(agent, tmp_path)[block]
    DAMAGES[damage](path)
    restored = agent.restore(NEXT)
    assert (restored.prefix.n_tokens if restored.prefix else 0) == 256 * block
    assert restored.miss_reason == "block_corrupt"
    assert restored.saved_blocks == block
    assert agent.store.misses == {"block_corrupt": 1}
    said = [record for record in caplog.records if record.name.startswith("stoker_worker.memory")]
    assert [(x.levelno, "block_corrupt" in x.getMessage()) for x in said] == [(logging.WARNING, True)]
    assert not path.exists()
    agent.say(NEXT)
    assert path.exists()
    assert agent.cached((*NEXT, 4)) == len(NEXT)
    assert agent.store.verify() == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tail_costs_only_the_tail(agent: Agent, tmp_path: Path, damage: str) -> None:
    (tail,) = folder_of("agent", tmp_path).glob("tail-*")
    DAMAGES[damage](tail)
    restored = agent.restore(NEXT)
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (512, "tail_corrupt")
    agent.say(NEXT)
    assert agent.cached((*NEXT, 4)) == len(NEXT)


def test_a_missing_piece_is_a_named_miss(agent: Agent, tmp_path: Path) -> None:
    (tail,) = folder_of("agent", tmp_path).glob("tail-*")
    for path, left, reason in (
        (tail, 512, "tail_missing"),
        (blocks_of(agent, tmp_path)[1], 256, "block_missing"),
        (blocks_of(agent, tmp_path)[0], 0, "block_missing"),
    ):
        path.unlink()
        assert agent.cached(NEXT) == left
        assert agent.restore(NEXT).miss_reason == reason
    shutil.rmtree(tmp_path / "blocks")
    assert agent.cached(NEXT) == 0
    agent.say(NEXT)
    assert agent.cached((*NEXT, 4)) == len(NEXT)


def test_a_block_that_the_agent_never_had_is_no_miss(agent: Agent) -> None:
    assert Agent(agent.store, "new").restore(ids(600, seed=3)).miss_reason is None
    assert agent.restore((*LONG[:700], *ids(600, seed=3))).miss_reason is None
    assert agent.store.misses == {}


def test_another_block_at_a_blocks_address_is_foreign_and_never_loaded(agent: Agent, tmp_path: Path) -> None:
    first, second = blocks_of(agent, tmp_path)
    shutil.copy(first, second)
    restored = agent.restore(NEXT)
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (256, "block_foreign")
    assert not second.exists()


def test_another_agents_tail_is_foreign_and_never_loaded(agent: Agent, tmp_path: Path) -> None:
    (ours,), (theirs,) = (folder_of(name, tmp_path).glob("tail-*") for name in ("agent", "neighbour"))
    shutil.copy(theirs, ours)
    restored = agent.restore(NEXT)
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (512, "tail_foreign")


def test_another_models_block_is_foreign_and_never_loaded(agent: Agent, tmp_path: Path) -> None:
    Agent(agent.store, "agent of b", model=make_model("b")).say(LONG[:256])
    (other,) = (tmp_path / "blocks" / make_model("b").fingerprint[:16]).rglob("*.safetensors")
    shutil.copy(other, blocks_of(agent, tmp_path)[0])
    assert agent.restore(NEXT).miss_reason == "block_foreign"
    assert agent.cached(NEXT) == 0


def test_an_unreadable_block_is_a_miss_and_not_an_error(agent: Agent, tmp_path: Path) -> None:
    path = blocks_of(agent, tmp_path)[1]
    path.unlink()
    path.mkdir()
    assert agent.restore(NEXT).miss_reason == "block_unreadable"


def test_the_agents_own_block_serves_when_the_prompts_is_damaged(agent: Agent, tmp_path: Path) -> None:
    prompt = (*LONG[:400], *ids(200, seed=4))
    Agent(agent.store, "other").say(prompt)
    known = set(blocks_of(agent, tmp_path))
    for path in set((tmp_path / "blocks").rglob("*.safetensors")) - known:
        truncate(path)
    restored = agent.restore(prompt)
    assert restored.prefix is not None
    assert (restored.prefix.n_tokens, restored.miss_reason) == (400, "block_corrupt")


# --- transcripts ---


def unreadable(agent: Agent, tmp_path: Path) -> tuple[str, AgentVersion]:
    """Reopen the store and expect `append` to be refused: the message, and what `full` may go on from."""
    agent.store = reopen(agent.store, tmp_path)
    with pytest.raises(AgentTranscriptUnreadable) as caught:
        agent.open()
    assert isinstance(caught.value.usable, AgentVersion)
    return str(caught.value), caught.value.usable


def expect_full_goes_on(agent: Agent, tmp_path: Path, usable: AgentVersion) -> None:
    """A turn that brings its whole conversation is saved above every version there was, and all is well again."""
    remembered = dict(usable.results)
    agent.say(LONG[:720], (5,), usable)
    agent.store = reopen(agent.store, tmp_path)
    version = agent.open()
    assert version.number == usable.number + 1
    assert version.transcript == make_transcript((*LONG[:720], 5))
    assert remembered.items() <= version.results.items()
    assert len(version.results) == len(remembered) + 1
    assert agent.store.verify() == []
    agent.say((*agent.tokens(), 1))
    agent.store = reopen(agent.store, tmp_path)
    assert agent.open().number == usable.number + 2


@pytest.mark.parametrize("position", [0, 7, 21, 42, 100, 500, -1])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_changed_byte_in_a_record_is_never_a_shorter_conversation(
    agent: Agent, tmp_path: Path, version: int, position: int
) -> None:
    flip(folder_of("agent", tmp_path) / f"{version:08d}.json", position)
    message, usable = unreadable(agent, tmp_path)
    assert f"record {version} is unusable" in message
    assert (usable.number, usable.transcript, len(usable.results)) == (3, None, 2)
    expect_full_goes_on(agent, tmp_path, usable)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("how", ["cut short", "removed", "another agent's", "another version's", "rewritten"])
def test_a_replaced_record_is_noticed(agent: Agent, tmp_path: Path, version: int, how: str) -> None:
    folder, name = folder_of("agent", tmp_path), f"{version:08d}.json"
    if how == "cut short":
        truncate(folder / name)
    elif how == "removed":
        (folder / name).unlink()
    elif how == "another agent's":
        shutil.copy(folder_of("neighbour", tmp_path) / name, folder / name)
    elif how == "another version's":
        shutil.copy(folder / f"{version % 3 + 1:08d}.json", folder / name)
    else:  # whole, the same agent's and version's, but of another history
        with_history = Agent(open_store(tmp_path / "elsewhere"))
        for length in (310, 680, 710):
            with_history.say(LONG[:length])
        shutil.copy(folder_of("agent", tmp_path / "elsewhere") / name, folder / name)
    message, usable = unreadable(agent, tmp_path)
    assert f"record {version} is" in message
    assert (usable.number, usable.transcript) == (3, None)
    expect_full_goes_on(agent, tmp_path, usable)


def test_a_changed_byte_anywhere_in_head_is_noticed(agent: Agent, tmp_path: Path) -> None:
    head = folder_of("agent", tmp_path) / "HEAD"
    whole = head.read_bytes()
    for position in range(len(whole)):
        flip(head, position)
        assert "HEAD is unusable" in unreadable(agent, tmp_path)[0]
        head.write_bytes(whole)
    assert agent.tokens() == LONG[:700]


@pytest.mark.parametrize("how", ["removed", "empty", "cut short", "another agent's", "an old one"])
def test_a_replaced_head_is_noticed(agent: Agent, tmp_path: Path, how: str) -> None:
    head = folder_of("agent", tmp_path) / "HEAD"
    if how == "removed":
        head.unlink()
    elif how == "empty":
        head.write_bytes(b"")
    elif how == "cut short":
        truncate(head)
    elif how == "another agent's":
        shutil.copy(folder_of("neighbour", tmp_path) / "HEAD", head)
    else:
        before = head.read_bytes()
        agent.say(LONG[:710])
        agent.say(LONG[:720])
        head.write_bytes(before)
    message, usable = unreadable(agent, tmp_path)
    assert "HEAD" in message or "not the one that was written" in message
    assert usable.transcript is None
    assert usable.number == (5 if how == "an old one" else 3)
    expect_full_goes_on(agent, tmp_path, usable)


def test_old_damage_below_a_full_replacement_is_forgotten(agent: Agent, tmp_path: Path) -> None:
    agent.say(ids(50, seed=5))
    store = agent.store
    store.save(make_turn(agent, 4, make_transcript((9, 9), text="raw"), None))
    flip(folder_of("agent", tmp_path) / "00000002.json", 99)
    agent.store = reopen(store, tmp_path)
    assert agent.tokens() == (9, 9)
    assert len(agent.open().results) == 4


def test_verify_lists_every_damaged_file(agent: Agent, tmp_path: Path) -> None:
    assert agent.store.verify() == []
    block, other = blocks_of(agent, tmp_path)
    flip(block, -1)
    shutil.copy(next(x for x in (tmp_path / "blocks").rglob("*.safetensors") if x not in (block, other)), other)
    (tail,) = folder_of("agent", tmp_path).glob("tail-*")
    truncate(tail)
    record = folder_of("neighbour", tmp_path) / "00000002.json"
    record.unlink()
    problems = agent.store.verify()
    assert len(problems) == 4
    for path in (block, other, tail, record.parent):
        assert any(problem.startswith(f"{path}: ") for problem in problems)


@pytest.mark.parametrize("model", [MODEL, make_model("h", spec=SNAPSHOT_SPECS["hybrid"])], ids=["full", "hybrid"])
def test_verify_lists_an_intact_file_of_another_agent(tmp_path: Path, model: LoadedModel) -> None:
    store = open_store(tmp_path)
    ours, theirs = Agent(store, "ours", model), Agent(store, "theirs", model)
    ours.say(LONG[:700], (1, 2))
    theirs.say(ids(700, seed=9), (1, 2))
    pieces = sorted(folder_of("ours", tmp_path).glob("*.safetensors"))
    assert len(pieces) == (3 if model.spec.snapshot_layers else 1)
    for path in pieces:
        shutil.copy(folder_of("theirs", tmp_path) / path.name, path)
    assert store.verify() == [f"{path}: it is another agent's or version's" for path in pieces]
    ours.say((*LONG[:702], 3))
    assert store.verify() == []


# --- turns that were not saved ---


def test_after_an_unsaved_turn_append_is_refused_and_full_continues(agent: Agent, tmp_path: Path) -> None:
    agent.store.mark_unsaved("agent")
    for _ in range(2):  # in memory, and then from disk
        with pytest.raises(AgentTranscriptUnreadable, match="last turn was not saved") as caught:
            agent.open()
        usable = caught.value.usable
        assert (usable.number, usable.transcript, len(usable.results)) == (3, make_transcript(LONG[:700]), 3)
        assert agent.restore(NEXT, usable).prefix is not None
        agent.store = reopen(agent.store, tmp_path)
    expect_full_goes_on(agent, tmp_path, usable)


def test_a_new_agents_unsaved_turn_is_remembered_across_a_restart(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path), "new")
    agent.store.mark_unsaved("new")
    message, usable = unreadable(agent, tmp_path)
    assert "not saved" in message
    assert (usable.number, usable.transcript) == (0, None)
    expect_full_goes_on(agent, tmp_path, usable)


def test_full_continues_after_an_unsaved_turn_on_a_damaged_agent(agent: Agent, tmp_path: Path) -> None:
    flip(folder_of("agent", tmp_path) / "00000003.json", 99)
    agent.store = reopen(agent.store, tmp_path)
    agent.store.mark_unsaved("agent")
    agent.store.mark_unsaved("agent")
    _, usable = unreadable(agent, tmp_path)
    assert (usable.number, usable.transcript, len(usable.results)) == (3, None, 2)
    expect_full_goes_on(agent, tmp_path, usable)


def test_the_mark_does_not_touch_other_agents(agent: Agent) -> None:
    agent.store.mark_unsaved("agent")
    assert agent.store.open_agent("neighbour").number == 3


def test_no_message_quotes_the_conversation(agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = make_transcript((1,), text="my secret prompt")
    agent.store.save(make_turn(agent, 3, secret, None))
    for path in files_below(folder_of("agent", tmp_path)):
        flip(path, 60)
    message, _ = unreadable(agent, tmp_path)
    assert "secret" not in message + caplog.text
