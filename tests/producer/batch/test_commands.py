"""`stoker batch` as a user runs it, beside a simulated worker: the files and Redis after each step."""

import json
import os
import re
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from tests.producer.played_worker import PlayedWorker, playing, result_fields
from tests.support.wait import wait_for

from stoker.batch.output_file import OutputFile
from stoker.batch.record import cancel_batch, read_record
from stoker.operations import run

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def batch(stoker, monkeypatch, tmp_path):
    """Runs the command in the test's folder; returns the exit code, stdout (parsed if it is JSON) and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code, out, err = stoker("batch", *arguments)
        return code, json.loads(out) if out.startswith("{") else out.strip(), err

    return run


@pytest.fixture
def somebody(connection):
    """A worker that ends each job as its prompt tells it to, in queue order; `ends` has the prompts."""
    played, ends = PlayedWorker(connection), []

    def answer(job_id):
        request = played.job(job_id).kwargs["request"]
        prompt = request.get("prompt") or request["messages"][0]["content"]
        if prompt.startswith("later"):
            return
        ends.append(prompt)
        if prompt.startswith("fail"):
            played.fail(job_id, "EngineFailed: it says so")
        else:
            played.finish(job_id, text=prompt)

    with ExitStack() as works:
        begin = lambda: works.enter_context(playing(connection, answer))  # noqa: E731
        yield SimpleNamespace(ends=ends, played=played, begin=begin)


def write(path, prompts, name="in.jsonl"):
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": prompt}}
        for n, prompt in enumerate(prompts)
    ]
    (path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def texts(path, name="out.jsonl"):
    """The answers by custom_id: the text, or the error's code or message."""
    found = {}
    for answer in map(json.loads, (path / name).read_text().splitlines()):
        assert answer["custom_id"] not in found
        body = (answer["response"] or {}).get("body", {})
        found[answer["custom_id"]] = (
            answer["error"]["code"] if answer["error"]
            else body["error"]["message"] if "error" in body else body["choices"][0]["text"]
        )  # fmt: skip
    return found


def keys(connection):
    return sorted(key.decode() for pattern in ("rq:job:*", "rq:results:*", "stoker:batch:*")
                  for key in connection.scan_iter(pattern))  # fmt: skip


def test_run_answers_every_line_counts_each_kind_of_failure_and_leaves_nothing_in_redis(
    batch, connection, somebody, tmp_path
):
    write(tmp_path, ["one", "fail", "fail again"])
    with (tmp_path / "in.jsonl").open("a") as lines:
        lines.write("no line\n")
    somebody.begin()
    code, _, err = batch("run", "in.jsonl", "--out", "out.jsonl")
    assert code == 3
    assert "line 2 failed: EngineFailed: it says so\n" in err
    assert "line 4 failed: not JSON\n" in err
    assert "line 3 failed" not in err  # the first of each kind is shown
    assert "1 succeeded, 3 failed (2 EngineFailed, 1 invalid_json_line)\n" in err
    why = "EngineFailed: it says so"
    assert texts(tmp_path) == {"c0": "one", "c1": why, "c2": why, None: "invalid_json_line"}
    assert keys(connection) == []
    assert [connection.zcard(f"rq:{name}:generate") for name in ("finished", "failed")] == [0, 0]
    _, counts, _ = batch("run", "in.jsonl", "--out", "out.jsonl", "--json")
    assert (counts["succeeded"], counts["failed"], counts["left"]) == (1, 3, 0)
    assert counts["causes"] == {"EngineFailed": 2, "invalid_json_line": 1}


def test_a_file_of_prompts_is_run_and_continued_with_its_template_but_with_no_other(batch, somebody, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    somebody.begin()
    run = ("run", "--prompts", "prompts.txt", "--out", "out.jsonl", "--template")
    code, _, err = batch(*run, "say {}")
    assert (code, sorted(somebody.ends)) == (0, ["say one", "say two"])
    assert "2 succeeded, 0 failed" in err
    answers = (tmp_path / "out.jsonl").read_text().splitlines()
    assert {json.loads(answer)["custom_id"] for answer in answers} == {"1", "3"}
    assert batch(*run, "say {}")[0] == 0
    code, _, err = batch(*run, "sing {}")
    assert (code, len(somebody.ends)) == (2, 2)
    assert "an option has changed" in err


def test_answers_that_are_cut_off_are_counted_by_the_process_that_fetches_and_by_the_next(
    batch, connection, somebody, tmp_path
):
    write(tmp_path, ["one", "two"])
    batch("submit", "in.jsonl", "--name", "b")
    [first, second] = connection.lrange("rq:queue:generate", 0, -1)
    somebody.played.finish(first.decode(), {**result_fields(first.decode(), "on"), "finish_reason": "length"})
    somebody.played.finish(second.decode(), text="two")
    for _ in range(2):
        assert "2 succeeded (1 cut off by max_tokens), 0 failed" in batch("fetch", "b", "--out", "out.jsonl")[2]


def test_run_goes_on_with_what_was_submitted_and_runs_again_only_what_was_taken_out_of_the_file(
    batch, somebody, tmp_path
):
    write(tmp_path, ["one", "two", "three"])
    batch("submit", "in.jsonl")
    somebody.begin()
    for _ in range(2):
        assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 0
    assert somebody.ends == ["one", "two", "three"]
    kept = [text for text in (tmp_path / "out.jsonl").read_text().splitlines() if '"two"' not in text]
    (tmp_path / "out.jsonl").write_text("".join(f"{text}\n" for text in kept))
    assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 0
    assert somebody.ends == ["one", "two", "three", "two"]
    write(tmp_path, ["four"])
    code, _, err = batch("run", "in.jsonl", "--out", "out.jsonl")
    assert (code, "has changed" in err) == (2, True)
    assert texts(tmp_path) == {"c0": "one", "c1": "two", "c2": "three"}


def test_a_table_in_and_a_table_out(batch, somebody, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bodies = [{"model": "m", "prompt": prompt} for prompt in ("one", "fail", "three")]
    pq.write_table(pa.table({"url": ["/v1/completions"] * 3, "body": bodies, "n": [7, 8, 9]}), tmp_path / "in.parquet")
    run = ("run", "in.parquet", "--out", "out.parquet")

    def rows():
        table = pq.read_table(tmp_path / "out.parquet").to_pylist()
        return [(row["n"], row["custom_id"], row["text"], row["status"]) for row in table]

    somebody.begin()
    assert batch(*run)[0] == 3
    assert rows() == [(7, "1", "one", 200), (8, "2", None, 500), (9, "3", "three", 200)]
    record = tmp_path / "out.parquet.jsonl"
    record.write_text("".join(f"{text}\n" for text in record.read_text().splitlines() if '"three"' not in text))
    assert batch(*run)[0] == 3
    assert sorted(somebody.ends) == ["fail", "one", "three", "three"]
    assert len(rows()) == 3


def test_lines_that_are_fetched_are_a_table_when_all_are_answered(batch, connection, somebody, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    write(tmp_path, ["one", "later"])
    name = batch("submit", "in.jsonl")[1]
    somebody.begin()
    wait_for(lambda: len(somebody.ends) == 1 and connection.llen("rq:queue:generate") == 1, 20)
    code, _, err = batch("fetch", name, "--out", "out.parquet")
    assert (code, "out.parquet is written when all are" in err) == (4, True)
    assert list(texts(tmp_path, "out.parquet.jsonl")) == ["c0"]
    assert not (tmp_path / "out.parquet").exists()
    somebody.played.finish(connection.lindex("rq:queue:generate", 0).decode(), text="at last")
    assert batch("fetch", name, "--out", "out.parquet", "--follow")[0] == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert [table[name].to_pylist() for name in ("custom_id", "text")] == [["c0", "c1"], ["one", "at last"]]


def test_without_pyarrow_a_table_is_refused_with_what_to_install(batch, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for module in ("parquet_rows", "answer_table"):
        monkeypatch.delitem(sys.modules, f"stoker.batch.{module}", raising=False)
    write(tmp_path, ["one"])
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    for source, out in (("in.parquet", "out.jsonl"), ("in.jsonl", "out.parquet")):
        code, _, err = batch("run", source, "--out", out)
        assert (code, "pip install 'stoker[parquet]'" in err) == (2, True)
    assert not list(tmp_path.glob("out*"))


def test_answers_come_in_the_order_of_the_lines_where_that_is_asked_for(batch, somebody, tmp_path):
    write(tmp_path, [f"fail {n}" if n % 7 == 3 else f"{n}" for n in range(30)])
    with (tmp_path / "in.jsonl").open("a") as lines:
        lines.write("no line\n")
    ended = somebody.played.finish

    def end_slowly(job_id, text):
        time.sleep(0.1 if text == "2" else 0)
        ended(job_id, text=text)

    somebody.played.finish = end_slowly
    somebody.begin()
    assert batch("run", "in.jsonl", "--out", "out.jsonl", "--in-order", "--window", "8")[0] == 3
    assert list(texts(tmp_path)) == [*(f"c{n}" for n in range(30)), None]


def test_no_more_than_the_window_is_in_redis(batch, connection, somebody, tmp_path):
    write(tmp_path, [f"{n}" for n in range(15)])
    seen = []
    ended = somebody.played.finish

    def count_and_end(job_id, text):
        seen.append(len(keys(connection)))
        ended(job_id, text=text)

    somebody.played.finish = count_and_end
    somebody.begin()
    assert batch("run", "in.jsonl", "--out", "out.jsonl", "--window", "5")[0] == 0
    assert len(texts(tmp_path)) == 15
    assert max(seen) <= 2 * 5 + 4


def test_a_crash_between_the_file_and_redis_makes_no_second_answer(batch, connection, somebody, tmp_path, monkeypatch):
    write(tmp_path, ["one", "two"])
    somebody.begin()
    append = OutputFile.append

    def dies_behind(self, answers):
        append(self, answers)
        if answers:
            raise KeyboardInterrupt

    monkeypatch.setattr(OutputFile, "append", dies_behind)
    assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 130
    assert keys(connection) != []
    monkeypatch.setattr(OutputFile, "append", append)
    assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 0
    assert texts(tmp_path) == {"c0": "one", "c1": "two"}
    assert somebody.ends == ["one", "two"]
    assert keys(connection) == []


def test_a_batch_is_submitted_counted_and_fetched_by_others(batch, connection, somebody, tmp_path):
    write(tmp_path, ["one", "fail", "later"])
    code, name, _ = batch("submit", "in.jsonl", "--name", "nightly")
    assert (code, name.startswith("nightly-")) == (0, True)
    assert batch("submit", "in.jsonl", "--name", "nightly")[1] == name
    assert connection.llen("rq:queue:generate") == 3
    code, counts, _ = batch("status", "nightly", "--json")
    assert (counts["state"], counts["waiting"], counts["to_fetch"]) == ("waiting", 3, 0)
    somebody.begin()
    wait_for(lambda: len(somebody.ends) == 2 and connection.llen("rq:queue:generate") == 1, 20)
    assert batch("fetch", "nightly", "--out", "out.jsonl")[0] == 4
    assert len(texts(tmp_path)) == 2
    code, _, err = batch("fetch", name, "--out", "other.jsonl")
    assert (code, "left Redis already; they are in" in err, "out.jsonl" in err) == (2, True, True)
    assert not connection.exists(f"stoker:batch:{name}:holder")
    _, counts, _ = batch("status", name, "--json")
    assert (counts["done"], counts["failed"], counts["waiting"], counts["to_fetch"]) == (1, 1, 1, 0)
    somebody.played.finish(connection.lindex("rq:queue:generate", 0).decode(), text="at last")
    assert batch("fetch", name, "--out", "out.jsonl", "--follow")[0] == 3
    assert texts(tmp_path) == {"c0": "one", "c1": "EngineFailed: it says so", "c2": "at last"}
    [listed] = batch("ls", "--json")[1]["batches"]
    assert (listed["batch"], listed["state"], listed["done"], listed["failed"]) == (name, "fetched", 2, 1)


def test_a_record_that_cannot_be_read_hides_no_other_batch(batch, connection, tmp_path):
    write(tmp_path, ["one"])
    name = batch("submit", "in.jsonl")[1]
    connection.zadd(f"stoker:batch:{name}:lines", {b"\xff": 7, "chat:x": float("inf")})
    for bad, fields in (
        ("b-1", {"a": "b"}),
        ("b-2", {"queue": "q", "source": "s", "n_lines": "x"}),
        ("b-3", {b"\xff": 1}),
    ):
        connection.hset(f"stoker:batch:{bad}", mapping=fields)
        connection.zadd("stoker:batch::all", {bad: 1, "b-4": 1, b"\xff": 1})
    connection.set("stoker:batch:b-4", "a string")
    code, out, err = batch("ls", "--json")
    assert (code, [listed["batch"] for listed in out["batches"]]) == (0, [name])
    named = re.findall("the record of batch (.*) in Redis cannot be read", err)
    assert named == ["b-1", "b-2", "b-3", "b-4"]
    assert "cannot be read" in batch("cancel", "b-1")[2]
    assert batch("cancel", name)[0] == 0


def test_a_canceled_batch_answers_every_line_and_sends_nothing_more(batch, connection, somebody, tmp_path):
    write(tmp_path, ["one", "later", "later", "later", "later"])
    somebody.begin()
    done = []
    command = ("run", "in.jsonl", "--out", "out.jsonl", "--window", "3")
    thread = threading.Thread(target=lambda: done.append(batch(*command)))
    thread.start()
    wait_for(lambda: (tmp_path / "out.jsonl").exists() and '"one"' in (tmp_path / "out.jsonl").read_text(), 20)
    [name] = connection.zrange("stoker:batch::all", 0, -1)
    record = run(connection, read_record(name.decode()))
    assert record
    assert run(connection, cancel_batch(record, remove=False)) >= 2
    thread.join()
    assert done[0][0] == 3
    assert texts(tmp_path) == {"c0": "one"} | {f"c{n}": "batch_cancelled" for n in range(1, 5)}
    assert keys(connection) == []


def test_a_forgotten_batch_can_be_run_again(batch, connection, somebody, tmp_path):
    write(tmp_path, ["one", "later"])
    _, name, _ = batch("submit", "in.jsonl")
    assert batch("cancel", name)[0] == 0
    code, _, err = batch("submit", "in.jsonl")
    assert (code, "was canceled" in err) == (2, True)
    assert batch("cancel", name, "--forget")[0] == 0
    assert keys(connection) == []
    code, out, _ = batch("status", name, "--json")
    assert (code, out["error"]["type"]) == (1, "BatchGone")
    assert batch("submit", "in.jsonl")[1] == name
    assert connection.llen("rq:queue:generate") == 2


def test_an_empty_id_names_no_batch(batch, connection, tmp_path):
    write(tmp_path, ["one"])
    assert batch("submit", "in.jsonl")[0] == 0
    before = keys(connection)
    for command in (["status"], ["fetch", "--out", "out.jsonl"], ["cancel", "--forget"]):
        code, out, err = batch(command[0], "", *command[1:])
        assert (code, out, "is empty" in err) == (2, "", True)
    assert keys(connection) == before


def test_a_job_that_was_deleted_is_an_answer_too(batch, connection, tmp_path):
    write(tmp_path, ["one"])
    _, name, _ = batch("submit", "in.jsonl")
    for key in connection.scan_iter("rq:job:*"):
        connection.delete(key)
    assert batch("fetch", name, "--out", "out.jsonl", "--follow")[0] == 3
    assert texts(tmp_path) == {"c0": "batch_expired"}


def test_a_batch_is_held_back_while_redis_holds_too_much(batch, connection, tmp_path, monkeypatch):
    write(tmp_path, ["one", "two", "three"])
    before = connection.info("memory")["used_memory"]  # it may still fall, while memory of other tests is freed
    connection.set("ballast", b"x" * 2**26)

    def make_room(seconds):
        assert connection.llen("rq:queue:generate") == 0
        connection.delete("ballast")

    monkeypatch.setattr("stoker.batch.cli.time.sleep", make_room)
    code, _, err = batch("submit", "in.jsonl", "--max-redis-bytes", str(before + 2**25))
    assert (code, "held back" in err, "line 1 of 3" in err) == (0, True, True)
    assert connection.llen("rq:queue:generate") == 3


def test_run_sends_line_by_line_while_other_clients_fill_redis(batch, somebody, tmp_path):
    write(tmp_path, ["one", "two", "three"])
    somebody.begin()
    assert batch("run", "in.jsonl", "--out", "out.jsonl", "--max-redis-bytes", "1")[0] == 0
    assert len(texts(tmp_path)) == 3


def test_one_process_takes_the_answers_of_a_batch_and_a_second_is_refused(batch, connection, tmp_path):
    write(tmp_path, ["one"])
    _, name, _ = batch("submit", "in.jsonl")
    connection.set(f"stoker:batch:{name}:holder", "elsewhere 1:2 /there/out.jsonl")
    code, _, err = batch("fetch", name, "--out", "out.jsonl")
    assert (code, "/there/out.jsonl on elsewhere" in err) == (1, True)
    connection.delete(f"stoker:batch:{name}:holder")
    assert batch("fetch", name, "--out", "out.jsonl")[0] == 4
    assert not connection.exists(f"stoker:batch:{name}:holder")


def test_a_disk_that_is_full_stops_the_batch_and_loses_nothing(batch, somebody, tmp_path, monkeypatch):
    write(tmp_path, ["one", "two"])
    somebody.begin()
    (tmp_path / "out.jsonl").touch()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("stoker.batch.output_file.os.fsync", full)
        code, _, err = batch("run", "in.jsonl", "--out", "out.jsonl")
    assert (code, "No space left" in err) == (1, True)
    assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 0
    assert texts(tmp_path) == {"c0": "one", "c1": "two"}
    assert somebody.ends == ["one", "two"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run", "nowhere.jsonl", "--out", "out.jsonl"), "nowhere.jsonl"),
        (("run", "in.jsonl"), "--out"),
        (("run", "in.jsonl", "--out", "no/folder/out.jsonl"), "out.jsonl"),
        (("run", "in.jsonl", "--out", "in.jsonl"), "in.jsonl"),
        (("submit", "in.jsonl", "--keep", "soon"), "--keep"),
        (("submit", "in.jsonl", "--keep", "100000000000d"), "--keep"),
        (("run", "in.jsonl", "--out", "/dev/null"), "/dev/null"),
        (("submit", "in.jsonl", "--name", "a:b"), "--name"),
        (("submit", "in.jsonl", "--model-alias", "gpt"), "--model-alias"),
        (("submit", "in.jsonl", "--queue", "a,b"), "queue"),
        (("submit", "in.jsonl", "--template", "say {}"), "--prompts"),
        (("submit", "--prompts", "in.jsonl", "--template", "say"), "{}"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_sent(batch, connection, tmp_path, arguments, word):
    write(tmp_path, ["one"])
    before = (tmp_path / "in.jsonl").read_text()
    code, _, err = batch(*arguments)
    assert (code, word in err) == (2, True), err
    assert keys(connection) == []
    assert (tmp_path / "in.jsonl").read_text() == before


@pytest.mark.skipif(sys.platform == "darwin", reason="APFS has only names of UTF-8")
def test_a_file_whose_name_is_not_text_is_a_batch_too(batch, tmp_path):
    write(tmp_path, ["one"], name=os.fsdecode(b"\xff.jsonl"))
    assert batch("submit", os.fsdecode(b"\xff.jsonl"))[0] == 0
    assert "(?.jsonl, 1 lines)" in batch("ls")[1]


def test_a_model_that_is_not_the_loaded_one_comes_with_the_options_that_help(batch, somebody, tmp_path):
    write(tmp_path, ["one"])
    somebody.played.finish = lambda job_id, text: somebody.played.fail(job_id, "ModelMismatch: not 'm'")
    somebody.begin()
    _, _, err = batch("run", "in.jsonl", "--out", "out.jsonl")
    hint = "(--any-model, or --model-alias THEIRS=OURS, with another --out runs such lines)"
    assert f"line 1 failed: ModelMismatch: not 'm' {hint}" in err


def test_a_queue_without_a_worker_is_named(batch, tmp_path, monkeypatch):
    write(tmp_path, ["one"])
    nobody = "no worker listens to 'generate', nor to any queue"
    _, name, err = batch("submit", "in.jsonl")
    assert nobody in err
    assert batch("status", name)[1].endswith(nobody)
    assert batch("status", name, "--json")[1]["warning"] == nobody

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.batch.work.time.sleep", interrupt)
    code, _, err = batch("run", "in.jsonl", "--out", "out.jsonl")
    assert code == 130
    assert f"0 done, 0 failed, 1 waiting, {nobody}\nrun the same command again to continue from here\n" in err


def test_a_file_without_lines_is_not_submitted(batch, connection, tmp_path):
    for content in ("", "\n \n"):
        (tmp_path / "in.jsonl").write_text(content)
        assert batch("submit", "in.jsonl") == (1, "", "StokerError: in.jsonl has no lines\n")
    code, out, err = batch("submit", "in.jsonl", "--json")
    assert (code, out["error"]["message"], err) == (1, "in.jsonl has no lines", "")
    assert keys(connection) == []


def test_a_file_of_which_no_line_can_be_run_is_an_error_that_tells_where_the_reasons_are(batch, connection, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n\n{"custom_id": "b"}\n')
    code, out, err = batch("submit", "in.jsonl", "--name", "n")
    assert (code, out) == (1, "")
    fetch = re.search("^StokerError: no line of in.jsonl can be run; `stoker batch (.*)` writes why$", err)[1]
    assert batch(*fetch.split())[0] == 3
    assert texts(tmp_path, "OUT.jsonl").keys() == {"a", "b"}
    write(tmp_path, ["one"])
    assert batch("submit", "in.jsonl", "--name", "n")[0] == 0
