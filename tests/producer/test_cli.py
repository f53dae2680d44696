"""The `stoker` command: its output on stdout and stderr, and its exit codes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import click
import pytest

from stoker import connection
from stoker.cli import cli
from stoker.serve.store import ResponseStore

pytestmark = pytest.mark.server


def test_the_text_alone_is_on_stdout_and_json_is_one_object(stoker, worker):
    submitted = json.loads(stoker("submit", "--agent", "a", "--prompt", "hi", "--queue", "q", "--json")[1])
    job_id, warning = submitted["job_id"], "no worker listens to 'q', nor to any queue"
    assert submitted["warning"] == warning
    assert json.loads(stoker("status", job_id, "--json")[1]) == {
        "job_id": job_id, "state": "queued", "position": 0, "worker": None,
        "stage": None, "tokens": None, "tokens_per_s": None, "warning": warning,
    }  # fmt: skip
    worker.finish(job_id)
    code, out, err = stoker("result", job_id, "--timeout-s", "5")
    assert (code, out) == (0, "hello\n")
    assert "2 tokens" in err
    assert "4 of 10 prompt tokens" in err
    code, out, err = stoker("result", job_id, "--json")
    assert (code, err, json.loads(out)["text"]) == (0, "", "hello")
    assert json.loads(stoker("cancel", job_id, "--json")[1]) == {"job_id": job_id, "canceled": False}
    assert stoker("submit", "--message", "m", "--stream", "--json")[0] == 2


def test_a_job_that_failed_or_was_canceled_is_exit_code_1_with_one_line_or_one_object(stoker, worker):
    job_id = stoker("submit", "--agent", "a", "--prompt", "hi")[1].strip()
    worker.fail(job_id, "GenerationTimedOut: after 5 s", partial="so far")
    message = f"job {job_id}: failed: GenerationTimedOut: after 5 s"
    assert stoker("result", job_id) == (1, "", f"JobFailed: {message}\n")
    code, out, err = stoker("result", job_id, "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["error"] == {
        "type": "JobFailed", "message": message, "job_id": job_id, "kind": "GenerationTimedOut",
        "reason": "GenerationTimedOut: after 5 s", "retryable": False, "partial_text": "so far",
    }  # fmt: skip
    canceled = stoker("submit", "--agent", "a", "--prompt", "hi")[1].strip()
    for command in ("cancel", "status"):
        assert stoker(command, canceled)[:2] == (0, "canceled\n")
    code, _, err = stoker("result", canceled)
    assert (code, err.partition(":")[0]) == (1, "JobCanceled")


def test_a_job_that_does_not_end_in_time_keeps_its_id_in_view(stoker):
    wait = ("submit", "--agent", "a", "--prompt", "hi", "--wait", "--timeout-s", "0")
    code, out, err = stoker(*wait)
    assert (code, out, err[:4]) == (1, "", "job ")
    code, out, _ = stoker(*wait, "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"], bool(error["job_id"])) == (1, "ResultTimeout", True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "--agent", "a", "--prompt", "hi", "--prompt-file", "-"],
        ["submit", "--agent", "a", "--prompt", "hi", "--max-tokens", "many"],
        ["submit", "--agent", "a", "--prompt", "hi", "--max-tokens", "0"],
        ["submit", "--agent", "a", "--prompt", ""],
        ["submit", "--agent", "a", "--prompt", "hi", "--timeout-s", "3"],
        ["submit", "--agent", "a", "--prompt-file", "/does/not/exist"],
        ["submit", "--agent", "a", "--messages-file", "-"],
        ["submit", "--agent", "a", "--prompt", "hi", "--queue", "a,b"],
        ["--redis", "http://:hunter2@h", "status", "x"],
        ["status", ""],
        ["no-such-command"],
    ],
)
def test_a_wrong_command_is_exit_code_2_on_stderr_or_as_one_object(stoker, arguments):
    code, out, err = stoker(*arguments, stdin=b"{not json")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    code, out, err = stoker(*arguments, "--json", stdin=b"{not json")
    assert (code, err) == (2, "")
    assert set(json.loads(out)["error"]) == {"type", "message"}
    assert "hunter2" not in out


def test_no_server_is_exit_code_1_and_one_line_without_the_password(stoker, monkeypatch):
    monkeypatch.setattr(connection, "_RETRIES", 1)  # each retry takes a while
    for command in (["status", "x"], ["submit", "--message", "hi"]):
        code, out, err = stoker("--redis", "redis://:hunter2@127.0.0.1:1", *command)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("RedisUnavailable: no Redis server answers at 127.0.0.1:1")
        assert "hunter2" not in err


def test_an_error_that_nobody_reads_any_more_is_no_traceback(redis_url):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from stoker.cli import main; main()", "--redis", redis_url]
    ran = subprocess.run([*command, "result", "j", "--json"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, b"")


WITHOUT_HOME = """
from pathlib import Path

def home():
    raise RuntimeError("Could not determine home directory.")

Path.home = home
from stoker.cli import main
main()
"""


@pytest.mark.parametrize(("command", "code", "said"), [("--version", 0, b""), ("serve", 2, b"give --batch-store\n")])
def test_a_user_without_a_home_folder_can_use_every_command_but_has_to_name_the_servers(command, code, said):
    ran = subprocess.run([sys.executable, "-c", WITHOUT_HOME, command], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr.endswith(said)) == (code, True)


def test_a_server_that_other_machines_can_reach_needs_tokens(stoker):
    code, _, err = stoker("serve", "--bind", "0.0.0.0", "--port", "0")
    assert (code, "can be reached from other machines: give --token-file" in err) == (2, True)


def test_a_server_that_cannot_start_is_exit_code_1(stoker, tmp_path, monkeypatch):
    def unreadable(store):
        raise OSError("the disk failed")

    monkeypatch.setattr(ResponseStore, "unanswered", unreadable)
    monkeypatch.setattr(signal, "signal", lambda *handler: None)  # this process keeps its own
    code, _, err = stoker("serve", "--port", "0", "--batch-store", str(tmp_path))
    assert (code, err.splitlines()[-1]) == (1, "StokerError: the server could not start; the log has the reason")


def test_a_misspelt_variable_is_refused_but_help_is_not(stoker, monkeypatch):
    monkeypatch.setenv("STOKER_MAX_BATCH", "4")  # a variable of the worker
    assert stoker("status")[0] == 0
    monkeypatch.setenv("STOKER_REDIS_ULR", "redis://elsewhere")
    code, out, err = stoker("submit", "--message", "hi")
    assert (code, out) == (2, "")
    assert "STOKER_REDIS_ULR (did you mean STOKER_REDIS_URL?)" in err
    assert "STOKER_REDIS_ULR" in json.loads(stoker("status", "--json")[1])["error"]["message"]
    assert stoker("submit", "--help")[0] == 0


def test_a_misspelt_command_or_option_is_answered_with_the_nearest(stoker):
    assert "'status'" in stoker("statsu", "x")[2]
    assert "--max-tokens" in stoker("submit", "--max-token", "3")[2]


def commands(group, *path):
    for name, command in group.commands.items():
        yield pytest.param(command, id=" ".join((*path, name)))
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


@pytest.mark.parametrize("command", list(commands(cli)))
def test_every_command_has_help_with_examples_that_parse(command, tmp_path, monkeypatch):
    assert command.help
    for name in ("request.json", "animal.json", "IN.jsonl", "OUT.jsonl", "prompts.txt"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for each in (command, *getattr(command, "commands", {}).values()):
        monkeypatch.setattr(each, "callback", lambda *arguments, **options: None)
    examples = re.findall(r"\bstoker (.*?)(?: \||$)", command.epilog or "", re.MULTILINE)
    assert examples
    for example in examples:
        cli.main(shlex.split(example, comments=True), standalone_mode=False)


@pytest.mark.parametrize("command", ["cancel j", "status j", "result j", "trust ls", "batch ls", "batch status b"])
def test_a_key_of_another_type_is_no_server_that_is_away(stoker, server, command):
    for key in ("rq:job:j", "stoker:trust", "stoker:batch::all", "stoker:batch:b"):
        server.set(key, "something else")
    code, out, err = stoker(*command.split())
    assert (code, out) == (1, "")
    assert re.match(r"WrongKeyType: a key at [\w.:/-]+ is of another type than stoker's: .*WRONGTYPE ", err)
