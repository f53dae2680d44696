"""The list of agents: pages, orders, patterns; from rows alone, however many agents there are."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from tests.worker.memory.agents import Agent, ids, open_store

from stoker_worker.memory.admin.listing import Page, count_agents, list_agents
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.summary import AgentSummary
from stoker_worker.memory.transcripts import read_agent


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentCacheStore]:
    with closing(open_store(tmp_path / "store")) as store:
        yield store


def fill(store: AgentCacheStore) -> None:
    """The last used agent is `small`, the largest `big`, and `chatty` has the most turns."""
    Agent(store, "big").say(ids(3000))
    chatty = Agent(store, "chatty")
    for n in range(3):
        chatty.say((1, 2, n))
    Agent(store, "[night] 1").say(ids(300))
    Agent(store, "small").say((1,))


def lines(store: AgentCacheStore, page: Page) -> list[dict[str, Any]]:
    return [line for some in list_agents(store.parts.database.snapshot, page) for line in some]


def names(store: AgentCacheStore, page: Page) -> list[str]:
    return [line["agent_id"] for line in lines(store, page)]


def test_orders_patterns_and_pages(store: AgentCacheStore) -> None:
    fill(store)
    used = ["small", "[night] 1", "chatty", "big"]
    assert names(store, Page()) == used
    assert names(store, Page("size"))[:2] == ["big", "[night] 1"]
    assert names(store, Page("turns"))[0] == "chatty"
    assert names(store, Page("name")) == sorted(used)
    for sort in ("used", "size", "turns", "name"):
        whole = names(store, Page(sort))
        assert [names(store, Page(sort, None, 1, offset)) for offset in range(5)] == [*([x] for x in whole), []]
    assert names(store, Page(match="*a*")) == ["small", "chatty"]
    assert names(store, Page("name", "[[]night]*", 1)) == ["[night] 1"]
    with store.parts.database.snapshot() as connection:
        assert (count_agents(connection, Page(limit=1)), count_agents(connection, Page(match="*a*"))) == (4, 2)


def test_a_line_has_what_the_summary_has(store: AgentCacheStore) -> None:
    fill(store)
    store.mark_unsaved("small")
    store.mark_unsaved('"never" saved')
    for line in lines(store, Page()):
        with store.parts.database.snapshot() as connection:
            summary = AgentSummary.of(connection, read_agent(connection, line["agent_id"]))
        assert line.pop("size_bytes") == line["transcript_bytes"] + line["piece_bytes"] + line["block_bytes"]
        assert line.pop("tokens") == (summary.tokens or 0)
        assert line == {name: value for name, value in asdict(summary).items() if name in line}


def test_an_agent_whose_row_is_damaged_is_listed_as_such(store: AgentCacheStore) -> None:
    fill(store)
    changes = {
        "big": "turns = 'many', last_used = x'ff', unsaved = 1",
        "chatty": "agent_id = CAST(x'63ff' AS TEXT)",
        "small": "version = 9",
    }
    for name, change in changes.items():
        sql = f"UPDATE agents SET {change} WHERE agent_id = '{name}'"
        store.parts.database.commit(methodcaller("execute", sql))
    assert {line["agent_id"]: line["state"] for line in lines(store, Page())} == {
        "big": "unreadable", "c\ufffd": "unreadable", "small": "unreadable", "[night] 1": "ok",
    }  # fmt: skip


@pytest.mark.parametrize("sort", ["used", "name"])
def test_a_page_costs_the_same_among_many_agents(store: AgentCacheStore, sort: str) -> None:
    """Counted in steps of SQLite's machine."""
    steps: list[int] = []

    def step() -> int:
        steps[-1] += 1
        return 0

    with closing(sqlite3.connect(store.parts.database.path)) as connection:
        for agents in (range(20), range(20, 150)):
            for number in agents:
                Agent(store, f"agent-{number}").say((1,))
            steps.append(0)
            connection.set_progress_handler(step, 1)
            (some,) = list_agents(partial(nullcontext, connection), Page(sort, None, 10))  # type: ignore[arg-type]
            assert len(some) == 10
            connection.set_progress_handler(None, 0)
    assert steps[1] < steps[0] * 1.1
