"""Jobs go on from one model to another while workers are killed and connections are cut: each job has one result, and
each verdict counts once.

Each job has a class of tasks of its own, so `TRUST_KEY` shows every verdict. ``CHAOS=long`` (`make chaos`): 2,000 jobs.
"""

import os
import random
import time
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from redis import Redis
from tests.end_to_end.macs import LEASE_S, Macs
from tests.support.lossy_proxy import LossyProxy
from tests.support.wait import wait_for

from stoker import Producer
from stoker_shared.errors import RedisUnavailable
from stoker_shared.wire import TRUST_KEY

pytestmark = [pytest.mark.server, pytest.mark.slow]

pytest.importorskip("obstore")

LONG = os.environ.get("CHAOS") == "long"
N_JOBS, N_EPISODES, CALM_S = (2000, 20, 900) if LONG else (60, 3, 60)
N_WORKERS = 4  # two of each model
SMALL, LARGE = "model0", "model1"
CHECK = {"contains": ["yes"]}
VERDICTS = {
    "say yes": [(SMALL, True)],
    f"if {LARGE} say yes else no": [(SMALL, False), (LARGE, True)],
    "say no": [(SMALL, False), (LARGE, False)],
}
"""Prompts, and the verdicts on the models' answers to them."""


class Traffic:
    """Attributes:
    sent: prompt by job id.
    """

    def __init__(self, producer, queues, chance):
        self.producer, self.chance, self.sent = producer, chance, {}
        self.route = [{"model": model, "queue": queue} for model, queue in zip((SMALL, LARGE), queues, strict=True)]

    def send(self, n_jobs):
        for number in range(len(self.sent), len(self.sent) + n_jobs):
            job_id, prompt = f"job-{number}", self.chance.choice(list(VERDICTS))
            self.sent[job_id] = prompt
            asked = {"prompt": f"{number}\n{prompt}", "max_tokens": 20, "check": CHECK}
            self.submit(**asked, route=self.route, task=task_of(job_id), job_id=job_id)

    def submit(self, **fields):
        """Again and again: under its id a job is enqueued once."""
        while True:
            with suppress(RedisUnavailable):
                return self.producer.submit(**fields)


def task_of(job_id):
    return f"of-{job_id}"


def rage(crew, proxy, chance, number):
    """Replies to verdicts are lost, connections are cut, one or two workers are killed: all at any moment."""
    proxy.lose(lambda exchange: exchange.is_write and exchange.holds(TRUST_KEY), times=1 + chance.randrange(4))
    time.sleep(chance.uniform(0, 0.4))
    if number % 2:
        proxy.cut_all()
    killed = chance.sample(range(N_WORKERS), chance.choice((1, 1, 2)))
    for n in killed:
        crew.kill(n)
    time.sleep(chance.choice((0, 0.3, 2 * LEASE_S)))
    for n in killed:
        crew.replace(n)
    crew.see_to_all()


@pytest.mark.timeout(1800 if LONG else 180)
def test_each_job_has_one_result_and_each_verdict_counts_once(redis_url, tmp_path):
    chance, queues = random.Random(19), ("small", "large")
    (tmp_path / "shared").mkdir()
    each = [("--model", model, "--queues", queue) for model, queue in zip((SMALL, LARGE), queues, strict=True)]
    with (
        Redis.from_url(redis_url) as connection,
        LossyProxy(urlsplit(redis_url).port) as proxy,
        Producer(proxy.url) as producer,
    ):
        shared = ("--shared-store", f"file://{tmp_path / 'shared'}")
        crew = Macs(proxy.url, tmp_path, N_WORKERS, *shared, each=each, env={"STOKER_POLL_S": "0.1"})
        traffic = Traffic(producer, queues, chance)
        try:
            crew.wait_until_ready()
            traffic.send(N_JOBS // 2)
            for number in range(N_EPISODES):
                rage(crew, proxy, chance, number)
                traffic.send(N_JOBS // 2 // N_EPISODES)
            proxy.spare_all()
            wait_for(lambda: is_over(crew, connection, traffic), CALM_S, crew.logs)
        finally:
            crew.end()
        assert any(exchange.holds(TRUST_KEY) for exchange in proxy.lost)
        check_results(connection, traffic)
        for pattern in ("rq:queue:*", "rq:wip:*", "rq:execution*"):
            assert connection.keys(pattern) == [], pattern


def is_over(crew, connection, traffic):
    crew.see_to_all()
    time.sleep(0.1)
    return connection.exists(*map("rq:results:{}".format, traffic.sent)) == len(traffic.sent)


def check_results(connection, traffic):
    expected = {}
    for job_id, prompt in traffic.sent.items():
        result = traffic.producer.ticket(job_id).result(timeout_s=1)
        assert [(tried.model, tried.accepted) for tried in result.attempts] == VERDICTS[prompt], job_id
        assert connection.xlen(f"rq:results:{job_id}") == 1
        expected |= {f"{task_of(job_id)} {model}": f"{yes:.4f} {not yes:.4f}" for model, yes in VERDICTS[prompt]}
    counted = {field.decode(): counts.decode() for field, counts in connection.hgetall(TRUST_KEY).items()}
    assert counted == expected
