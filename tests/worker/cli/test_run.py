"""`stoker-worker run` that is refused or deposed: what it leaves behind, and how it ends."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.worker.memory.agents import using

from stoker_shared.errors import QueueHeld, StoreUnusable
from stoker_worker.cli import main
from stoker_worker.settings import read_settings

REFUSED = [
    (["--model", "/no/such/model"], "ModelNotLoadable: there is no model folder"),
    (["--model", "./model.gguf"], "model.gguf is a GGUF file: run `stoker-worker model import"),
    (["--model", ".", "--adapter", "/no/such"], "ModelNotLoadable"),
    (["--engine", "scripted", "--store", "/proc/store"], "StoreUnusable: the store folder /proc/store cannot be"),
]

ONE_AFTER_ANOTHER = """
import json, sys
from stoker_worker.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as left:
        print("left", left.code, file=sys.stderr)
"""


def test_a_wrong_path_is_named_before_anything_is_started(tmp_path: Path) -> None:
    common = ["run", "--redis", "embedded", "--store", str(tmp_path / "store")]
    commands = json.dumps([[*common, *options] for options, _ in REFUSED])
    run = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, commands], capture_output=True, text=True, check=False, timeout=60
    )
    *messages, rest = run.stderr.split("left 1\n")
    assert rest == ""
    for (_, named), printed in zip(REFUSED, messages, strict=True):
        assert named in printed.splitlines()[-1]
    assert not (tmp_path / "store").exists()


def test_a_damaged_page_of_the_agents_is_named_with_the_way_on(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with using(folder) as agent:
        agent("a").say((1, 2, 3))
    with closing(sqlite3.connect(folder / "agents.db")) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'agents'").fetchone()
    with open(folder / "agents.db", "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff")
    settings = read_settings({"store": folder})
    with closing(main._agents(settings)) as agents, pytest.raises(StoreUnusable, match="memory salvage"):
        main._own_store(settings, agents)


class Exited(BaseException):
    """The process has ended."""


class DeposedWhileItLoads:
    """A worker whose engine thread still loads the model when another worker has taken its lease."""

    state = None

    def __init__(self, *parts: object) -> None:
        pass

    def request_stop(self) -> None:
        pass

    def install_signal_handlers(self) -> None:
        pass

    def run(self) -> None:
        raise QueueHeld("another worker has taken over the queue")

    def is_still_loading(self) -> bool:
        return True


def test_a_worker_deposed_while_its_model_loads_ends_at_once_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own exit would wait for a download of hours, and no service would start the worker again meanwhile."""

    def leave(code: int) -> None:
        raise Exited(code)

    parts = SimpleNamespace(rq_queue=None, depths=SimpleNamespace(read=None), registration=SimpleNamespace())
    monkeypatch.setattr("stoker_worker.queue.rq_queue.open_queue", lambda *args, **options: nullcontext(parts))
    monkeypatch.setattr("stoker_worker.pipeline.worker.Worker", DeposedWhileItLoads)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr("os._exit", leave)
    settings = read_settings({"engine": "scripted", "store": tmp_path / "store"})
    with pytest.raises(Exited) as left:
        main._run(settings)
    assert left.value.args == (1,)
