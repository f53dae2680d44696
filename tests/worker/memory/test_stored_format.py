"""A store and a shared store as the current format was when they were stored: later code opens and reads them.

``python -m tests.worker.memory.test_stored_format FILE`` makes such a sample, for a new format beside the old one.
"""

import json
import shutil
import sys
import tarfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from tests.worker.memory.agents import (
    SNAPSHOT_SPECS,
    Agent,
    AgentOf,
    FastDisk,
    ids,
    make_model,
    make_turn,
    open_store,
    problems_of,
)

from stoker_shared.message import Message
from stoker_worker.cli.memory_commands import memory
from stoker_worker.memory.agent_changes import fork_agent, roll_back
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Delivery, Transcript
from stoker_worker.ports.memory import OwnMessage

SAMPLE: Final = Path(__file__).parent / "stored" / "format-9.tar.xz"

MODEL = make_model("hybrid", spec=replace(SNAPSHOT_SPECS["hybrid"], dtype="float32", store_dtype="q8"))
CHAT = (
    Message(role="user", content="Which one? ☃"),
    OwnMessage(
        role="assistant",
        content="This one.",
        reasoning_content="Hm.",
        generated="Hm.</think>This one.",
        opened="<think>",
        tool_calls=({"type": "function", "function": {"name": "look", "arguments": {"at": "☃"}}},),
    ),
    Message(role="tool", content="seen", tool_call_id="0"),
)
TEXTS = ["said " * n for n in range(1, 21)]
FIRST = Delivery("job-1", "2024-01-01T00:00:00Z")


def make(folder: Path) -> None:
    """``store``, and ``shared``, which another machine has filled."""
    with closing(open_store(folder / "store")) as store:
        agent = Agent(store, "cached", MODEL, "salt")
        agent.say(ids(300), ids(20, seed=1))
        agent.say(ids(600))
        talked = Agent(store, "talked")
        for length in (1, 3):
            transcript = Transcript(ids(length), "tok", CHAT[:length], None, "eos")
            store.save(make_turn(talked, talked.open(), transcript, None))
        written = Agent(store, "written")
        for n, text in enumerate(TEXTS):
            store.save(make_turn(written, written.open(), Transcript(ids(n + 1), "tok", None, text, "stop"), None))
        roll_back(store.parts, "written", 18)
        fork_agent(store.parts, "cached", "forked")
        Agent(store, "unsaved").say(ids(3))
        store.mark_unsaved("unsaved")
    (folder / "shared").mkdir()
    bucket = Bucket(f"file://{folder.absolute()}/shared")
    with closing(AgentCacheStore(folder / "other", files=FastDisk(), shared=bucket)) as other:
        shared = AgentOf(other, "shared", MODEL)
        shared.say(ids(300))
        shared.say(ids(400))
        assert other._behind is not None
        while other._behind.write_next():
            pass
    shutil.rmtree(folder / "other")


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    with tarfile.open(SAMPLE) as stored:
        stored.extraction_filter = getattr(tarfile, "data_filter", None)  # 3.11.3 and older have none
        stored.extractall(tmp_path)
    return tmp_path


def shown(folder: Path, *command: str) -> Any:
    ran = CliRunner().invoke(memory, [*command, "--json", "--store", str(folder / "store")])
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.output)


def test_a_stored_store_is_listed_and_shown(sample: Path) -> None:
    states = {agent["agent_id"]: (agent["version"], agent["state"]) for agent in shown(sample, "ls")}
    assert states == {
        "cached": (2, "ok"),
        "talked": (2, "ok"),
        "written": (21, "ok"),
        "forked": (1, "ok"),
        "unsaved": (1, "unsaved"),
    }
    assert shown(sample, "show", "--text", "written")["text"] == TEXTS[17]
    assert [version["made_by"] for version in shown(sample, "show", "written")["versions"][-2:]] == ["turn", "rollback"]
    assert shown(sample, "verify") == {"problems": []}


def test_a_stored_store_is_worked_with(sample: Path) -> None:
    with closing(open_store(sample / "store")) as store:
        assert Agent(store, "cached", MODEL, "salt").cached((*ids(600), 1)) == 600
        assert Agent(store, "forked", MODEL, "salt").cached((*ids(600), 1)) == 600
        transcript = Agent(store, "talked").open().transcript
        assert transcript is not None
        assert transcript.messages == CHAT
        assert [type(message) for message in transcript.messages] == [Message, OwnMessage, Message]
        assert store.answer("talked", FIRST) == {"job_id": "job-1", "version": 1}
        for name in ("cached", "written"):
            Agent(store, name, MODEL, "salt").say(ids(700))
        assert problems_of(store) == []


def test_a_stored_shared_store_is_worked_with(sample: Path) -> None:
    pytest.importorskip("obstore")
    bucket = Bucket(f"file://{sample}/shared")
    with closing(AgentCacheStore(sample / "another", files=FastDisk(), shared=bucket)) as store:
        agent = AgentOf(store, "shared", MODEL)
        assert store.look("shared")
        assert agent.tokens() == ids(400)
        assert agent.cached((*ids(400), 1)) == 400
        assert store.answer("shared", FIRST) == {"job_id": "job-1", "version": 1}
        assert agent.say(ids(500)) == 3


def _of_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid, info.gid, info.uname, info.gname = 0, 0, "", ""
    return info


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    draft = target.with_name(f"{target.name}.draft")
    draft.mkdir()
    make(draft)
    (draft / "store" / "lock").unlink()  # it names this machine
    with tarfile.open(target, "w:xz") as packed:
        for name in ("store", "shared"):
            packed.add(draft / name, name, filter=_of_nobody)
    shutil.rmtree(draft)
