"""Agents without a model: their cache is a function of the tokens, so that a wrong cache is noticed at once."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from stoker_shared.agents import AgentRequest, build_agent_request
from stoker_shared.message import Message
from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.blocks import empty_layers, empty_states
from stoker_worker.memory.files import Disk
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import (
    AgentVersion,
    CacheStorePort,
    Delivery,
    LayerKV,
    LayerState,
    LoadedModel,
    PrefixRoom,
    Restored,
    SequenceCache,
    Snapshot,
    Transcript,
    Turn,
)
from stoker_worker.ports.cache_spec import ArraySpec, LayerKind, LayerSpec, ModelCacheSpec

LAYER = LayerSpec(LayerKind.FULL, n_kv_heads=2, key_dim=4, value_dim=2)
SPEC = ModelCacheSpec((LAYER, LAYER), "float32")
WINDOW = LayerSpec(LayerKind.WINDOW, n_kv_heads=1, key_dim=4, value_dim=2, window_tokens=64)
RECURRENT = LayerSpec(LayerKind.RECURRENT, arrays=(ArraySpec((3, 5), "float32"), ArraySpec((2,), "bfloat16")))
SNAPSHOT_SPECS = {
    "hybrid": ModelCacheSpec((WINDOW, LAYER, RECURRENT, LAYER), "bfloat16"),
    "window": ModelCacheSpec((WINDOW, WINDOW), "float16"),
    "recurrent": ModelCacheSpec((RECURRENT,), "float32"),
}
"""Models that resume only where a snapshot was taken."""


def make_model(name: str = "a", *, spec: ModelCacheSpec = SPEC, tokenizer: str = "tok") -> LoadedModel:
    fingerprint = (name.encode().hex() * 64)[:64]
    return LoadedModel(name, fingerprint, tokenizer, 1 << 20, spec, tokenizer=None)  # type: ignore[arg-type]


MODEL = make_model()
HYBRID = make_model("hybrid", spec=SNAPSHOT_SPECS["hybrid"])


class ArrayRoom(PrefixRoom):
    """The memory of an engine without MLX: with places to spare, all of which hold nonsense."""

    def __init__(self, spec: ModelCacheSpec, n_tokens: int, n_left: int) -> None:
        self.n_left = n_left
        self.arrays = empty_layers(spec, n_tokens + 3)
        for array in (array for pair in self.arrays for array in pair):
            array[:] = 77

    is_viewed = False

    def has_room_for(self, n_tokens: int) -> bool:
        return n_tokens <= self.arrays[0][0].shape[1]

    def layers(self) -> tuple[LayerKV, ...]:
        return self.arrays

    def take(self) -> list[tuple[Any, Any]]:
        return list(self.arrays)


def with_rooms(model: LoadedModel) -> LoadedModel:
    """The model in an engine that restores into memory of its own."""
    return replace(model, room_type=ArrayRoom)


def write_at(path: Path, offset: int, data: bytes) -> None:
    """As `Disk.write_at`, without a sync."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.seek(offset)
        file.write(data)


class FastDisk(Disk):
    """The disk without waiting for it: tests that cut no power need no syncs."""

    def write(self, path: Path, chunks: Any) -> None:
        with open(path, "xb") as file:
            file.writelines(chunks)

    def write_at(self, path: Path, offset: int, data: bytes) -> None:
        write_at(path, offset, data)

    def sync_folder(self, path: Path) -> None:
        pass

    flush = sync_folder


def open_store(folder: Path, **options: Any) -> AgentCacheStore:
    return AgentCacheStore(folder, files=FastDisk(), **options)


def reopen(store: AgentCacheStore, folder: Path) -> AgentCacheStore:
    store.close()
    return open_store(folder)


def ids(n: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(0, 50_000, n))


def cache_of(token_ids: Sequence[int], model: LoadedModel = MODEL) -> tuple[LayerKV, ...]:
    """A cache in which every token's entry depends on all tokens up to it, on the model, the layer and the head."""
    sums = _sums(token_ids, model)
    layers = empty_layers(model.spec, len(token_ids))
    for number, pair in enumerate(layers):
        for side, array in enumerate(pair):
            heads, _, dim = array.shape
            place = np.arange(heads)[:, None, None] * 64 + np.arange(dim)[None, None, :] + number * 7 + side * 3
            array[:] = (sums[None, :, None] + place) % 60_013 % 2048
    return layers


def states_of(token_ids: Sequence[int], model: LoadedModel) -> tuple[LayerState, ...]:
    """A snapshot after `token_ids`, every element of which depends on all of them."""
    states = empty_states(model.spec, len(token_ids))
    last = _sums(token_ids, model)[-1]
    for number, arrays in enumerate(states):
        for place, array in enumerate(arrays):
            array[...] = ((last + np.arange(array.size) + number * 7 + place * 3) % 60_013 % 2048).reshape(array.shape)
    return states


def snapshots_of(token_ids: Sequence[int], counts: Sequence[int], model: LoadedModel) -> tuple[Snapshot, ...]:
    return tuple(Snapshot(n, states_of(token_ids[:n], model)) for n in counts)


def sequence_cache(
    token_ids: Sequence[int], counts: Sequence[int], places: Sequence[int], model: LoadedModel = MODEL
) -> SequenceCache:
    """What the engine hands back, with snapshots after `counts` tokens and checkpoints after `places`."""
    snapshots, checkpoints = (snapshots_of(token_ids, some, model) for some in (counts, places))
    return SequenceCache(len(token_ids), cache_of(token_ids, model), snapshots, checkpoints=checkpoints)


def boundaries(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Where the engine takes snapshots: before the prompt's last token, and at the end of the turn."""
    return sorted({len(prompt) - 1, len(prompt) + len(answer)} - {0, -1})


def _sums(token_ids: Sequence[int], model: LoadedModel) -> Any:
    sums, state = np.empty(len(token_ids), np.int64), int(model.fingerprint[:6], 16)
    for position, token in enumerate(token_ids):
        state = (state * 31 + token + 1) % 60_013
        sums[position] = state
    return sums


def equal(ours: Any, theirs: Any, model: LoadedModel) -> bool:
    """Whether `theirs` is what was stored of `ours`: bit for bit, or as close as the stored precision allows."""
    if model.spec.store_dtype == "native":
        return np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    return np.allclose(ours, theirs, rtol=0, atol=2048 / {"q8": 255, "q4": 15}[model.spec.store_dtype] / 2 + 0.01)


def cut(layers: tuple[LayerKV, ...], start: int, stop: int) -> tuple[LayerKV, ...]:
    return tuple((keys[:, start:stop], values[:, start:stop]) for keys, values in layers)


def checked(restored: Restored, prompt: Sequence[int], model: LoadedModel = MODEL) -> Restored:
    """Returns `restored`, whose prefix is the cache of the prompt and nothing else."""
    if restored.prefix is None:
        return restored
    n_tokens, room, layers = restored.prefix.n_tokens, restored.prefix.room, restored.prefix.layers
    if room is not None:
        assert layers == ()
        layers = cut(room.layers(), 0, n_tokens)
    for ours, theirs in zip(cache_of(prompt[:n_tokens], model), layers, strict=True):
        assert all(equal(a, b, model) for a, b in zip(ours, theirs, strict=True))
    states = [arrays for one in restored.prefix.snapshots[-1:] for arrays in one.states]
    for wanted, found in zip(states_of(prompt[:n_tokens], model), states, strict=True):
        assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
    return restored


S = TypeVar("S", bound=CacheStorePort)


@dataclass
class AgentOf(Generic[S]):
    """Takes turns as the worker does: open, restore, save."""

    store: S
    name: str = "agent"
    model: LoadedModel = MODEL
    salt: str | None = None
    system_tokens: int = 0
    jobs: Iterator[int] = field(default_factory=lambda: count(1))

    def open(self) -> AgentVersion:
        return self.store.open_agent(self.name)

    def tokens(self) -> tuple[int, ...]:
        transcript = self.open().transcript
        return transcript.token_ids if transcript else ()

    def restore(self, prompt: Sequence[int], agent: AgentVersion | None = None) -> Restored:
        """Restore, and check that what came back is the cache of the prompt and nothing else."""
        agent = self.open() if agent is None else agent
        restored = self.store.restore(
            prompt, agent=agent, model=self.model, salt=self.salt, system_tokens=self.system_tokens
        )
        return checked(restored, prompt, self.model)

    def cached(self, prompt: Sequence[int]) -> int:
        prefix = self.restore(prompt).prefix
        return prefix.n_tokens if prefix else 0

    def turn(self, prompt: Sequence[int], answer: Sequence[int] = (), agent: AgentVersion | None = None) -> Turn:
        agent = self.open() if agent is None else agent
        transcript = make_transcript((*prompt, *answer), tokenizer=self.model.tokenizer_fingerprint)
        places = self.restore(prompt, agent).checkpoints_at
        counts = boundaries(prompt, answer) if self.model.spec.snapshot_layers else []
        return make_turn(self, agent, transcript, sequence_cache(transcript.token_ids, counts, places, self.model))

    def say(self, prompt: Sequence[int], answer: Sequence[int] = (), agent: AgentVersion | None = None) -> int:
        turn = self.turn(prompt, answer, agent)
        self.store.save(turn)
        return turn.version


Agent = AgentOf[AgentCacheStore]


def make_transcript(token_ids: Sequence[int], *, tokenizer: str = "tok", text: str | None = None) -> Transcript:
    messages = None if text is not None else (Message(role="user", content=f"{len(token_ids)} tokens"),)
    return Transcript(tuple(token_ids), tokenizer, messages, text, "eos")


def make_turn(agent: AgentOf[Any], base: AgentVersion, transcript: Transcript, cache: SequenceCache | None) -> Turn:
    delivery = Delivery(f"job-{next(agent.jobs)}", "2024-01-01T00:00:00Z")
    return Turn(
        base=base,
        delivery=delivery,
        transcript=transcript,
        model=agent.model,
        cache_salt=agent.salt,
        cache=cache,
        result={"job_id": delivery.job_id, "version": base.number + 1},
    )


@contextmanager
def using(folder: Path) -> Iterator[Callable[[str], Agent]]:
    """A worker at its work, as far as the store can tell; gives agents by name."""
    store = open_store(folder)
    agents: dict[str, Agent] = {}
    try:
        yield lambda name: agents.setdefault(name, Agent(store, name))
    finally:
        store.close()


def problems_of(store: AgentCacheStore) -> list[str]:
    """What `verify` finds in the store."""
    return list(verify_store(store.parts))


def restore_of_session(
    store: CacheStorePort,
    prompt: Sequence[int],
    *,
    session: str = "s",
    salt: str | None = None,
    model: LoadedModel = MODEL,
) -> Restored:
    """What a call of a session is restored from, checked."""
    return checked(store.restore(prompt, agent=None, model=model, salt=salt, session=session), prompt, model)


def call_of_session(
    store: CacheStorePort,
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    *,
    session: str = "s",
    salt: str | None = None,
    model: LoadedModel = MODEL,
) -> tuple[int, str | None]:
    """A whole call: how many tokens came from the cache, and why not more. Then its cache is saved."""
    restored = restore_of_session(store, prompt, session=session, salt=salt, model=model)
    token_ids = (*prompt, *answer)
    counts = boundaries(prompt, answer) if model.spec.snapshot_layers else []
    cache = sequence_cache(token_ids, counts, restored.checkpoints_at, model)
    store.save_session(session, token_ids, cache, prompt_tokens=len(prompt), model=model, salt=salt)
    return restored.prefix.n_tokens if restored.prefix else 0, restored.miss_reason


_numbers = count(1)


def delivery() -> Delivery:
    """Of a job that there was not before."""
    return Delivery(f"agent-job-{next(_numbers)}", "2024-01-01T00:00:00Z")


def ask(action: str, agent_id: str = "agent", **fields: Any) -> AgentRequest:
    return build_agent_request({"action": action, "agent_id": agent_id, **fields})


def run_job(store: CacheStorePort, action: str, agent_id: str = "agent", **fields: Any) -> Any:
    """A job about an agent's memory; returns its answer."""
    return store.agent_jobs.run(ask(action, agent_id, **fields), delivery())


def disk_bytes(store: Path) -> int:
    """As `du -s` says, without ``redis/``."""
    paths = [store, *(path for path in store.rglob("*") if store / "redis" not in (path, *path.parents))]
    return sum(path.lstat().st_blocks * 512 for path in paths)


def tidy(store: CacheStorePort) -> None:
    """What the upkeep of a store on disk does each second."""
    assert isinstance(store, AgentCacheStore)
    list(store._upkeep.tidy())


def walk(store: AgentCacheStore) -> None:
    """What the upkeep does now and then: it compares the index with the files."""
    list(store._upkeep.walk())


def squeeze(store: AgentCacheStore, max_bytes: int = 1) -> None:
    """Evict as after a save, with a limit of `max_bytes` for this once."""
    was, store.budget.max_bytes = store.budget.max_bytes, max_bytes
    store.budget.make_room()
    store.budget.max_bytes = was


def rows(store: AgentCacheStore, sql: str, *parameters: Any) -> list[Any]:
    with store.parts.database.snapshot() as connection:
        return connection.execute(sql, parameters).fetchall()


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def only(folder: Path, pattern: str) -> Path:
    """The one file below `folder` that matches."""
    (path,) = folder.rglob(pattern)
    return path
