"""Files damaged while no worker runs: lost cache costs time, a lost record fails `append` jobs, no answer is wrong."""

import itertools
import shutil
from typing import Literal

import pytest
from tests.worker_process import running_worker

from stoker import Producer
from stoker_shared.errors import JobFailed
from stoker_worker.memory.access import look_at

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
FILES = ("block", "tail", "00000001.json", "00000002.json", "HEAD")
AGENTS = list(itertools.product(("append", "full"), FILES, DAMAGES))


def file_of(store, agent_id, what):
    access = look_at(store)
    folder = access.agent(agent_id)
    if what == "block":
        state = folder.read()
        return access.blocks.path_of(state.cache.model, state.cache.last_block)
    return folder.tail_path(2) if what == "tail" else folder.path / what


def ask(producer, context, what, how, turn):
    prompt = f" {turn}"
    if context == "full":
        prompt = f"{context} {what} {how} {WORDS}" + "".join(f" {n}" for n in range(turn + 1))
    elif turn == 0:
        prompt = f"{context} {what} {how} {WORDS} 0"
    return producer.submit(agent_id=f"{context} {what} {how}", prompt=prompt, context=context, max_tokens=8)


def test_damage_is_a_named_miss_or_a_refused_append_and_never_a_wrong_answer(redis_url, tmp_path):
    producer, store = Producer(redis_url), tmp_path / "store"

    def run(folder, log_name, turns):
        tickets = [{agent: ask(producer, *agent, turn) for agent in AGENTS} for turn in turns]
        with running_worker(redis_url, folder, "--burst", "--max-batch", "32", log_name=log_name) as worker:
            assert worker.wait() == 0, worker.log
        return tickets

    run(store, "first.log", (0, 1))
    shutil.copytree(store, tmp_path / "whole")
    for context, what, how in AGENTS:
        another = f"{'full' if context == 'append' else 'append'} {what} {how}"
        DAMAGES[how](file_of(store, f"{context} {what} {how}", what), file_of(tmp_path / "whole", another, what))
    (damaged,) = run(store, "damaged.log", (2,))
    (whole,) = run(tmp_path / "whole", "whole.log", (2,))
    for agent, ticket in damaged.items():
        context, what, how = agent
        right = whole[agent].result(timeout_s=1)
        if context == "append" and what not in ("block", "tail"):
            with pytest.raises(JobFailed, match="AgentTranscriptUnreadable"):
                ticket.result(timeout_s=1)
            continue
        result = ticket.result(timeout_s=1)
        assert (result.text, result.usage.prompt_tokens) == (right.text, right.usage.prompt_tokens), agent
        assert (right.cache.source, right.cache.miss_reason, result.cache.saved) == ("disk", None, True)
        if what in ("block", "tail"):
            assert result.cache.miss_reason == f"{what}_{FAULTS[how]}", agent
            assert result.usage.cached_tokens < right.usage.cached_tokens


def test_an_agents_folder_that_cannot_be_read_is_a_named_miss_or_a_refused_append(redis_url, tmp_path):
    """A file in the folder's place has the effect of missing permissions, also for root."""
    producer, store = Producer(redis_url), tmp_path / "store"

    def ask_all(prompt):
        contexts: tuple[Literal["full", "append"], ...] = ("full", "append")
        agents = [(agent_id, context) for agent_id in ("bad", "good") for context in contexts]
        return {
            (agent_id, context): producer.submit(
                agent_id=f"{agent_id} {context}", prompt=prompt, context=context, max_tokens=4
            )
            for agent_id, context in agents
        }

    def spoil():
        for context in ("full", "append"):
            folder = look_at(store).agent(f"bad {context}").path
            folder.rename(folder.with_name("aside " + folder.name))
            folder.touch()

    def check(tickets):
        result = tickets["bad", "full"].result(timeout_s=30)
        assert (result.cache.miss_reason, result.cache.saved) == ("transcript_unreadable", False)
        assert "NotADirectoryError" in result.cache.save_error
        with pytest.raises(JobFailed, match=r"AgentTranscriptUnreadable: .*'bad append'.* cannot be read"):
            tickets["bad", "append"].result(timeout_s=30)
        for context in ("full", "append"):
            assert tickets["good", context].result(timeout_s=30).cache.saved

    with running_worker(redis_url, store):
        assert all(ticket.result(timeout_s=30).cache.saved for ticket in ask_all(WORDS).values())
        spoil()
        check(ask_all(WORDS + "and on"))
    with running_worker(redis_url, store, log_name="anew.log"):
        check(ask_all(WORDS + "and on and on"))
