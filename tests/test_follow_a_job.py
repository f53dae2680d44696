"""How many files of the product a job enters, from ``Producer.submit`` to its result and its durable turn.

Whoever follows a job has to read these. The limits only ever go down; ``pytest -s`` prints the files in their order.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.traced_process import ROOT
from tests.support.worker_process import WorkerProcess

MOST_IN_PRODUCER = 14
MOST_IN_WORKER = 45

IDLE_S = 3
"""Long enough for each thing that an idle worker does, by the settings below."""
SETTINGS = {"STOKER_HEARTBEAT_S": "0.2", "STOKER_LEASE_TTL_S": "5", "STOKER_RECOVER_S": "0.3"}

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_a_job_enters_few_files(redis_url: str, tmp_path: Path) -> None:
    """Two turns of one agent; the second one restores the cache of the first from disk."""
    worker_side, producer_side = tmp_path / "worker", tmp_path / "producer"
    worker_side.mkdir()
    producer_side.mkdir()
    arguments = ["--redis", redis_url, "--store", str(tmp_path / "store"), "--engine", "scripted"]
    worker = WorkerProcess(
        [*arguments, "--memory-max-bytes", "0"],
        tmp_path / "worker.log",
        SETTINGS,
        program=("tests.support.traced_process", str(worker_side), "worker"),
    )
    try:
        worker.wait_until_ready()
        time.sleep(IDLE_S)
        (worker_side / "job").touch()
        worker.wait_for((worker_side / "noting").exists)
        command = [sys.executable, "-m", "tests.support.traced_process", str(producer_side), "producer", redis_url]
        subprocess.run(command, check=True, cwd=ROOT, timeout=120)
        (worker_side / "done").touch()
        worker.wait_for((worker_side / "entered").exists)
    finally:
        worker.kill()
    in_producer = (producer_side / "entered").read_text().splitlines()
    in_worker = (worker_side / "entered").read_text().splitlines()
    print(*in_producer, "", *in_worker, "", f"{len(in_producer)} and {len(in_worker)} files", sep="\n")
    assert len(in_producer) <= MOST_IN_PRODUCER, in_producer
    assert len(in_worker) <= MOST_IN_WORKER, in_worker
