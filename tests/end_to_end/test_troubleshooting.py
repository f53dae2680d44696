"""Every message of docs/troubleshooting.md, provoked as a user or an operator meets it, in the order of the page.

A row without a case, a case without a row, and a message in other words all fail. "..." in a row is any text.
"""

import json
import re
import shlex
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from rq import Callback, Retry
from rq.serializers import DefaultSerializer
from rq.webhook import Webhook
from tests.end_to_end.refused_jobs import (
    answer_not_kept,
    damaged_agent,
    lost_job,
    plain_job,
    raised,
    refused_guide,
    refused_length,
)
from tests.end_to_end.worker_logs import (
    broken_log,
    crash_log,
    forgetful_log,
    lost_data_log,
    outage_log,
    overfull_log,
    standby_log,
    stopped_log,
    unsaved_log,
)  # fmt: skip
from tests.producer.serve.conftest import serving_at
from tests.support.private_server import free_port
from tests.support.worker_process import fork_server, running_worker
from tests.worker.memory.agents import ids, using
from tests.worker.memory.replica.sharing import Machine, SharedFolder

from stoker.serve.settings import Tokens
from stoker_shared.errors import StokerError
from stoker_shared.task import generate
from stoker_worker.cli.main import main
from stoker_worker.embedded_redis import EmbeddedServer
from stoker_worker.memory.database import Witness
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.pipeline.wakefulness import Wakefulness

pytestmark = [pytest.mark.server, pytest.mark.scheduled]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
TITLES = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)


def rows(title):
    [section] = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)


def expect_rows(title, provoked):
    """`provoked`: what was printed, logged or raised, for each row of the section."""
    expected = rows(title)
    patterns = [".+".join(re.escape(part) for part in row.split("...")) for row in expected]
    differing = [
        f"the page has {row!r}, but this was provoked:\n{text}\n"
        for row, pattern, text in zip(expected, patterns, provoked, strict=False)
        if not re.search(pattern, text)
    ]
    assert not differing, "\n".join(differing)
    assert len(provoked) == len(expected), "rows and cases do not match"


@pytest.fixture
def said(tmp_path):
    """Run a command line to its end; returns its stderr."""
    n = 0

    def run(line, **env):
        nonlocal n
        n += 1
        program, *arguments = shlex.split(line)
        command = fork_server().run(
            arguments, tmp_path / f"said-{n}", program=program, env={"HOME": str(tmp_path), **env}
        )
        assert command.wait() in (1, 2), f"{line}\n{command.log}"
        return command.log.strip().splitlines()[-1]

    return run


@pytest.fixture
def store(tmp_path):
    """A store with one agent, `a`."""
    with using(tmp_path / "store") as agent:
        agent("a").say(ids(300))
    return tmp_path / "store"


def test_every_section_of_the_page_has_a_test():
    assert TITLES == [
        "The worker does not start", "In the worker's log", "A job failed", "Submitting and waiting",
        "`stoker serve`", "A shared store", "The commands about memory", "The service",
    ]  # fmt: skip


def test_the_worker_does_not_start(said, store, redis_url, tmp_path, monkeypatch):
    run = "stoker-worker run --engine scripted"
    (tmp_path / "worker.toml").write_text("modle = 1")
    (tmp_path / "half").mkdir()
    (tmp_path / "no-adapter").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    user = redis_url.replace("redis://", "redis://nobody:wrong@")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "stoker_worker.cli.log_lines", None)
        packages = CliRunner().invoke(main, ["run", "--engine", "scripted"]).output
    provoked = [
        said("stoker-worker run"),
        said(run, STOKER_STOER="x"),
        said(f"{run} --config {tmp_path / 'worker.toml'}"),
        packages,
        said("stoker-worker run --model ./nowhere"),
        said("stoker-worker run --model nowhere"),
        said(f"stoker-worker run --model nobody/nothing --redis {redis_url} --store {tmp_path / 'hub'}",
             HF_HUB_OFFLINE="1"),
        said("stoker-worker run --model ./model.gguf"),
        said(f"stoker-worker run --model {tmp_path / 'half'}"),
        said(f"stoker-worker run --model {model} --adapter {tmp_path / 'no-adapter'}"),
        said(f"{run} --redis redis://127.0.0.1:{free_port()} --store {tmp_path / 'new'}"),
        said(f"{run} --redis {user} --store {tmp_path / 'new'}"),
        said(f"{run} --redis 127.0.0.1 --store {tmp_path / 'new'}"),
    ]  # fmt: skip
    with EmbeddedServer(tmp_path / "new" / "redis") as server:
        provoked.append(said(f"{run} --redis embedded --redis-port {free_port()} --store {tmp_path / 'new'}"))
        taken = server.url.rpartition(":")[2]
        provoked.append(said(f"{run} --redis embedded --redis-port {taken} --store {tmp_path / 'second'}"))
    with running_worker(redis_url, store, "--name", "mac") as worker:
        worker.wait_until_ready()
        provoked.append(said(f"{run} --redis {redis_url} --store {tmp_path / 'new'} --name mac"))
        provoked.append(said(f"{run} --redis {redis_url} --store {tmp_path / 'new'} --name another"))
        provoked.append(said(f"{run} --redis {redis_url} --store {tmp_path / 'new'} --standby"))
        provoked.append(said(f"{run} --redis {redis_url} --queues other --store {store}"))
    copy, shared = tmp_path / "copy", ("--queues", "shared", "--shared-store", f"file://{tmp_path / 'share'}")
    copy.mkdir()
    (tmp_path / "share").mkdir()
    with running_worker(redis_url, tmp_path / "first", *shared) as worker:
        worker.wait_until_ready()
        (copy / "worker-name").write_text((tmp_path / "first" / "worker-name").read_text())
        provoked.append(said(f"{run} --redis {redis_url} --store {copy} --name copy {' '.join(shared)}"))
    provoked += [
        said(f"{run} --redis embedded --store /dev/null/store"),
        said(f"{run} --redis {redis_url} --store /dev/null/store"),
    ]
    database = store / "agents.db"
    content = database.read_bytes()
    with closing(sqlite3.connect(tmp_path / "first" / "agents.db")) as connection:
        connection.execute("PRAGMA user_version=7")
    provoked.append(said(f"{run} --redis {redis_url} --store {tmp_path / 'first'}"))
    database.write_bytes(b"\0" * 200 + content[200:])
    provoked.append(said(f"{run} --redis {redis_url} --store {store}"))
    database.unlink()
    provoked.append(said(f"{run} --redis {redis_url} --store {store}"))
    Witness(store).path.unlink()
    provoked.append(said(f"{run} --redis {redis_url} --store {store}"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        provoked.append(said(f"{run} --metrics-port {port} --redis {redis_url} --store {tmp_path / 'third'}"))
    expect_rows("The worker does not start", provoked)


def test_in_the_workers_log(redis_url, tmp_path, caplog, small_disk):
    outage, forgetful, crashed = outage_log(tmp_path), forgetful_log(tmp_path), crash_log(redis_url, tmp_path)
    unsaved, _ = unsaved_log(redis_url, small_disk)
    lost = lost_data_log(redis_url, tmp_path)
    with caplog.at_level("WARNING"):
        Wakefulness(["/no/caffeinate"]).look(has_jobs=True)
    expect_rows("In the worker's log", [
        outage, outage, outage,
        standby_log(tmp_path),
        forgetful, forgetful,
        crashed, crashed,
        broken_log(redis_url, tmp_path),
        stopped_log(redis_url, tmp_path),
        lost, lost, lost,
        unsaved, unsaved,
        overfull_log(redis_url, tmp_path),
        caplog.text,
    ])  # fmt: skip


@pytest.fixture
def worker(redis_url, tmp_path):
    with running_worker(redis_url, tmp_path / "jobs") as worker:
        yield worker.wait_until_ready()


def test_a_job_failed(worker, producer, connection, redis_url, tmp_path, small_disk):
    pytest.importorskip("obstore")

    def ask(**fields):
        return producer.submit(**{"max_tokens": 2, **fields}).result(timeout_s=60)

    def fails(**fields):
        return raised(ask, **fields)

    newer = {"kwargs": {"request": {"v": 99, "prompt": "x"}}}
    ask(agent_id="a", prompt="x")
    provoked = [
        fails(prompt="x", temperature=-1),
        plain_job(connection, **newer),
        fails(prompt="x", max_tokens=1 << 20),
        fails(prompt="x" * (6 << 20)),
        refused_length(),
        fails(prompt="x", model="another"),
        fails(messages=[{"role": "user", "content": "\x01"}]),
        refused_guide(),
        fails(agent_id="a", context="append", messages=[{"role": "user", "content": "x"}]),
        plain_job(connection, serializer=DefaultSerializer),
        plain_job(connection, "another.function"),
        plain_job(connection, on_success=Callback("another.function")),
        plain_job(connection, webhooks=[Webhook("http://127.0.0.1:9/", "failed")]),
        plain_job(connection, retry=Retry(max=1, interval=10**11)),
        damaged_agent(tmp_path / "jobs", ask),
        unsaved_log(redis_url, small_disk)[1],
        fails(agent_id="a", prompt="x", context="append", expect_version=7),
        answer_not_kept(tmp_path / "forgetful"),
        raised(producer.agents.fork, "nobody", "b"),
        raised(producer.agents.fork, "a", "a"),
        fails(prompt="x", max_tokens=100_000, job_timeout_s=1),
        lost_job(redis_url, tmp_path),
        fails(prompt="fail for a reason"),
        raised(generate, request={}),
    ]
    expect_rows("A job failed", provoked)


def test_submitting_and_waiting(said, redis_url, producer, connection, tmp_path):
    submit = f"stoker submit --redis {redis_url}"
    producer.submit(prompt="x", job_id="mine")
    canceled = producer.submit(prompt="x")
    canceled.cancel()
    (tmp_path / "notes").write_text("notes")
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions",
                                                   "body": {"model": "m", "prompt": "x"}}))  # fmt: skip
    batch = f"stoker batch run {tmp_path / 'in.jsonl'} --redis {redis_url} --any-model --out"
    connection.set("rq:job:other", "x")
    expect_rows("Submitting and waiting", [
        said(f"stoker submit --message x --redis redis://127.0.0.1:{free_port()}"),
        said(f"stoker status other --redis {redis_url}"),
        said(f"{submit} --message x --queue unserved --wait --timeout-s 0.1"),
        said(f"{submit} --message x --models nobody"),
        said(f"{submit} --message x --job-id mine"),
        said(f"stoker result nothing --redis {redis_url}"),
        said(f"stoker result {canceled.job_id} --redis {redis_url}"),
        said(f"stoker result mine --timeout-s 0.1 --redis {redis_url}"),
        said(submit),
        said(f"{batch} /dev/null"),
        said(f"{batch} {tmp_path / 'notes'}"),
    ])  # fmt: skip


def test_stoker_serve(said, redis_url, tmp_path):
    def asked(**headers):
        return httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "x"}, headers=headers).text

    tokens, token = tmp_path / "tokens", "0123456789abcdef" * 3
    serve = f"stoker serve --redis {redis_url}"
    tokens.write_text("")
    provoked = [said(f"{serve} --bind 0.0.0.0"), said(f"{serve} --token-file {tokens}")]
    tokens.write_text("me short")
    provoked.append(said(f"{serve} --token-file {tokens}"))
    tokens.write_text(f"me {token}")
    with serving_at(redis_url, tokens=Tokens.from_file(tokens)) as serving:
        url = serving.url
        provoked += [asked(), asked(Authorization=f"Bearer {token}")]
        with running_worker(redis_url, tmp_path / "store") as worker:
            worker.wait_until_ready()
            found = httpx.get(f"{url}/v1/models/nobody", headers={"Authorization": f"Bearer {token}"})
            provoked.append(found.text)
    expect_rows("`stoker serve`", provoked)


def test_a_shared_store(said, store, redis_url, producer, tmp_path, monkeypatch, caplog):
    pytest.importorskip("obstore")
    share, provoked = SharedFolder(tmp_path), []

    def refused(call):
        with pytest.raises(StokerError) as caught:
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    def agent(folder):
        return Machine(tmp_path / folder, share).agent("a")

    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "obstore", None)
        provoked.append(refused(lambda: agent("without")))
    provoked.append(said(f"stoker-worker run --engine scripted --store {tmp_path / 'ftp'} --shared-store ftp://a/b"))
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "create", lambda *_: True)
        provoked.append(refused(agent("overwriting").store.meet))
    run = f"stoker-worker run --engine scripted --redis {redis_url} --store"
    provoked.append(said(f"{run} {store} --shared-store {share.url}"))
    one = agent("one")
    one.say(ids(300))
    one.store.close()
    provoked.append(said(f"{run} {tmp_path / 'one'}"))
    one = agent("one")
    one.store.look("a")
    share.go_away()
    refused(lambda: one.say(ids(310)))
    provoked.append(caplog.text)
    caplog.clear()
    one.store.close()
    share.objects.mkdir()
    refused(lambda: agent("one").store.look("a"))
    provoked.append(caplog.text)
    share.objects.rmdir()
    share.come_back()
    (tmp_path / "other").mkdir()
    with running_worker(redis_url, tmp_path / "mac1", "--shared-store", share.url) as worker:
        worker.wait_until_ready()
        producer.submit(agent_id="b", prompt="x", max_tokens=1).result(timeout_s=60)
    provoked.append(said(f"{run} {tmp_path / 'mac2'} --shared-store file://{tmp_path / 'other'}"))
    next((share.objects / "agents").rglob("*.json")).write_bytes(b"")
    provoked.append(refused(lambda: agent("four").store.look("a")))
    expect_rows("A shared store", provoked)


def test_the_commands_about_memory(said, store, redis_url, producer, tmp_path):
    memory = "stoker-worker memory"
    (tmp_path / "text").write_text("text")
    provoked = [said(f"{memory} ls --store {tmp_path / 'nowhere'}")]
    ticket = producer.submit(agent_id="a", prompt="x", max_tokens=100_000)
    with running_worker(redis_url, store, env={"STOKER_GRACE_S": "0"}) as worker:
        worker.wait_for(lambda: (ticket.status().tokens or 0) > 0)
        provoked.append(said(f"{memory} rm a --yes --store {store}"))
        provoked.append(said(f"{memory} salvage --store {store}"))
    provoked += [
        said(f"{memory} rollback a --to 9 --store {store}"),
        said(f"{memory} backup {tmp_path / 'text'} --store {store}"),
        said(f"{memory} restore {tmp_path / 'text'} --store {store}"),
        said(f"{memory} salvage --store {tmp_path / 'nowhere'}"),
        said(f"{memory} import {tmp_path / 'text'} --store {store}"),
    ]
    expect_rows("The commands about memory", provoked)


def test_the_service(tmp_path, monkeypatch):
    def service(*words):
        return CliRunner().invoke(main, ["service", *words]).output

    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    install = ("install", "--", "--engine", "scripted")
    provoked = [service(*install)]
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2; exit 1")
    systemctl.chmod(0o755)
    provoked.append(service(*install))
    systemctl.write_text("#!/bin/sh\nexit 0")
    provoked.append(service("logs"))
    expect_rows("The service", provoked)
