"""The cost of a turn, in bytes, statements and syncs: that of its own tokens, however long the conversation is."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.worker.memory.agents import Agent, FastDisk, ids, make_model, make_turn, open_store, reopen, rows

from stoker_worker.memory.blocks import layout_of
from stoker_worker.memory.files import Chunk
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Transcript
from stoker_worker.ports.cache_spec import ArraySpec, LayerKind, LayerSpec, ModelCacheSpec


class CountingDisk(FastDisk):
    """Counts the bytes it is given to write."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        pieces = list(chunks)
        self.n_bytes += sum(memoryview(piece).nbytes for piece in pieces)
        super().write(path, pieces)


FULL = LayerSpec(LayerKind.FULL, 2, 32, 32)
HYBRID = (
    FULL,
    LayerSpec(LayerKind.WINDOW, 2, 32, 32, window_tokens=128),
    LayerSpec(LayerKind.RECURRENT, arrays=(ArraySpec((16, 64), "float32"),)),
)


@pytest.mark.parametrize(
    ("layers", "stored"),
    [((FULL,) * 4, 4096), ((FULL,) * 4, 4096 + 200), ((FULL,) * 4, 4096 + 255), (HYBRID * 2, 4096 + 200)],
)
def test_adding_64_tokens_to_4096_writes_64_tokens_at_most_a_block_and_the_snapshots(
    tmp_path: Path, layers: tuple[LayerSpec, ...], stored: int
) -> None:
    spec = ModelCacheSpec(layers, "float32")
    disk = CountingDisk()
    agent = Agent(AgentCacheStore(tmp_path, files=disk), model=make_model(spec=spec))
    agent.say(ids(stored))
    before = disk.n_bytes
    agent.say(ids(stored), ids(64, seed=1))
    snapshots = 2 * layout_of(spec, "snapshot", stored).n_bytes if spec.snapshot_layers else 0
    assert disk.n_bytes - before < 1.25 * ((64 + 256) * spec.bytes_per_token + snapshots)


@pytest.mark.slow
def test_a_turns_row_does_not_grow_with_the_number_of_turns_but_for_one_in_sixteen(tmp_path: Path) -> None:
    agent = Agent(open_store(tmp_path))
    said, sizes = Transcript((), "tok", None, "", "eos"), [0]
    for number in range(500):
        token_ids, text = (*said.token_ids, *ids(20, seed=number)), f"{said.text}what is next? "
        said = replace(said, token_ids=token_ids, text=text)
        agent.store.save(make_turn(agent, agent.open(), said, None))
        ((n_bytes,),) = rows(agent.store, "SELECT transcript_bytes FROM agents")
        sizes.append(n_bytes)
    deltas = [after - before for number, (before, after) in enumerate(pairwise(sizes)) if number % 16]
    assert max(deltas[-20:]) < 1.05 * max(deltas[:20])
    agent.store = reopen(agent.store, tmp_path)
    assert (agent.open().number, agent.open().transcript) == (500, said)
