"""`stoker batch` in real processes, with the engine without a model, while every process is killed in turn."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionSystemMessageParam, ChatCompletionUserMessageParam
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.shared import ErrorObject
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.support.private_server import free_port, private_server
from tests.support.store_reader import StoreReader
from tests.support.wait import wait_for
from tests.support.worker_process import burst, running_worker

pytestmark = pytest.mark.server

LONG = os.environ.get("CHAOS") == "long"
AGENTS, LINES, BAD = (200, 5000, 50) if LONG else (30, 600, 6)
FAST = ("--scripted-steps-per-s", "20000", "--max-batch", "32")
TEXT = "/v1/completions"


def line(custom_id, url=TEXT, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "scripted", **body}}


def turn(number, **body):
    """A turn of an agent's conversation; the transcript will show whether it ran twice, or too early or late."""
    agent = f"agent {number % AGENTS}"
    return line(f"line {number}", user=agent, prompt=f"say <{number}>", context="append", max_tokens=20, **body)


BAD_LINES = (
    lambda number: "{half a line",
    lambda number: turn(number, n=2),
    lambda number: {**turn(number), "custom_id": "line 0"},
    lambda number: {**turn(number), "method": "GET"},
    lambda number: {**turn(number), "body": {**turn(number)["body"], "prompt": "fail because it says so"}},
)


def write(path, lines):
    path.write_text("".join(f"{text if isinstance(text, str) else json.dumps(text)}\n" for text in lines))


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def is_success(answer):
    return answer["error"] is None and answer["response"]["status_code"] == 200


class Batch:
    """The command as a shell runs it."""

    def __init__(self, url, log):
        self._url, self._log = url, log

    def start(self, *arguments):
        stoker = [sys.executable, "-c", "from stoker.cli import main; main()", "--redis", self._url]
        command = [*stoker, "batch", *map(str, arguments)]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def __call__(self, *arguments, timeout_s=120):
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output


@pytest.fixture
def batch(redis_url, tmp_path):
    return Batch(redis_url, tmp_path / "batch.log")


def n_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.timeout(600)
def test_every_line_is_answered_once_and_in_its_agents_order_whatever_is_killed(tmp_path):
    bad = {100 * k + 37: BAD_LINES[k % len(BAD_LINES)] for k in range(BAD)}
    write(tmp_path / "in.jsonl", [bad.get(number, turn)(number) for number in range(LINES)])
    port, store, out = free_port(), tmp_path / "store", tmp_path / "out.jsonl"
    run = ("run", tmp_path / "in.jsonl", "--out", out, "--window", "150")
    with ExitStack() as server:
        admin = server.enter_context(private_server(tmp_path / "redis", port=port))
        batch = Batch(f"redis://127.0.0.1:{port}", tmp_path / "batch.log")

        def producer_killed_at(part):
            process = batch.start(*run)
            wait_for(lambda: n_lines(out) >= part * LINES or process.poll() is not None)
            process.kill()
            process.communicate()

        worker = (f"redis://127.0.0.1:{port}", store, *FAST, "--keep-versions", str(LINES))
        with running_worker(*worker, log_name="1.log") as first:
            for part in (0.0002, 0.1, 0.2):
                producer_killed_at(part)
            first.kill()
        with out.open("ab") as half:
            half.write(b'{"id":"batch_req_')
        with running_worker(*worker, log_name="2.log") as second:
            producer_killed_at(0.4)
            process = batch.start(*run)
            wait_for(lambda: n_lines(out) >= 0.5 * LINES)
            server.close()
            time.sleep(0.5)
            admin = server.enter_context(private_server(tmp_path / "redis", port=port))
            wait_for(lambda: n_lines(out) >= 0.6 * LINES)
            second.kill()
            process.kill()
            process.communicate()
        with running_worker(*worker, log_name="3.log") as third:
            code, _ = batch(*run, timeout_s=300)
            assert code == 3, batch._log.read_text()
            third.signal(signal.SIGTERM)
            third.wait()
        assert list(admin.scan_iter("rq:job:*")) == list(admin.scan_iter("stoker:batch:*")) == []
        assert admin.zcard("rq:finished:generate") == admin.zcard("rq:failed:generate") == 0

    answers = read(out)
    assert len(answers) == LINES
    assert sum(not is_success(answer) for answer in answers) == BAD
    named = Counter(answer["custom_id"] for answer in answers if answer["custom_id"] is not None)
    assert set(named.values()) == {1}
    nameless = (BAD_LINES[0], BAD_LINES[2])
    assert set(named) == {f"line {number}" for number in range(LINES) if bad.get(number) not in nameless}
    good = [int(answer["custom_id"].split()[1]) for answer in answers if is_success(answer)]
    for agent in range(AGENTS):
        expected = [number for number in range(agent, LINES, AGENTS) if number not in bad]
        assert [number for number in good if number % AGENTS == agent] == expected
        turns = StoreReader(store).turns(f"agent {agent}")
        assert [int(job_id.split("-")[2]) - 1 for job_id in turns if job_id] == expected


def test_openais_own_types_write_the_lines_and_parse_every_answer_of_a_worker(batch, redis_url, tmp_path):
    system: ChatCompletionSystemMessageParam = {"role": "system", "content": "Be brief. " * 60}
    bodies: list[tuple[str, CompletionCreateParamsNonStreaming | TextParams]] = []
    for number in range(12):
        asked: ChatCompletionUserMessageParam = {"role": "user", "content": f"say answer {number}"}
        chat: CompletionCreateParamsNonStreaming = {
            "model": "gpt-4o-mini",
            "messages": [system, asked],
            "temperature": 0.0,
            "max_completion_tokens": 40,
            "metadata": {"agent_id": f"agent {number % 3}"},
        }
        bodies.append(("/v1/chat/completions", chat))
    text: TextParams = {"model": "gpt-4o-mini", "prompt": "and on", "max_tokens": 5, "stop": None}
    bodies += [(TEXT, text), (TEXT, {**text, "model": "another"})]
    lines = [line(f"line {n}", url, **body) for n, (url, body) in enumerate(bodies)]
    write(tmp_path / "in.jsonl", lines)
    with running_worker(redis_url, tmp_path / "store"):
        options = ("--out", tmp_path / "out.jsonl", "--model-alias", "gpt-4o-mini=scripted", "--in-order")
        assert batch("run", tmp_path / "in.jsonl", *options)[0] == 3
    *answers, last, refused = [answer["response"] for answer in read(tmp_path / "out.jsonl")]
    parsed = [ChatCompletion.model_validate(answer["body"], strict=True) for answer in answers]
    assert [body.choices[0].message.content for body in parsed] == [f"answer {number}" for number in range(12)]
    assert {body.choices[0].finish_reason for body in parsed} == {"stop"}
    assert (parsed[-1].usage.prompt_tokens_details.cached_tokens or 0) >= 512
    completion = Completion.model_validate(last["body"], strict=True)
    assert (completion.usage.completion_tokens, completion.choices[0].finish_reason) == (5, "length")
    assert refused["status_code"] == 404
    assert ErrorObject.model_validate(refused["body"]["error"], strict=True).code == "model_not_found"


def test_only_results_of_a_batch_are_compressed_in_redis(batch, producer, redis_url, connection, tmp_path):
    prompt = "say " + "the same words over and over " * 40
    write(tmp_path / "in.jsonl", [line("one", prompt=prompt, max_tokens=2000, user="a")])
    assert batch("submit", tmp_path / "in.jsonl", "--name", "b")[0] == 0
    ordinary = producer.submit(agent_id="b", prompt=prompt, max_tokens=2000)
    burst(redis_url, tmp_path / "store", "--scripted-steps-per-s", "20000")
    sizes = {}
    for key in connection.scan_iter("rq:results:*"):
        [(_, fields)] = connection.xrange(key)
        sizes[key.decode().removeprefix("rq:results:")] = len(fields[b"return_value"])
    [packed_id] = sizes.keys() - {ordinary.job_id}
    assert sizes[packed_id] < sizes[ordinary.job_id] / 2
    assert Job.fetch(ordinary.job_id, connection, JSONSerializer).return_value()["text"] == prompt[4:]
    assert producer.ticket(packed_id).result(timeout_s=1).text == ordinary.result(timeout_s=1).text
    assert batch("fetch", "b", "--out", tmp_path / "out.jsonl")[0] == 0


def test_a_table_of_prompts_is_answered_row_by_row_by_a_command_that_was_killed(batch, redis_url, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    n_rows, out = 400, tmp_path / "out.parquet"
    own = pa.table({"q": [f"<{n}>" for n in range(n_rows)], "text": list(range(n_rows))})
    pq.write_table(own, tmp_path / "in.parquet", row_group_size=150)
    run = ("run", tmp_path / "in.parquet", "--prompts", "--column", "q", "--template", "say {}", "--out", out)
    with running_worker(redis_url, tmp_path / "store", *FAST) as worker:
        process = batch.start(*run, "--window", "100")
        worker.wait_for(lambda: n_lines(tmp_path / "out.parquet.jsonl") > n_rows / 2)
        process.kill()
        process.communicate()
        assert not out.exists()
        assert batch(*run)[0] == 0
    table = pq.read_table(out)
    assert table["input_text"].to_pylist() == list(range(n_rows))
    assert table["text"].to_pylist() == [f"<{n}>" for n in range(n_rows)]
    assert n_lines(tmp_path / "out.parquet.jsonl") == n_rows
