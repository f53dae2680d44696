"""Files damaged while no worker runs: lost cache costs time, a lost version fails `append` jobs, no answer is wrong."""

import itertools
import shutil
import sqlite3
from contextlib import closing

import pytest
from tests.support.worker_process import running_worker

from stoker import Producer
from stoker_shared.errors import JobFailed
from stoker_worker.memory import transcripts
from stoker_worker.memory.store_parts import opened

pytestmark = pytest.mark.server

WORDS = "a sentence of some length that fills a block. " * 8


def flip(path, other):
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": flip,
    "cut short": lambda path, other: path.write_bytes(path.read_bytes()[:-5]),
    "removed": lambda path, other: path.unlink(),
    "another's": lambda path, other: shutil.copy(other, path),
}
FAULTS = {"flipped": "corrupt", "cut short": "corrupt", "removed": "missing", "another's": "foreign"}
ROWS = {
    "version 1": "UPDATE turns SET new_tokens = substr(new_tokens, 5) WHERE version = 1 AND agent = ({})",
    "version 2": "DELETE FROM turns WHERE version = 2 AND agent = ({})",
    "agent": "UPDATE agents SET version = 1 WHERE number = ({})",
}
AGENTS = [
    *itertools.product(("append", "full"), ("block", "tail"), DAMAGES),
    *itertools.product(("append", "full"), ROWS, ["row"]),
]


def file_of(store, agent_id, what):
    with opened(store) as parts, parts.database.snapshot() as connection:
        version = transcripts.read_agent(connection, agent_id).version
        if what == "block":
            return parts.blocks.path_of(version.cache.model, version.cache.last_block)
        return parts.pieces.paths(agent_id, version.number)[0]


def ask(producer, context, what, how, turn):
    prompt = f" {turn}"
    if context == "full":
        prompt = f"{context} {what} {how} {WORDS}" + "".join(f" {n}" for n in range(turn + 1))
    elif turn == 0:
        prompt = f"{context} {what} {how} {WORDS} 0"
    return producer.submit(agent_id=f"{context} {what} {how}", prompt=prompt, context=context, max_tokens=8)


def damage(store, whole):
    for context, what, how in AGENTS:
        agent_id = f"{context} {what} {how}"
        if what in ROWS:
            with closing(sqlite3.connect(store / "agents.db")) as connection, connection:
                sql = ROWS[what].format("SELECT number FROM agents WHERE agent_id = ?")
                assert connection.execute(sql, (agent_id,)).rowcount == 1
            continue
        another = f"{'full' if context == 'append' else 'append'} {what} {how}"
        DAMAGES[how](file_of(store, agent_id, what), file_of(whole, another, what))


def run(producer, redis_url, folder, log_name, turns):
    tickets = [{agent: ask(producer, *agent, turn) for agent in AGENTS} for turn in turns]
    with running_worker(redis_url, folder, "--burst", "--max-batch", "32", log_name=log_name) as worker:
        assert worker.wait() == 0, worker.log
    return tickets


def test_damage_is_a_named_miss_or_a_refused_append_and_never_a_wrong_answer(redis_url, tmp_path):
    producer, store = Producer(redis_url), tmp_path / "store"
    run(producer, redis_url, store, "first.log", (0, 1))
    shutil.copytree(store, tmp_path / "whole")
    damage(store, tmp_path / "whole")
    (damaged,) = run(producer, redis_url, store, "damaged.log", (2,))
    (whole,) = run(producer, redis_url, tmp_path / "whole", "whole.log", (2,))
    for agent, ticket in damaged.items():
        context, what, how = agent
        right = whole[agent].result(timeout_s=1)
        if context == "append" and what in ROWS:
            with pytest.raises(JobFailed, match="AgentTranscriptUnreadable"):
                ticket.result(timeout_s=1)
            continue
        result = ticket.result(timeout_s=1)
        assert (result.text, result.usage.prompt_tokens) == (right.text, right.usage.prompt_tokens), agent
        assert right.cache.source in ("memory", "disk")  # some were read ahead
        assert (right.cache.miss_reason, result.cache.saved) == (None, True)
        if what in ROWS:
            assert result.cache.miss_reason == "transcript_unreadable"
        else:
            assert result.cache.miss_reason == f"{what}_{FAULTS[how]}", agent
            assert result.usage.cached_tokens < right.usage.cached_tokens
