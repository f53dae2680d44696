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
from contextlib import suppress
from pathlib import Path

from common import rss_mib
from redis import Redis
from worker_process import SCRIPTED, WorkerProcess

from stoker_worker.embedded_redis import EmbeddedServer

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


def timed(command: list[str], connection: Redis) -> tuple[float, float, list[float]]:
    """Seconds, most MiB of the process, and samples of Redis' memory in MiB."""
    used: list[float] = []
    peaks: list[float] = []
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def watch() -> None:
        while process.poll() is None:
            used.append(connection.info("memory")["used_memory"] / 2**20)
            with suppress(subprocess.CalledProcessError):  # it has just ended
                peaks.append(rss_mib(process.pid))
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
            WorkerProcess(server.url, folder / "store", *SCRIPTED, "--max-batch", "32") as running,
        ):
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
            print(f"worker {rss_mib(running.pid):.0f} MiB; Redis used, in MiB: {shown}; at the end {used[-1]:.1f}")
            print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
