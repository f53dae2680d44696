"""The `stoker` command: what it prints where, and its exit codes."""

import io
import json

import pytest
from redis import Redis
from tests.producer.played_worker import PlayedWorker

from stoker.cli import main

pytestmark = pytest.mark.server


@pytest.fixture
def stoker(redis_url, capsys, monkeypatch):
    """Run the command; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("STOKER_REDIS_URL", redis_url)

    def run(*arguments, stdin=None):
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return run


@pytest.fixture
def worker(redis_url):
    with Redis.from_url(redis_url) as connection:
        yield PlayedWorker(connection)


def submitted_request(worker, job_id):
    return worker.job(job_id).kwargs["request"]


def test_submit_prints_the_id_and_nothing_else(stoker, worker):
    code, out, err = stoker("submit", "--agent", "a", "--prompt", "hi", "--seed", "4", "--stop", "x", "--stop", "y")
    assert (code, err) == (0, "")
    request = {"v": 1, "agent_id": "a", "prompt": "hi", "seed": 4, "stop": ["x", "y"]}
    assert submitted_request(worker, out.strip()) == request


def test_submit_with_an_id_of_ones_own_makes_no_second_job(stoker, worker):
    for _ in range(2):
        assert stoker("submit", "--agent", "a", "--prompt", "hi", "--job-id", "mine") == (0, "mine\n", "")
    worker.finish("mine")
    assert stoker("submit", "--agent", "a", "--prompt", "hi", "--job-id", "mine", "--wait")[:2] == (0, "hello\n")
    code, out, err = stoker("submit", "--agent", "a", "--prompt", "other", "--job-id", "mine")
    assert (code, out) == (2, "")
    assert err.startswith("DuplicateJob: job_id: 'mine'")


def test_result_prints_the_text_and_keeps_the_numbers_off_stdout(stoker, worker):
    _, job_id, _ = stoker("submit", "--agent", "a", "--prompt", "hi", "--queue", "q")
    worker.finish(job_id.strip(), text="hello")
    code, out, err = stoker("result", job_id.strip(), "--timeout-s", "5")
    assert (code, out) == (0, "hello\n")
    assert "2 tokens" in err
    assert "4 of 10 prompt tokens" in err


def test_json_is_one_object_for_each_command(stoker, worker):
    job_id = json.loads(stoker("submit", "--agent", "a", "--prompt", "hi", "--json")[1])["job_id"]
    assert json.loads(stoker("status", job_id, "--json")[1]) == {
        "job_id": job_id, "state": "queued", "position": 0, "tokens": None, "worker": None,
    }  # fmt: skip
    worker.finish(job_id)
    code, out, err = stoker("result", job_id, "--json")
    assert (code, err, json.loads(out)["text"]) == (0, "", "hello")
    assert json.loads(stoker("cancel", job_id, "--json")[1]) == {"job_id": job_id, "canceled": False}


def test_a_prompt_comes_from_stdin_exactly_as_it_is(stoker, worker):
    _, out, _ = stoker("submit", "--agent", "a", "--prompt-file", "-", stdin=" zwölf\n\n".encode())
    assert submitted_request(worker, out.strip())["prompt"] == " zwölf\n\n"


def test_messages_come_from_a_json_file(stoker, worker, tmp_path):
    path = tmp_path / "m.json"
    path.write_text('[{"role": "user", "content": "hi"}]')
    _, out, _ = stoker(
        "submit", "--agent", "a", "--messages-file", str(path), "--context", "append", "--max-tokens", "3"
    )
    request = submitted_request(worker, out.strip())
    assert request["messages"] == [{"role": "user", "content": "hi"}]
    assert (request["context"], request["max_tokens"]) == ("append", 3)


def test_a_failed_job_is_exit_code_1_with_one_line_or_one_object(stoker, worker):
    _, out, _ = stoker("submit", "--agent", "a", "--prompt", "hi")
    job_id = out.strip()
    worker.fail(job_id, "GenerationTimedOut: after 5 s", partial="so far")
    code, out, err = stoker("result", job_id)
    assert (code, out) == (1, "")
    assert err == f"JobFailed: job {job_id}: failed: GenerationTimedOut: after 5 s\n"
    code, out, err = stoker("result", job_id, "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["error"] == {
        "type": "JobFailed",
        "message": f"job {job_id}: failed: GenerationTimedOut: after 5 s",
        "job_id": job_id,
        "reason": "GenerationTimedOut: after 5 s",
        "partial_text": "so far",
    }


def test_a_job_that_does_not_end_in_time_keeps_its_id_in_view(stoker):
    code, out, err = stoker("submit", "--agent", "a", "--prompt", "hi", "--wait", "--timeout-s", "0")
    assert (code, out) == (1, "")
    assert err.startswith("job ")
    code, out, _ = stoker("submit", "--agent", "a", "--prompt", "hi", "--wait", "--timeout-s", "0", "--json")
    assert code == 1
    assert json.loads(out)["error"]["type"] == "ResultTimeout"
    assert json.loads(out)["error"]["job_id"]


def test_a_canceled_job_says_so(stoker):
    _, out, _ = stoker("submit", "--agent", "a", "--prompt", "hi")
    assert stoker("cancel", out.strip())[:2] == (0, "canceled\n")
    assert stoker("status", out.strip())[:2] == (0, "canceled\n")
    code, _, err = stoker("result", out.strip())
    assert code == 1
    assert err.startswith("JobCanceled")


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "--prompt", "hi"],
        ["submit", "--agent", "a"],
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


def test_stdin_that_is_not_text_is_a_wrong_command(stoker):
    code, _, err = stoker("submit", "--agent", "a", "--prompt-file", "-", stdin=b"\xff\xfe")
    assert code == 2
    assert "UTF-8" in err


def test_no_server_is_exit_code_1_without_the_password(stoker):
    code, out, err = stoker("--redis", "redis://:hunter2@127.0.0.1:1", "status", "x")
    assert (code, out) == (1, "")
    assert err.startswith("RedisUnavailable: no Redis server answers at 127.0.0.1:1")
    assert "hunter2" not in err
