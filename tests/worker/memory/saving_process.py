"""A process that saves turns of many agents from several threads until it is killed, and writes each that is saved.

python -m tests.worker.memory.saving_process STORE ROUND
"""

import sys
import threading
from itertools import count
from pathlib import Path

from tests.worker.memory.agents import Agent, ids

from stoker_worker.memory.store import AgentCacheStore

THREADS, AGENTS = 8, 4
"""Agents of each thread."""


def main(folder: Path, round_: str) -> None:
    store = AgentCacheStore(folder, max_bytes=3 << 20)
    output = threading.Lock()

    def save(thread: int) -> None:
        agents = [Agent(store, f"{thread}/{number}", jobs=count(1_000_000 * int(round_))) for number in range(AGENTS)]
        for turn_number in count():
            agent = agents[turn_number % AGENTS]
            turn = agent.turn((*agent.tokens(), *ids(40, seed=thread)))
            store.save(turn)
            with output:
                print(agent.name, turn.version, turn.delivery.job_id, flush=True)

    threads = [threading.Thread(target=save, args=(thread,), daemon=True) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    threads[0].join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
