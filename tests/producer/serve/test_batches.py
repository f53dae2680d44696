"""Files and batches with OpenAI's own package, from the upload to the download, over restarts and beside each other."""

import errno
import json
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from openai.types.responses import Response
from tests.producer.serve.conftest import serving_at
from tests.support.wait import wait_for

from stoker.batch import work
from stoker.batch.input_file import InputFile
from stoker.batch.json_lines import JsonLines
from stoker.batch.record import BatchHeld, hold
from stoker.serve import batch_runner
from stoker.serve.settings import Tokens
from stoker.serve.store import BatchStore, FileStore
from stoker_shared.errors import RedisUnavailable

pytestmark = [pytest.mark.server, pytest.mark.slow]

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ODD = [("background", True), ("previous_response_id", "resp_1"), ("stream", True)]
"""Fields that a line cannot have, with their values."""


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def client(serve, store):
    return serve(batch_store=store).client()


def lines(*prompts):
    bodies = ({"model": "m", "messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
    rows = ({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies))
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def upload(client, content):
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def begin(client, content, **fields):
    made = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=upload(client, content).id, **made)


def until(client, batch, *statuses):
    end = time.monotonic() + 60
    while (now := client.batches.retrieve(batch.id)).status not in statuses:
        assert time.monotonic() < end, now
        time.sleep(0.02)
    return now


def answers(client, file_id):
    """By custom_id: the text, or the error's code."""
    found = {}
    for raw in client.files.content(file_id).text.splitlines():
        line = json.loads(raw)
        body = (line["response"] or {}).get("body", {})
        found[line["custom_id"]] = (
            body["choices"][0]["message"]["content"] if "choices" in body else (line["error"] or body["error"])["code"]
        )
    return found


def test_a_batch_from_upload_to_download(client):
    prompts = [f"say {n}" if n % 50 else "fail ModelMismatch: x" for n in range(200)]
    batch = begin(client, lines(*prompts), metadata={"k": "v"})
    assert (batch.status, batch.metadata) == ("validating", {"k": "v"})
    done = until(client, batch, "completed")
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (200, 196, 4)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    assert answers(client, done.output_file_id) == {f"c{n}": str(n) for n in range(200) if n % 50}
    assert answers(client, done.error_file_id) == {f"c{n}": "model_not_found" for n in range(0, 200, 50)}


def test_a_batch_that_another_process_held_a_moment_ago_waits_and_is_no_error(client, monkeypatch, caplog):
    refusals = iter([BatchHeld("held elsewhere")])

    def held_at_first(*arguments):
        if (refusal := next(refusals, None)) is not None:
            raise refusal
        return hold(*arguments)

    monkeypatch.setattr(work, "hold", held_at_first)
    monkeypatch.setattr(batch_runner, "RENEW_S", 0.1)
    done = until(client, begin(client, lines("say a")), "completed")
    assert (answers(client, done.output_file_id), done.error_file_id) == ({"c0": "a"}, None)
    assert next(refusals, None) is None
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_batch_that_cannot_begin_while_redis_is_away_reads_its_file_once(client, monkeypatch):
    outages = iter([RedisUnavailable("away")] * 3)
    read = []

    def away_at_first(*arguments):
        if (outage := next(outages, None)) is not None:
            raise outage
        return hold(*arguments)

    def counted(*arguments, **options):
        read.append(arguments)
        return InputFile(*arguments, **options)

    monkeypatch.setattr(work, "hold", away_at_first)
    monkeypatch.setattr(batch_runner, "InputFile", counted)
    done = until(client, begin(client, lines("say a")), "completed")
    assert answers(client, done.output_file_id) == {"c0": "a"}
    assert next(outages, None) is None
    assert len(read) == 1


def test_a_batch_whose_file_cannot_be_read_for_a_moment_is_tried_again(client, monkeypatch):
    faults = iter([OSError(errno.EMFILE, "Too many open files")])

    def unreadable_at_first(*arguments, **options):
        if (fault := next(faults, None)) is not None:
            raise fault
        return JsonLines(*arguments, **options)

    monkeypatch.setattr(batch_runner, "JsonLines", unreadable_at_first)
    monkeypatch.setattr(batch_runner, "_AGAIN_S", 0.1)
    monkeypatch.setattr(batch_runner, "_LOOK_S", 0.1)
    done = until(client, begin(client, lines("say a")), "completed", "failed")
    assert done.status == "completed"
    assert answers(client, done.output_file_id) == {"c0": "a"}
    assert next(faults, None) is None


def test_a_batch_whose_file_can_never_be_read_ends_when_it_is_canceled(client, monkeypatch):
    def unreadable(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(batch_runner, "JsonLines", unreadable)
    monkeypatch.setattr(batch_runner, "_AGAIN_S", 0.1)
    monkeypatch.setattr(batch_runner, "_LOOK_S", 0.1)
    batch = begin(client, lines("say a"))
    client.batches.cancel(batch.id)
    assert until(client, batch, "failed", "cancelled").status == "failed"
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_may_have_responses_which_nothing_keeps(client, store):
    bodies: list[dict[str, object]] = [
        {"input": "say a"},
        {"input": "say b", "store": True},
        *({"input": "say c", name: v} for name, v in ODD),
    ]
    rows = ({"custom_id": f"c{n}", "method": "POST", "url": RESPONSES} for n in range(len(bodies)))
    content = "".join(
        f"{json.dumps({**row, 'body': {'model': 'm', **body}})}\n" for row, body in zip(rows, bodies, strict=True)
    )
    done = until(client, begin(client, content.encode(), endpoint=RESPONSES), "completed")
    found = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: Response.model_validate(line["response"]["body"]).output_text for line in found}
    assert texts == {"c0": "a", "c1": "b"}
    assert answers(client, done.error_file_id) == {f"c{n + 2}": "unsupported_parameter" for n in range(len(ODD))}
    assert list((store / "responses").iterdir()) == []


def test_a_canceled_batch_keeps_the_answers_that_it_has(client):
    batch = begin(client, lines("say a", "wait"))
    end = time.monotonic() + 20
    while until(client, batch, "in_progress").request_counts.completed < 1:
        assert time.monotonic() < end
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = until(client, batch, "cancelled")
    assert answers(client, ended.output_file_id) == {"c0": "a"}
    assert answers(client, ended.error_file_id) == {"c1": "batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_goes_on_after_a_restart_and_no_line_runs_twice(serve, store, server_url, hand):
    with serving_at(server_url, batch_store=store) as first:
        client = first.client()
        batch = begin(client, lines("say a", "wait", "say c"))
        end = time.monotonic() + 20
        while until(client, batch, "in_progress").request_counts.completed < 2:
            assert time.monotonic() < end
        waiting = hand.wait_for_one()
    before = set(hand.all_jobs())
    client = serve(batch_store=store).client()
    assert until(client, batch, "in_progress").request_counts.completed == 2
    hand.finish(waiting, text="b")
    done = until(client, batch, "completed")
    assert answers(client, done.output_file_id) == {"c0": "a", "c1": "b", "c2": "c"}
    assert set(hand.all_jobs()) <= before


def test_two_servers_on_one_store_run_each_batch_once(serve, store):
    one, two = (serve(batch_store=store).client() for _ in range(2))
    batches = [begin(client, lines("say a", "say b")) for client in (one, two, one, two)]
    for batch in batches:
        done = until(one, batch, "completed")
        assert answers(two, done.output_file_id) == {"c0": "a", "c1": "b"}
    assert {batch.id for batch in one.batches.list(limit=2)} == {batch.id for batch in batches}


def test_a_batch_that_cannot_be_read_stops_no_other_and_is_named_once_in_the_log(client, store, tmp_path, caplog):
    (broken := tmp_path / f"batch_{'0' * 24}").mkdir()
    (broken / "batch.json").write_text("{")
    broken.rename(store / "batches" / broken.name)
    batch, other = (begin(client, lines("say a")) for _ in range(2))
    for each in (batch, other):
        until(client, each, "completed")
    (store / "batches" / other.id / "state.json").write_text("{")
    for _ in range(2):
        assert [found.id for found in client.batches.list()] == [batch.id]
    for unreadable in (broken.name, other.id):
        said = [record.levelname for record in caplog.records if unreadable in record.getMessage()]
        assert said == ["ERROR"]


def test_a_batch_that_is_over_its_time_has_expired(client, store, server_url, serve, hand):
    file = upload(client, lines("say a", "wait"))
    asked = {"endpoint": CHAT, "input_file_id": file.id, "completion_window": "1s"}
    batch = BatchStore(store).add("anybody", window_s=1, **asked)
    ended = until(client, batch, "expired")
    assert set(answers(client, ended.error_file_id)) >= {"c1"}
    assert ended.expired_at is not None


def test_a_batch_whose_lines_were_all_answered_is_completed_though_no_process_looked_until_after_its_window(
    serve, store, server_url, hand, monkeypatch
):
    with serving_at(server_url, batch_store=store) as first:
        client = first.client()
        batch = begin(client, lines("say a", "wait"))
        waiting = hand.wait_for_one()
        wait_for(lambda: hand.waiting() == [waiting], 20)
    hand.finish(waiting, text="b")
    two_days_later = SimpleNamespace(time=lambda: time.time() + 2 * 86_400, monotonic=time.monotonic)
    monkeypatch.setattr(batch_runner, "time", two_days_later)
    client = serve(batch_store=store).client()
    done = until(client, batch, "completed", "expired")
    assert (done.status, done.error_file_id) == ("completed", None)
    assert answers(client, done.output_file_id) == {"c0": "a", "c1": "b"}


def test_a_line_over_the_limit_of_a_call_fails_alone(serve, store):
    client = serve(batch_store=store, max_body_bytes=2000).client()
    batch = until(client, begin(client, lines("say x", "say " + "y" * 2000)), "completed")
    assert answers(client, batch.output_file_id) == {"c0": "x"}
    assert answers(client, batch.error_file_id) == {None: "invalid_json_line"}


def test_a_file_of_no_lines_or_too_many_fails_the_batch(client, monkeypatch):
    failed = until(client, begin(client, b"\n\n"), "failed")
    assert [error.code for error in failed.errors.data] == ["empty_file"]
    monkeypatch.setattr(batch_runner, "MAX_LINES", 2)
    failed = until(client, begin(client, lines("say x", "say y", "say z")), "failed")
    assert "over 2 lines" in failed.errors.data[0].message


def test_files_are_listed_read_and_deleted_but_not_while_a_batch_reads_them(client, hand):
    file = upload(client, lines("wait"))
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(lines("wait")), "batch")
    assert client.files.content(file.id).content == lines("wait")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.ConflictError):
        client.files.delete(file.id)
    client.batches.cancel(batch.id)
    until(client, batch, "cancelled")
    assert client.files.delete(file.id).deleted
    assert file.id not in {found.id for found in client.files.list()}
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_file_stays_while_it_is_unknown_whether_a_batch_reads_it(client, hand, monkeypatch):
    batch = begin(client, lines("wait"))

    def unreadable(self, batch_id):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as faulty:
        faulty.setattr(BatchStore, "state", unreadable)
        with pytest.raises(openai.InternalServerError):
            client.with_options(max_retries=0).files.delete(batch.input_file_id)
    hand.finish(hand.wait_for_one(), text="done")
    assert until(client, batch, "completed", "failed").status == "completed"


def test_two_deletions_of_a_file_at_the_same_moment_are_no_error(tmp_path):
    files = FileStore(tmp_path)
    file = files.add("owner", "name", "batch", lambda content: None)
    files.remove(file)
    files.remove(file)
    assert files.ids() == []


def test_lists_have_pages(client):
    made = [upload(client, b"%d" % n).id for n in range(5)]
    first = client.files.list(limit=2)
    assert first.has_more
    for limit in ("0", "\u0663", "9" * 5000):
        with pytest.raises(openai.BadRequestError):
            client.files.list(extra_query={"limit": limit})
    assert sorted(file.id for file in first) == sorted(made)  # iterating asks for the next pages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": ["/v1/chat/completions"]}, "endpoint"),
        ({"completion_window": "tomorrow"}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"extra_body": {"colour": 1}}, "colour"),
    ],
)
def test_a_batch_that_is_invalid_is_refused_by_the_fields_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        begin(client, lines("say a"), **fields)
    assert refused.value.param == param


def test_metadata_with_half_a_surrogate_pair_does_not_break_the_list(client):
    body = {"input_file_id": upload(client, lines("say a")).id, "endpoint": CHAT, "completion_window": "24h"}
    raw = json.dumps({**body, "metadata": {"k": "\ud83d"}})
    httpx.post(f"{client.base_url}batches", content=raw, headers={"content-type": "application/json"})
    assert [found.metadata for found in client.batches.list()] == [{"k": "\ud83d"}]


def test_uploads_that_cannot_be_batches_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match=r"expires_after.*until they are deleted"):
        client.files.create(file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-..")


def test_what_does_not_fit_on_the_disk_is_told_to_come_later(client, monkeypatch):
    file = upload(client, lines("say a"))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    for store in (FileStore, BatchStore):
        monkeypatch.setattr(store, "add", full)
    for call in (
        lambda: upload(client, lines("say a")),
        lambda: client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            call()
        assert (refused.value.status_code, refused.value.code) == (503, "no_space")


def test_nobody_sees_the_files_and_batches_of_another_token(serve, store):
    tokens = Tokens([("ann", "a" * 20), ("bob", "b" * 20)])
    serving = serve(batch_store=store, tokens=tokens)
    ann, bob = serving.client("a" * 20), serving.client("b" * 20)
    batch = begin(ann, lines("say a"))
    until(ann, batch, "completed")
    assert not list(bob.files.list())
    assert not list(bob.batches.list())
    for call in (
        lambda: bob.files.content(batch.input_file_id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_the_lines_of_a_batch_share_caches_with_calls_of_the_same_token_only(serve, store, hand):
    serving = serve(batch_store=store, tokens=Tokens([("ann", "a" * 20), ("bob", "b" * 20)]))
    salts = []
    for token in ("a" * 20, "b" * 20):
        client = serving.client(token)
        called = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "say x"}])
        batch = begin(client, lines("wait"))
        job_id = hand.wait_for_one()
        ids = (called.id.removeprefix("chatcmpl-"), job_id)
        salts.append([hand.request(one)["cache_salt"] for one in ids])
        hand.finish(job_id)
        until(client, batch, "completed")
    assert all(of_call == of_line for of_call, of_line in salts)
    assert salts[0] != salts[1]
