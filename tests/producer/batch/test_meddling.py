"""Other processes interfere while a command works on a batch: empty Redis, cancel, forget, take over."""

import pytest
from redis.exceptions import WatchError
from tests.producer.batch.test_commands import batch, somebody, texts, write

from stoker.batch import record as batch_record
from stoker.batch.record import cancel_batch, hold, read_record, take_out
from stoker.operations import run

pytestmark = pytest.mark.server
__all__ = ["batch", "somebody"]


def test_redis_that_was_emptied_while_answers_were_taken_out_does_not_stop_a_batch(
    batch, connection, somebody, tmp_path, monkeypatch
):
    write(tmp_path, ["one", "two"])
    somebody.begin()
    emptied = []

    def take_out_of_nothing(*arguments):
        if not emptied:
            emptied.append(connection.flushall())
        return take_out(*arguments)

    monkeypatch.setattr("stoker.batch.collecting.take_out", take_out_of_nothing)
    assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 0
    assert texts(tmp_path) == {"c0": "one", "c1": "two"}
    assert emptied


def test_a_cancel_that_comes_after_the_end_leaves_nothing(batch, connection, somebody, tmp_path):
    write(tmp_path, ["one"])
    _, name, _ = batch("submit", "in.jsonl")
    record = run(connection, read_record(name))
    assert record
    somebody.begin()
    assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 0
    assert run(connection, cancel_batch(record, remove=False)) == 0
    assert list(connection.scan_iter("stoker:batch:*")) == []
    assert batch("run", "in.jsonl", "--out", "out.jsonl")[0] == 0


@pytest.mark.parametrize("and_forget", [False, True])
def test_a_batch_that_is_canceled_while_it_is_submitted_is_submitted_no_further(
    batch, connection, tmp_path, monkeypatch, and_forget
):
    write(tmp_path, ["one"])

    def cancel_instead(seconds):
        [name] = connection.zrange("stoker:batch::all", 0, -1)
        record = run(connection, read_record(name.decode()))
        assert record
        run(connection, cancel_batch(record, remove=and_forget))

    monkeypatch.setattr("stoker.batch.cli.time.sleep", cancel_instead)
    code, _, err = batch("submit", "in.jsonl", "--max-redis-bytes", "1")
    assert (code, "no batch" in err if and_forget else "was canceled" in err) == (1 if and_forget else 2, True), err


def test_a_connection_that_is_lost_under_a_watch_is_not_taken_for_another_process():
    steps = hold("b", "here 1:2 /out.jsonl")
    watched = next(steps)
    assert steps.throw(WatchError("a connection error while watching")) == watched
    with pytest.raises(batch_record.BatchHeld, match=r"/there/out\.jsonl on elsewhere"):
        watched.write([b"elsewhere 1:2 /there/out.jsonl"])
