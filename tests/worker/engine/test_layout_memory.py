"""Engine and store together, for every cache layout: a cache restored from disk continues exactly where it ended."""

import hashlib
import random
from dataclasses import replace

import pytest
from tests.worker.engine.layouts import Layout, random_ids, run, work
from tests.worker.engine.tiny_models import CONFIGS
from tests.worker.memory.agents import problems_of

from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import AgentVersion, Delivery, LoadedModel, Transcript, Turn

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

IN_8_BITS = ("llama", "gemma3_text", "falcon_h1")
KEPT_AS_LLAMA = {"qwen2", "qwen3", "qwen3_moe"}
OTHERS = [(name, None) for name in CONFIGS if name not in KEPT_AS_LLAMA]


class Conversation:
    """One agent's turns, each as the worker runs them: restore, generate, save."""

    def __init__(self, layout, folder, agent_id="agent", system_tokens=0):
        self.layout, self.folder, self.agent_id, self.system_tokens = layout, folder, agent_id, system_tokens
        fingerprint = hashlib.sha256(layout.spec.describe().encode()).hexdigest()
        self.model = LoadedModel("tiny", fingerprint, "t", 8192, layout.spec, layout.loaded.tokenizer)
        self.said = []

    def turn(self, ids, max_tokens=6, **fields):
        """Run `ids` as the whole prompt, in a fresh store; return how many of them were cached, and the answer."""
        store = AgentCacheStore(self.folder)
        try:
            return self.turn_in(store, ids, max_tokens, **fields)
        finally:
            store.close()

    def turn_in(self, store, ids, max_tokens=6, **fields):
        """The same in an open store."""
        agent = store.open_agent(self.agent_id)
        restored = store.restore(ids, agent=agent, model=self.model, salt=None, system_tokens=self.system_tokens)
        self.source = restored.source
        one = replace(work(ids, max_tokens, restored.prefix, **fields), checkpoints_at=restored.checkpoints_at)
        beside = work(random_ids(random.Random(len(ids)), 33), 9)
        done, _ = run(self.layout.engine(), [one, beside])
        kept = done.generated_ids[: done.kept]
        transcript = Transcript((*ids, *kept), "t", None, "", done.ended_by, done.carry_text)
        delivery = Delivery(f"job-{len(self.said)}", "now")
        store.save(Turn(agent, delivery, transcript, self.model, None, done.cache, {}))
        assert problems_of(store) == []
        self.said.append(transcript.token_ids)
        if not fields:
            assert list(done.generated_ids) == self.layout.alone(ids, max_tokens)
        return (restored.prefix.n_tokens if restored.prefix else 0), restored.miss_reason


@pytest.mark.parametrize(("name", "kv_bits"), [*OTHERS, *((name, 8) for name in IN_8_BITS)])
def test_turns_continue_from_disk_and_answer_as_uncached(name, kv_bits, tmp_path):
    rng = random.Random(name)
    layout = Layout(name, kv_bits=kv_bits)
    conversation = Conversation(layout, tmp_path)
    first = tuple(random_ids(rng, 300))
    assert conversation.turn(first) == (0, None)
    for n_new in (1, 40, 230, 7):  # across block borders, and with tails of every kind
        before = conversation.said[-1]
        cached, missed = conversation.turn((*before, *random_ids(rng, n_new)))
        assert (cached, missed) == (len(before), None)
    # The same prompt again, as a full conversation: all but its last token.
    last = conversation.said[-1]
    prompt = (*last, 5, 6)
    conversation.turn(prompt)
    assert conversation.turn(prompt)[0] == len(prompt) - 1
    assert conversation.turn(prompt)[0] == len(prompt) - 1
    # A template that drops the model's thinking: the conversation differs after the prompt.
    cached, _ = conversation.turn((*prompt, 1, 2, 3))
    assert cached >= len(prompt) - 1
    # Half of the conversation: full attention can be cut anywhere, the other kinds have no snapshot there.
    cached, _ = conversation.turn((*first[:200], 7, 7))
    assert cached == 0 if layout.spec.snapshot_layers else cached >= 200


@pytest.mark.parametrize(
    ("name", "kv_bits"), [("llama", None), ("mamba2", None), ("gemma3_text", None), ("falcon_h1", 8)]
)
def test_new_agents_go_on_at_the_exact_end_of_a_known_system_prompt_and_answer_as_uncached(name, kv_bits, tmp_path):
    layout, rng = Layout(name, kv_bits=kv_bits), random.Random(name)
    system, n_cached = random_ids(rng, 330), []
    for number in range(3):
        agent = Conversation(layout, tmp_path, f"agent-{number}", len(system))
        n_cached.append(agent.turn((*system, *random_ids(rng, 9)))[0])
    assert n_cached == [0, len(system), len(system)]


def in_ram(store, conversation):
    model, ids = conversation.model, (*conversation.said[-1], 0)
    return store.ram_cache.find(store.open_agent("agent"), BlockChain(model.fingerprint, None, ids), model.spec)


def addresses(cache):
    return [array.__array_interface__["data"][0] for pair in cache.layers for array in pair]


def test_a_turn_goes_on_in_the_memory_of_the_turn_before(tmp_path):
    """Unless something else still reads it, or the prompt is too long for it."""
    layout, rng = Layout("llama", eos=False), random.Random(8)
    conversation = Conversation(layout, tmp_path)
    store = AgentCacheStore(tmp_path, memory_max_bytes=2**30)
    prompt = tuple(random_ids(rng, 260))
    conversation.turn_in(store, prompt, 4)
    for n_new, is_read, moves in ((3, False, True), (3, True, False), (60, False, False), (3, False, True)):
        before = in_ram(store, conversation)
        there, view = addresses(before), before.layers if is_read else None
        del before
        prompt = (*conversation.said[-1], *random_ids(rng, n_new))
        assert conversation.turn_in(store, prompt, 4) == (len(conversation.said[-2]), None)
        assert conversation.source == "memory"
        assert (addresses(in_ram(store, conversation)) == there) == moves
        del view
    store.close()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_after_a_stop_string_the_next_turn_continues_from_the_prompt(name, tmp_path):
    layout = Layout(name, eos=False)
    conversation = Conversation(layout, tmp_path)
    ids = tuple(random_ids(random.Random(3), 120))
    said = layout.alone(ids, 8)
    conversation.turn(ids, 8, stop=[f"<{said[4]}>"])
    (transcript,) = conversation.said
    assert len(transcript) < 128
    cached, _ = conversation.turn((*transcript, 9, 9, 9))
    assert cached == (119 if layout.spec.snapshot_layers else len(transcript))


def test_a_layout_that_cannot_be_stored_keeps_transcripts_and_reports_no_cache(tmp_path):
    layout = Layout("llama4")
    conversation = Conversation(layout, tmp_path)
    conversation.turn(tuple(random_ids(random.Random(4), 40)))
    assert conversation.turn((*conversation.said[-1], 3)) == (0, None)
    store = AgentCacheStore(tmp_path)
    agent = store.open_agent("agent")
    store.close()
    assert isinstance(agent, AgentVersion)
    assert agent.transcript.token_ids == conversation.said[-1]
    assert not list(tmp_path.glob("blocks/**/*.safetensors"))
