"""Rates and memory of `stoker batch run` for a large file, beside `submit_many` and waiting for the results.

Prints its results; it has no report. It uses the scripted engine, a private server, and a process for each side.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from stoker_worker.embedded_redis.server import EmbeddedServer

PROMPT = "Name the capital of the country in this line, and nothing else. " * 4
COMMAND = "from stoker.cli import main; main()"
BASELINE = """
import json, sys
from stoker import Producer
with Producer(sys.argv[1]) as producer:
    lines = [json.loads(text)["body"] for text in open(sys.argv[2])]
    requests = [{"agent_id": line.get("user"), "prompt": line["prompt"], "max_tokens": 8} for line in lines]
    tickets = producer.submit_many(requests)
    print(len(producer.results(tickets)))
"""


def write_lines(path: Path, count: int, agents: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            body = {"model": "scripted", "prompt": f"{PROMPT}{number}", "max_tokens": 8}
            if agents:
                body["user"] = f"agent {number % agents}"
            line = {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def peak_mib(pid: int) -> float:
    """The largest resident size of a process so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM")


@contextmanager
def worker(url: str, store: Path) -> Iterator["subprocess.Popen[bytes]"]:
    options = ["--engine", "scripted", "--scripted-steps-per-s", "100000", "--max-batch", "32"]
    command = [sys.executable, "-m", "stoker_worker", "run", "--redis", url, "--store", str(store), *options]
    process = subprocess.Popen(command, stderr=(store.parent / "worker.log").open("wb"))
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def timed(command: list[str], connection: Redis) -> tuple[float, float, list[float]]:
    """Seconds, peak MiB of the process, and samples of Redis' memory in MiB."""
    used: list[float] = []
    peaks: list[float] = []
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def watch() -> None:
        while process.poll() is None:
            used.append(connection.info("memory")["used_memory"] / 2**20)
            try:
                peaks.append(peak_mib(process.pid))
            except (OSError, RuntimeError):
                break
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    took = time.perf_counter() - begin
    watcher.join()
    if code:
        raise RuntimeError(f"{command} left with {code}")
    return took, max(peaks), used


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=100_000, help="of the large file; 0 for none")
    parser.add_argument("--agents", type=int, default=0, help="0: lines without an agent")
    parser.add_argument("--rounds", type=int, default=3, help="of both ways in turn")
    parser.add_argument("--compared", type=int, default=5000, help="lines of each in a round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large, small = folder / "large.jsonl", folder / "small.jsonl"
        write_lines(large, args.lines, args.agents)
        write_lines(small, args.compared, args.agents)
        with (
            EmbeddedServer(folder / "redis") as server,
            Redis.from_url(server.url) as connection,
            worker(server.url, folder / "store") as running,
        ):
            while not connection.exists("stoker:lease:generate"):
                if running.poll() is not None:
                    raise RuntimeError((folder / "worker.log").read_text())
                time.sleep(0.1)
            batch = [sys.executable, "-c", COMMAND, "--redis", server.url, "batch", "run"]
            for n in range(args.rounds):
                both = {
                    "submit_many + results": [sys.executable, "-c", BASELINE, server.url, str(small)],
                    "batch run": [*batch, str(small), "--out", str(folder / f"{n}.jsonl"), "--name", f"n{n}"],
                }
                for way, command in both.items():
                    took, peak, _ = timed(command, connection)
                    print(f"{way}: {args.compared / took:.0f} lines/s, producer {peak:.0f} MiB", flush=True)
                connection.delete(*connection.scan_iter("rq:job:*"), *connection.scan_iter("rq:results:*"))
                connection.delete("rq:finished:generate")
            if not args.lines:
                return
            took, peak, used = timed([*batch, str(large), "--out", str(folder / "out.jsonl")], connection)
            tenth = max(1, len(used) // 10)
            shown = ", ".join(f"{value:.1f}" for value in used[::tenth])
            print(f"{args.lines} lines: {args.lines / took:.0f} lines/s, producer {peak:.0f} MiB")
            print(f"worker {peak_mib(running.pid):.0f} MiB; Redis used, in MiB: {shown}; at the end {used[-1]:.1f}")
            print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
