"""`stoker-worker run` that is refused: what it leaves behind."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such/model"], "ModelNotLoadable: there is no model folder"),
        (["--model", "./model.gguf"], "model.gguf is a GGUF file: run `stoker-worker model import"),
        (["--model", ".", "--adapter", "/no/such"], "ModelNotLoadable"),
        (["--engine", "scripted", "--store", "/proc/store"], "StoreUnusable: the folder /proc/store/redis cannot be"),
    ],
)
def test_a_wrong_path_is_named_before_anything_is_started(tmp_path: Path, options: list[str], message: str) -> None:
    command = (sys.executable, "-m", "stoker_worker", "run", "--redis", "embedded", "--store", tmp_path / "store")
    run = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert message in run.stderr.splitlines()[-1]
    assert not (tmp_path / "store").exists()
