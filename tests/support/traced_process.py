"""A program of ours, run in this process while a profiler notes each product file that it enters, in order.

    python -m tests.support.traced_process FOLDER worker|producer ARGUMENT...

The phases of a worker are files in FOLDER that the test makes: functions that run before ``job`` exists, in an idle
worker, do not count, and after ``done`` nothing does. The files entered go to ``FOLDER/entered``, a line each.
"""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(f"{ROOT / side}/" for side in ("shared", "producer", "worker"))


class Trace:
    """The product's functions by the phase in which they ran first."""

    def __init__(self) -> None:
        self.phase = 0
        self._first: dict[Any, int] = {}

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in self._first and code.co_filename.startswith(PRODUCT):
            self._first[code] = self.phase

    def start(self) -> None:
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)

    def files(self) -> list[str]:
        """Those with a function that ran in the job's phase only, in the order of their first call; no imports."""
        codes = [code for code, phase in self._first.items() if phase == 1 and code.co_name != "<module>"]
        return list(dict.fromkeys(str(Path(code.co_filename).relative_to(ROOT)) for code in codes))


def follow_phases(folder: Path, trace: Trace) -> None:
    """On a thread of its own; the test waits for what it writes."""
    pause = threading.Event()
    while not (folder / "job").exists():
        pause.wait(0.05)
    trace.phase = 1
    (folder / "noting").touch()
    while not (folder / "done").exists():
        pause.wait(0.05)
    trace.phase = 2
    (folder / "entered.part").write_text("\n".join(trace.files()))
    (folder / "entered.part").rename(folder / "entered")


def run_worker(folder: Path, arguments: list[str]) -> None:
    from stoker_worker.cli.main import main

    trace = Trace()
    threading.Thread(target=follow_phases, args=(folder, trace), daemon=True).start()
    trace.start()
    main(arguments)


def run_producer(folder: Path, redis_url: str) -> None:
    from stoker import Producer

    trace = Trace()
    trace.phase = 1
    trace.start()
    producer = Producer(redis_url)
    for source in ("none", "disk"):
        result = producer.submit(agent_id="followed", prompt="word " * 300, context="append").result(timeout_s=60)
        assert result.cache.saved
        assert result.cache.source == source
    sys.setprofile(None)
    (folder / "entered").write_text("\n".join(trace.files()))


if __name__ == "__main__":
    _, where, side, *rest = sys.argv
    if side == "worker":
        run_worker(Path(where), rest)
    else:
        run_producer(Path(where), *rest)
