"""`stoker submit`: every field and option arrives; the request comes from options, a file or stdin."""

import json
import pty
from dataclasses import fields
from pathlib import Path

import pytest
from tests.producer.played_worker import publish

from stoker import Producer, RedisUnavailable
from stoker.cli import main
from stoker.new_job import JobOptions
from stoker.submit_command import JOB_OPTIONS, submit

pytestmark = pytest.mark.server

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
FIELDS = {
    "agent_id": (["--agent", "a"], "a"),
    "messages": (["--messages-file", "messages.json"], MESSAGES),
    "context": (["--context", "append"], "append"),
    "expect_version": (["--expect-version", "0"], 0),
    "must_exist": (["--must-exist"], True),
    "cache": (["--cache", "read"], "read"),
    "max_tokens": (["--max-tokens", "7"], 7),
    "temperature": (["--temperature", "1"], 1.0),
    "top_p": (["--top-p", "0.5"], 0.5),
    "top_k": (["--top-k", "5"], 5),
    "seed": (["--seed", "0"], 0),
    "stop": (["--stop", "x", "--stop", "y"], ["x", "y"]),
    "max_reasoning_tokens": (["--max-reasoning-tokens", "0"], 0),
    "tools": (["--tools-file", "tools.json"], TOOLS),
    "model": (["--model", "m"], "m"),
    "n": (["--set", "n=3"], 3),
    "logit_bias": (["--set", 'logit_bias={"50": -100}'], {"50": -100.0}),
    "cache_salt": (["--set", "cache_salt=a=b"], "a=b"),
    "parallel_tool_calls": (["--set", "parallel_tool_calls=false"], False),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHECKED = {
    "session": (["--session", "s"], "s"),
    "check": (["--check-file", "check.json"], {"contains": ["a"], "finish_reason": ["stop"]}),
    "max_cost_s": (["--max-cost-s", "2.5"], 2.5),
    "task": (["--task", "names"], "names"),
}


@pytest.fixture
def request_of(worker):
    """The request on the wire, of the job whose id a command printed."""
    return lambda ran: worker.job(ran[1].strip()).kwargs["request"]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "messages.json").write_text(json.dumps(MESSAGES))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "check.json").write_text(json.dumps(CHECKED["check"][1]))
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "request.json").write_text(json.dumps({"v": 5, "agent_id": "f", "prompt": "p", "max_tokens": 9}))


def test_the_fields_of_a_request_arrive(stoker, request_of):
    ran = stoker("submit", *(word for words, _ in FIELDS.values() for word in words))
    assert ran[::2] == (0, "")
    assert request_of(ran) == {"v": 5, **{name: value for name, (_, value) in FIELDS.items()}}
    assert request_of(stoker("submit", "--prompt", " p ")) == {"v": 5, "prompt": " p "}
    assert request_of(stoker("submit", "--message", "m")) == {"v": 5, "messages": [{"role": "user", "content": "m"}]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    formed = request_of(stoker("submit", "--prompt", "p", "--schema-file", "schema.json"))
    assert formed == {"v": 5, "prompt": "p", "response_format": form}


def test_every_option_of_a_job_arrives(stoker, worker):
    of_a_job = {field.name for field in fields(JobOptions) if field.init and field.name != "stream"}
    assert of_a_job | {"queue", "job_id", "models", "min_trust"} == set(JOB_OPTIONS)
    assert set(JOB_OPTIONS) <= {option.name for option in submit.params}
    first, second = (stoker("submit", "--message", "m")[1].strip() for _ in range(2))
    times = ["--job-timeout-s", "5", "--result-ttl-s", "6", "--failure-ttl-s", "-1", "--ttl-s", "8"]
    behind = ["--depends-on", first, "--depends-on", second, "--allow-dependency-failures", "--at-front"]
    ran = stoker("submit", "--message", "m", "--queue", "q", "--job-id", "j", "--retry", "2", *times, *behind)
    assert ran == (0, "j\n", "")
    job = worker.job("j")
    assert (job.origin, job.timeout, job.result_ttl, job.failure_ttl, job.ttl) == ("q", 5, 6, -1, 8)
    assert (job.retries_left, job.enqueue_at_front, job.allow_dependency_failures) == (2, True, True)
    assert sorted(job.dependency_ids) == sorted([first, second])


def test_a_file_that_is_not_json_or_has_the_wrong_form_is_a_usage_error(stoker):
    for wrong in (
        ["--set", "n"],
        ["--set", "colour=1"],
        ["--set", "chat_template_kwargs={"],
        ["--schema-file", "messages.json"],
        ["--tools-file", "request.json"],
        ["--tools-file", "missing.json"],
        ["--must-exist"],
    ):
        code, out, err = stoker("submit", "--message", "hi", *wrong)
        assert (code, out) == (2, ""), wrong
        assert "Traceback" not in err
    assert "missing" not in stoker("submit", "--json-file", "messages.json")[1]


def test_an_option_replaces_that_field_of_the_file(stoker, request_of):
    file = ("submit", "--json-file", "request.json")
    assert request_of(stoker(*file)) == {"v": 5, "agent_id": "f", "prompt": "p", "max_tokens": 9}
    assert request_of(stoker(*file, "--agent", "g", "--seed", "1")) == {
        "v": 5, "agent_id": "g", "prompt": "p", "max_tokens": 9, "seed": 1,
    }  # fmt: skip
    assert request_of(stoker(*file, "--message", "m")) == {
        "v": 5, "agent_id": "f", "messages": [{"role": "user", "content": "m"}], "max_tokens": 9,
    }  # fmt: skip
    from_stdin = stoker("submit", "--json-file", "-", stdin=b'{"max_tokens": 3, "prompt": "z"}')
    assert request_of(from_stdin) == {"v": 5, "prompt": "z", "max_tokens": 3}


def test_a_file_that_is_no_request_is_refused_by_name(stoker):
    for file, told in (
        (b"[]", "JSON object"),
        (b"{", "JSON object"),
        (b'{"prompt": "p", "colour": 1}', "colour"),
        (b'{"prompt": "p", "queue": "q"}', "queue"),
        (b'{"prompt": "p", "v": 99}', "v 99"),
        (b'{"max_tokens": 3}', "no input"),
        (b"\xff", "UTF-8"),
    ):
        code, out, err = stoker("submit", "--json-file", "-", stdin=file)
        assert (code, out, told in err) == (2, "", True), file


def test_stdin_is_the_users_message_where_nothing_else_gives_the_input(stoker, request_of):
    said = [{"role": "user", "content": "two\nlines"}]
    assert request_of(stoker("submit", "--agent", "a", stdin=b"two\nlines\n"))["messages"] == said
    Path("partial.json").write_text('{"max_tokens": 3}')
    assert request_of(stoker("submit", "--json-file", "partial.json", stdin=b"two\nlines\r\n")) == {
        "v": 5, "messages": said, "max_tokens": 3,
    }  # fmt: skip
    assert "prompt" in request_of(stoker("submit", "--prompt", "given", stdin=b"not read"))


def test_a_prompt_or_messages_or_tools_may_be_in_stdin_as_they_are(stoker, request_of):
    assert request_of(stoker("submit", "--prompt-file", "-", stdin=" zwölf\n\n".encode()))["prompt"] == " zwölf\n\n"
    ran = stoker("submit", "--messages-file", "-", stdin=json.dumps(MESSAGES).encode())
    assert request_of(ran)["messages"] == MESSAGES
    ran = stoker("submit", "--message", "m", "--tools-file", "-", stdin=json.dumps(TOOLS).encode())
    assert request_of(ran)["tools"] == TOOLS
    code, _, err = stoker("submit", "--prompt-file", "-", stdin=b"\xff\xfe")
    assert (code, "UTF-8" in err) == (2, True)
    code, _, err = stoker("submit", "--messages-file", "-", "--tools-file", "-", stdin=b"[]")
    assert (code, "one option" in err) == (2, True)


def test_without_any_input_the_ways_to_give_one_are_named(stoker, monkeypatch, capsys):
    assert "--message" in stoker("submit", "--agent", "a")[2]  # as under cron
    _, terminal = pty.openpty()
    with open(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(SystemExit, match="2"):
            main(["submit", "--agent", "a"])
    assert "no input" in capsys.readouterr().err


def test_the_id_of_a_job_is_printed_even_if_redis_goes_away_right_after_it_was_enqueued(stoker, worker, monkeypatch):
    def away(producer, queue=None):
        raise RedisUnavailable("away")

    monkeypatch.setattr(Producer, "unattended", away)
    code, out, _ = stoker("submit", "--message", "m", "--json")
    assert (code, worker.job(json.loads(out)["job_id"]).get_status()) == (0, "queued")


def test_a_check_and_its_models_arrive(stoker, request_of, connection):
    for model in ("small", "large"):
        publish(connection, f"stoker-{model}", f"q-{model}", model=model)
    words = [word for words, _ in CHECKED.values() for word in words]
    ran = stoker("submit", "--message", "m", "--models", "small,large", "--min-trust", "0", *words)
    assert ran[0] == 0, ran
    asked = request_of(ran)
    assert {name: asked[name] for name in CHECKED} == {name: value for name, (_, value) in CHECKED.items()}
    assert [(step["model"], step["queue"]) for step in asked["route"]] == [("small", "q-small"), ("large", "q-large")]
    ran = stoker("submit", "--message", "m", "--models", "small", "--check-file", "schema.json")
    assert request_of(ran)["check"] == {"json_schema": SCHEMA}
    for words in (["--models", "small"], ["--set", 'route=[{"model": "small", "queue": "q-small"}]']):
        ran = stoker("submit", "--message", "m", "--queue", "not-this-one", *words, "--json")
        assert json.loads(ran[1]).keys() == {"job_id"}  # and no warning
    code, out, err = stoker("submit", "--message", "m", "--models", "small,huge")
    assert (code, out) == (1, "")
    assert "NobodyServes: no live worker serves model 'huge'; 'large' in queue 'q-large': stoker-large; 'small'" in err
