"""docs/examples/producer.mjs, copied as it is: jobs from Node through a real worker. Needs node and npm."""

import json
import os
import subprocess

import pytest
from tests.support.lossy_proxy import LossyProxy
from tests.support.worker_process import running_worker

pytestmark = pytest.mark.server

PRELUDE = """
import { Redis } from "ioredis";
import { submit, result, cancel } from "./producer.mjs";
const redis = new Redis(process.env.STOKER_REDIS_URL);
const caught = (promise) => promise.catch(({ name, state, reason, message }) => ({ name, state, reason, message }));
const show = (value) => console.log(JSON.stringify(value));
"""


@pytest.fixture
def node(node_folder, redis_url):
    """Run some JavaScript beside the example, and return what it showed."""

    def run(script, url=redis_url):
        done = subprocess.run(
            ["node", "--input-type=module"], input=f"{PRELUDE}{script}\nredis.disconnect();", cwd=node_folder,
            env={**os.environ, "STOKER_REDIS_URL": url}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture
def worker(redis_url, tmp_path):
    with running_worker(redis_url, tmp_path / "store") as worker:
        yield worker.wait_until_ready()


def test_a_result_comes_back_and_a_failure_carries_the_workers_reason(node, worker):
    [finished, failed] = node("""
        const asks = (content) => submit(redis, { agent_id: "n", messages: [{ role: "user", content }] });
        show(await result(redis, await asks("say grüße")));
        show(await caught(result(redis, await asks("fail for a reason"))));
    """)
    assert (finished["text"], finished["finish_reason"], finished["agent_id"]) == ("grüße", "stop", "n")
    assert (failed["name"], failed["state"]) == ("JobEnded", "failed")
    assert "for a reason" in failed["reason"]


def test_waiting_and_running_jobs_are_canceled(node, worker):
    shown = node("""
        const long = { agent_id: "c", prompt: "x", max_tokens: 100000 };
        const running = await submit(redis, long), waiting = await submit(redis, long);
        while ((await redis.hget(`rq:job:${running}`, "status")) !== "started") await redis.ping();
        show(await cancel(redis, waiting));
        show(await cancel(redis, running));
        show(await caught(result(redis, waiting)));
        show(await caught(result(redis, running)));
        show(await cancel(redis, running));
        show(await caught(cancel(redis, "nobody")));
    """)
    assert shown[:2] == [True, True]
    assert [error["state"] for error in shown[2:4]] == ["canceled", "canceled"]
    assert (shown[4], shown[5]["state"]) == (False, "missing")


def test_a_chosen_id_makes_one_job_however_often_it_is_submitted(node, connection, producer):
    shown = node("""
        const request = { agent_id: "i", prompt: "say once" };
        const same = Array.from({ length: 10 }, () => submit(redis, request, { jobId: "mine" }));
        show(await Promise.all(same));
        show(await caught(submit(redis, { agent_id: "i", prompt: "other" }, { jobId: "mine" })));
        show(await caught(result(redis, "mine", { timeoutMs: 10 })));
        show(await caught(submit(redis, request, { jobId: "not an id" })));
    """)
    assert shown[0] == ["mine"] * 10
    assert "names a job with another request" in shown[1]["message"]
    assert "still queued" in shown[2]["message"]
    assert "letters" in shown[3]["message"]
    assert connection.lrange("rq:queue:generate", 0, -1) == [b"mine"]
    assert producer.ticket("mine").status().position == 0


def test_a_lost_reply_makes_no_second_job(node, connection):
    with LossyProxy(connection.connection_pool.connection_kwargs["port"]) as proxy:
        proxy.lose(lambda exchange: exchange.is_transaction and exchange.holds("RPUSH"))
        [job_id] = node('show(await submit(redis, { prompt: "x" }));', proxy.url)
    assert connection.lrange("rq:queue:generate", 0, -1) == [job_id.encode()]
