"""A batch in Redis: two processes work on it, and its ends are read."""

import json
import time

import pytest
from tests.producer.played_worker import PlayedWorker

from stoker.api.fields import BodyOptions
from stoker.batch.collecting import ends_of, server_ms
from stoker.batch.feeding import Feeder
from stoker.batch.input_file import InputFile
from stoker.batch.json_lines import JsonLines
from stoker.batch.record import BatchRecord, forget, mark_canceled, read_record, register, sent_lines, take_out
from stoker.new_job import JobOptions
from stoker.operations import Commands, Watched, run

LINES = 4
DAY_S = 86_400


@pytest.fixture
def lines(tmp_path):
    body = {"model": "m", "prompt": "x", "user": "a"}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    text = "".join(f"{json.dumps({'custom_id': f'c{n}', **line})}\n" for n in range(LINES))
    (tmp_path / "in.jsonl").write_text(text + "no line\n")
    with InputFile(JsonLines(tmp_path / "in.jsonl")) as lines:
        yield lines


@pytest.fixture
def record(connection, lines):
    record = BatchRecord("b-1", "generate", "in.jsonl", lines.n_requests, lines.n_lines, DAY_S, int(time.time()))
    return run(connection, register(record))


@pytest.fixture
def feeder(connection, lines):
    return Feeder(connection, lines, BodyOptions(), JobOptions(ttl_s=DAY_S), None)


def test_jobs_that_ended_since_the_walk_began_are_left_for_the_next(connection, record, feeder):
    """Otherwise an agent's later line could be found without the earlier one on the page before."""
    feeder.feed(record, 100)
    sent = run(connection, sent_lines("b-1", 0, 100))
    before_ms = run(connection, server_ms())
    PlayedWorker(connection).finish(sent[0].job_id("b-1"))
    found = [
        list(run(connection, ends_of("b-1", sent, before_ms=ms, look_at_all=look_at_all)))
        for ms in (before_ms, before_ms + 1000)
        for look_at_all in (False, True)
    ]
    bad = sent[-1]
    assert found == [[bad], [bad], [sent[0], bad], [sent[0], bad]]


def test_a_requeued_job_that_ends_while_the_lines_are_read_keeps_its_answer(connection, record, feeder, each_step):
    feeder.feed(record, 100)
    played, [of_this_walk, of_a_later_one, *_] = PlayedWorker(connection), run(connection, sent_lines("b-1", 0, 100))
    ending = []

    def end_between_the_reads(step):
        if ending and isinstance(step, Commands) and step.commands[0][0] == "HMGET":
            played.finish(ending.pop())

    def found_while_it_ends(line, before_ms):
        ending.append(line.job_id("b-1"))
        return run(connection, ends_of("b-1", [line], before_ms=before_ms, look_at_all=False))

    for line in (of_this_walk, of_a_later_one):
        played.fail(line.job_id("b-1"), "EngineFailed: x")
        played.job(line.job_id("b-1")).requeue()
    each_step(end_between_the_reads)
    before_ms = run(connection, server_ms())
    assert found_while_it_ends(of_this_walk, before_ms) == {}  # it ended after the walk began
    [end] = found_while_it_ends(of_a_later_one, before_ms + 60_000).values()
    assert end.answer["response"]["status_code"] == 200


def test_a_line_that_was_taken_out_twice_counts_once(connection, record, feeder):
    feeder.feed(record, 100)
    sent = run(connection, sent_lines("b-1", 0, 100))
    PlayedWorker(connection).finish(sent[0].job_id("b-1"))
    for _ in range(2):
        run(connection, take_out(record, {sent[0]: True, sent[-1]: False}, "here"))
    now = run(connection, read_record("b-1"))
    assert (now.n_taken, now.n_failed, now.output) == (2, 1, "here")
    assert len(run(connection, sent_lines("b-1", 0, 100))) == LINES - 1
    assert not list(connection.scan_iter(f"rq:*:{sent[0].job_id('b-1')}"))


def test_everything_expires_and_a_batch_outlives_its_jobs(connection, record, feeder):
    feeder.feed(record, 100)
    job_id = run(connection, sent_lines("b-1", 0, 1))[0].job_id("b-1")
    assert 0 < connection.ttl(f"rq:job:{job_id}") <= DAY_S
    for key in connection.scan_iter("stoker:batch:b-1*"):
        assert connection.ttl(key) > 2 * DAY_S
    run(connection, forget("b-1"))
    assert not list(connection.scan_iter("stoker:batch:*"))


def test_every_change_of_a_batch_tolerates_writes_by_other_processes(connection, record, feeder, each_step):
    """Another write interrupts each watched transaction three times before it succeeds."""
    feeder.feed(record, 2)
    interfered = []

    def interfere(step):
        if isinstance(step, Watched) and len(interfered) % 4 < 3:
            write = step.write

            def written_to(replies):
                connection.hset(step.keys[-1], "touched", len(interfered))
                return write(replies)

            step = Watched(step.keys, step.reads, written_to)
        if isinstance(step, Watched):
            interfered.append(step)
        return step

    each_step(interfere)
    now = run(connection, read_record("b-1"))
    assert feeder.feed(now, 2)
    assert len(interfered) == 4
    now = run(connection, read_record("b-1"))
    assert now
    [first, *_] = run(connection, sent_lines("b-1", 0, 100))
    run(connection, take_out(now, {first: True}, "out"))
    run(connection, mark_canceled(now))
    assert len(interfered) == 12
    after = run(connection, read_record("b-1"))
    assert (after.canceled, after.n_taken, after.n_sent) == (True, 1, 4)


def test_a_batch_that_goes_while_its_answers_are_taken_out_leaves_no_half_record(connection, record, feeder, each_step):
    feeder.feed(record, 2)
    [first, *_] = run(connection, sent_lines("b-1", 0, 100))

    def lose_all(step):
        if isinstance(step, Watched) and connection.exists("stoker:batch:b-1"):
            write = step.write

            def too_late(replies):
                commands = write(replies)
                run(connection, forget("b-1"))
                return commands

            step = Watched(step.keys, step.reads, too_late)
        return step

    each_step(lose_all)
    run(connection, take_out(record, {first: True}, "out"))
    assert connection.keys("stoker:batch:*") == []
