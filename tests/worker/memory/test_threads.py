"""The loader reads while finishers write: every version is whole, every cache the right one."""

import os
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.worker.memory.agents import HYBRID, MODEL, Agent, ids, open_store, problems_of

from stoker_worker.memory.lookup import n_readers
from stoker_worker.ports import LoadedModel

ROUNDS = 25


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["full", "hybrid"])
def test_reading_and_writing_at_once_never_gives_a_wrong_answer(tmp_path: Path, model: LoadedModel) -> None:
    store = open_store(tmp_path)
    shared = ids(700)
    readers = [Agent(store, f"reader {number}", model=model) for number in range(3)]
    for reader in readers:
        reader.say((*shared, 1))
    errors: list[BaseException] = []
    done = threading.Event()

    def load() -> None:
        try:
            while not done.is_set():
                for reader in readers:
                    assert reader.tokens() == (*shared, 1)
                    restored = reader.restore((*shared, 1, 2))
                    n_tokens = restored.prefix.n_tokens if restored.prefix else 0
                    assert n_tokens == 701 or restored.miss_reason is not None
        except BaseException as error:
            errors.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        for number in range(ROUNDS):
            for path in list((tmp_path / "blocks").rglob("*.safetensors"))[: number % 3]:
                path.unlink(missing_ok=True)
            writer = Agent(store, f"writer {number % 5}", model=model)
            writer.say((*shared[: 600 + number], *ids(50, seed=number)))
            assert writer.tokens()[:600] == shared[:600]
    finally:
        done.set()
        loader.join()
    assert errors == []
    assert problems_of(store) == []


@pytest.mark.parametrize(("cores", "alone", "beside_others"), [(None, 1, 1), (2, 2, 1), (4, 4, 2), (16, 4, 4)])
def test_a_restore_beside_running_sequences_uses_half_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, alone: int, beside_others: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert (n_readers(beside_others=False), n_readers(beside_others=True)) == (alone, beside_others)
    with closing(open_store(tmp_path)) as store:
        agent = Agent(store)
        agent.say(ids(1100))
        at_once = agent.restore((*ids(1100), 7))
        beside = store.restore((*ids(1100), 7), agent=agent.open(), model=MODEL, salt=None, beside_others=True)
        assert at_once.prefix is not None
        assert beside.prefix is not None
        for ours, theirs in zip(at_once.prefix.layers, beside.prefix.layers, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
