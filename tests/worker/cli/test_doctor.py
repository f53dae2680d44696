"""`stoker-worker doctor`: what it prints and writes, and its exit code."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from stoker_worker import doctor as checks
from stoker_worker.cli.main import main
from stoker_worker.doctor import Finding, ok
from stoker_worker.settings import WorkerSettings

AWAY = "redis://user:geheim@127.0.0.1:1"


def doctor(*options: str) -> tuple[int, str]:
    run = CliRunner().invoke(main, ["doctor", *options])
    return run.exit_code, run.output


@pytest.mark.mlx
def test_what_fails_is_reported_with_advice_and_by_the_exit_code(tmp_path: Path, redis_url: str) -> None:
    code, text = doctor("--redis", AWAY, "--store", str(tmp_path / "store"))
    assert code == 1
    (n_line,) = (n for n, line in enumerate(text.splitlines()) if line.startswith("fail"))
    assert text.splitlines()[n_line + 1].strip().startswith("-> start a server")
    assert "geheim" not in text
    code, text = doctor("--redis", redis_url, "--store", str(tmp_path / "store"))
    assert (code, "0 failed" in text) == (0, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.mlx
def test_json_has_what_is_printed_and_no_password(tmp_path: Path) -> None:
    code, text = doctor("--redis", AWAY, "--store", str(tmp_path / "store"), "--model", "/no/model", "--json")
    assert code == 1
    by_name = {check["name"]: check["status"] for check in json.loads(text)["checks"]}
    assert (by_name["redis"], by_name["model"], by_name["python"]) == ("fail", "fail", "ok")
    assert "model memory" not in by_name
    assert "geheim" not in text


def test_a_doctor_that_is_terminated_leaves_nothing_but_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(settings: WorkerSettings) -> Iterator[tuple[str, Finding]]:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            yield "first", ok("seen")
            os.kill(os.getpid(), signal.SIGTERM)
            yield "second", ok("never seen")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(checks, "examine", terminated)
    code, text = doctor()
    assert (code, [*tmp_path.iterdir()]) == (128 + signal.SIGTERM, [])
    assert "first" in text
    assert "second" not in text
    assert signal.getsignal(signal.SIGTERM) == before
