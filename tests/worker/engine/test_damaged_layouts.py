"""Every cache file of an agent damaged in every way, for each kind of layer: a named miss and the undamaged answer."""

import random
import shutil
from functools import cache

import pytest
from tests.worker.engine.layouts import Layout, random_ids, run, work
from tests.worker.engine.test_layout_memory import Conversation
from tests.worker.memory.agents import FastDisk, problems_of

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.memory.turn_saver import chain_of
from stoker_worker.ports import Delivery, Transcript, Turn

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

NAMES = ("llama", "gemma3_text", "qwen3_next", "mamba2")
MAX_TOKENS = 6


def flip(path, other):
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "corrupt": flip,
    "corrupt too": lambda path, other: path.write_bytes(path.read_bytes()[:-5]),
    "missing": lambda path, other: path.unlink(),
    "foreign": lambda path, other: shutil.copy(other, path),
}


def kind_of(file):
    return "block" if file.parts[0] == "blocks" else file.stem.split("-")[2]


class Scene:
    """A closed store with two agents of like conversations; and the model's uncached answers, computed once."""

    def __init__(self, name, folder):
        rng = random.Random(name)
        self.layout = Layout(name, eos=False)
        self.base, self.folder = folder / "base", folder / "store"
        self.alone = cache(lambda ids: tuple(self.layout.alone(ids, MAX_TOKENS)))
        self.agents = [Conversation(self.layout, self.base, agent_id) for agent_id in ("ours", "theirs")]
        for agent in self.agents:
            agent.turn(tuple(random_ids(rng, 260)), MAX_TOKENS)
            self.prompt = (*agent.said[-1], *random_ids(rng, 275))
            agent.turn(self.prompt, MAX_TOKENS)
        ours = self.agents[0]
        self.prompt = ours.said[-1][: len(self.prompt)]
        self.model = ours.model
        self.more = tuple(random_ids(rng, 20))
        self.continued = (*ours.said[-1], *self.more)
        """The `append` prompt: the conversation with a new message."""
        self.turned_away = (*self.prompt, (ours.said[-1][len(self.prompt)] + 1) % 90, *self.more)
        """A `full` prompt: the whole conversation, with another last answer."""
        self.files = dict(zip(self.files_of("ours"), self.files_of("theirs"), strict=True))

    def files_of(self, agent_id):
        """Blocks in the order of the chain, tail, snapshots; relative to the store."""
        store = AgentCacheStore(self.base)
        agent, parts = store.open_agent(agent_id), store.parts
        assert agent.cache is not None
        chain = chain_of(agent.cache, agent.transcript.token_ids)
        blocks = [parts.blocks.path_of(chain.model, address) for address in chain.addresses]
        paths = [path for path in (*blocks, *parts.pieces.paths(agent_id, 2)) if path.exists()]
        store.close()
        return [path.relative_to(self.base) for path in paths]

    def is_needed(self, file, prompt):
        """A snapshot is loaded only if no later one fits the prompt."""
        index = 1 if prompt == self.continued else 0
        return kind_of(file) != "snapshot" or file.name.endswith(f"-{index}.safetensors")

    def damaged(self, file, how):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.base, self.folder)
        DAMAGES[how](self.folder / file, self.folder / self.files[file])

    def turn(self, store, prompt):
        """Run and save one turn of our agent; return its restore. Checks the answer against the model alone."""
        agent = store.open_agent("ours")
        restored = store.restore(prompt, agent=agent, model=self.model, salt=None)
        (done,) = run(self.layout.engine(), [work(prompt, MAX_TOKENS, restored.prefix)])
        assert done.generated_ids == self.alone(prompt)
        transcript = Transcript((*prompt, *done.generated_ids[: done.kept]), "t", None, "", done.ended_by, "")
        delivery = Delivery(f"turn after {agent.number}", "now")
        store.save(Turn(agent, delivery, transcript, self.model, None, done.cache, {}))
        return restored


def expect_everything_cached_again(scene):
    """The damaged files have been written anew."""
    store = AgentCacheStore(scene.folder, files=FastDisk())
    assert problems_of(store) == []
    agent = store.open_agent("ours")
    prompt = (*agent.transcript.token_ids, 1)
    restored = store.restore(prompt, agent=agent, model=scene.model, salt=None)
    assert (restored.prefix.n_tokens, restored.miss_reason) == (len(prompt) - 1, None)
    store.close()


@pytest.fixture(scope="module", params=NAMES)
def scene(request, tmp_path_factory):
    return Scene(request.param, tmp_path_factory.mktemp(request.param))


def test_the_scene_has_every_kind_of_file(scene):
    kinds = {kind_of(file) for file in scene.files}
    spec = scene.layout.spec
    wanted = ({"block", "tail"} if spec.full_layers else set()) | ({"snapshot"} if spec.snapshot_layers else set())
    assert kinds == wanted
    assert len(scene.files) == 3 * bool(spec.full_layers) + 2 * bool(spec.snapshot_layers)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("context", ["append", "full"])
def test_a_damaged_file_is_a_named_miss_and_the_answer_is_that_of_an_undamaged_run(scene, context, how):
    prompt = scene.continued if context == "append" else scene.turned_away
    for file in scene.files:
        scene.damaged(file, how)
        store = AgentCacheStore(scene.folder, files=FastDisk())
        restored = scene.turn(store, prompt)
        reason = f"{kind_of(file)}_{how.split(' ')[0]}" if scene.is_needed(file, prompt) else None
        assert restored.miss_reason == reason, file
        assert dict(store.misses) == ({reason: 1} if reason else {})
        store.close()
        expect_everything_cached_again(scene)


def test_with_the_ram_cache_the_turn_after_a_miss_is_right_too(scene):
    sources = []
    for file in scene.files:
        scene.damaged(file, "corrupt")
        store = AgentCacheStore(
            scene.folder, files=FastDisk(), memory_max_bytes=2**30
        )  # after a restart its RAM cache is empty
        scene.turn(store, scene.continued)
        prompt = (*scene.continued, *scene.alone(scene.continued), *scene.more)
        restored = scene.turn(store, prompt)
        assert restored.prefix.n_tokens == len(prompt) - len(scene.more)
        sources.append(restored.source)
        store.close()
    # Intact blocks that are useless without a snapshot are not computed again, so they are not in the RAM cache either.
    assert sources[0] == sources[-1] == "memory"


def test_damage_on_disk_costs_an_agent_in_ram_nothing_until_the_disk_is_read(scene):
    for file in scene.files:
        shutil.rmtree(scene.folder, ignore_errors=True)
        shutil.copytree(scene.base, scene.folder)
        store = AgentCacheStore(scene.folder, files=FastDisk(), memory_max_bytes=2**30)
        store.restore(scene.continued, agent=store.open_agent("ours"), model=scene.model, salt=None)
        DAMAGES["corrupt"](scene.folder / file, None)
        restored = scene.turn(store, scene.continued)
        assert (restored.source, restored.miss_reason) == ("memory", None)
        store.close()
        store = AgentCacheStore(scene.folder, files=FastDisk())
        prompt = (*scene.continued, *scene.alone(scene.continued), *scene.more)
        restored = scene.turn(store, prompt)
        # The turn replaced tail and snapshots.
        assert restored.miss_reason == ("block_corrupt" if kind_of(file) == "block" else None)
        store.close()
        expect_everything_cached_again(scene)
