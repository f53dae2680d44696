"""The readers of a chaos run: `rq info` and the dashboard, to compare with the registries. They write nothing."""

import json
import re
import subprocess
import sys
from urllib.request import urlopen

from redis import Redis
from tests.chaos.plan import QUEUES

Counts = dict[str, tuple[int, int, int, int]]


def by_registries(connection: Redis) -> Counts:
    """Queued, started, finished and failed jobs of each queue."""
    with connection.pipeline(transaction=True) as pipeline:
        for queue in QUEUES:
            pipeline.llen(f"rq:queue:{queue}")
            for kind in ("wip", "finished", "failed"):
                pipeline.zcard(f"rq:{kind}:{queue}")
        found = iter(pipeline.execute())
    return {queue: (next(found), next(found), next(found), next(found)) for queue in QUEUES}


def by_rq_info(redis_url: str) -> Counts:
    command = [sys.executable, "-m", "rq.cli", "info", "--raw", "--only-queues", "--url", redis_url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"queue (\S+) (\d+), (\d+) executing, (\d+) finished, (\d+) failed", said)
    found = {name: tuple(map(int, counts)) for name, *counts in lines}
    return {queue: found.get(queue, (0, 0, 0, 0)) for queue in QUEUES}  # type: ignore[misc]


def by_dashboard(page: str) -> Counts:
    with urlopen(f"{page}/0/data/queues.json", timeout=20) as answer:
        queues = {queue["name"]: queue for queue in json.load(answer)["queues"]}
    kinds = ("", *(f"{kind}_job_registry_" for kind in ("started", "finished", "failed")))
    return {queue: tuple(queues[queue][f"{kind}count"] for kind in kinds) for queue in QUEUES}
