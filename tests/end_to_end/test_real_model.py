"""The whole path on SmolLM2 in float32: the results in Redis equal mlx-lm's own, whatever was cached.

`test_every_layer_kind.py` proves its models in the same way at their first start; here that would take half a minute.
"""

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from tests.support.worker_process import burst

from stoker_worker.memory import transcripts
from stoker_worker.memory.store_parts import opened

pytestmark = [pytest.mark.model, pytest.mark.server, pytest.mark.fast_blas]

MAX_TOKENS = 10
EIGHT_BLOCKS = 8 * 256 * 46080  # bytes of a token's cache in float32; all sequences do not fit at once
RAW = ["The longest river in South America is", "To tie a bowline, first make"]
CHATS = ["Name two primary colours.", "What do bees make?"]
BRIEF = " ".join(f"Shelf {n} holds box {n * 7 % 31} with part number {n * n + 3}." for n in range(18))
MORE_TEXT = " After that,"
MORE_CHAT = {"role": "user", "content": "Say it in other words."}


@pytest.fixture
def reference(real_model):
    """mlx-lm itself: one sequence, no cache, the worker's weights."""
    tokenizer, generated = real_model.tokenizer, cache(real_model.alone)

    class Reference:
        def ids(self, prompt_ids):
            return generated(tuple(prompt_ids), MAX_TOKENS)

        def text(self, prompt_ids):
            return tokenizer.decode([token for token in self.ids(prompt_ids) if token not in tokenizer.eos_token_ids])

        def chat(self, messages):
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True)

        def turn_after(self, stored, message):
            """A conversation that goes on from what is stored, as the worker appends to it."""
            closing = "" if stored[-1] in tokenizer.eos_token_ids else "<|im_end|>"
            turn = f"{closing}\n<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
            return stored + tokenizer.encode(turn, add_special_tokens=False)

    return Reference()


def options(smollm2):
    return ("--model", str(smollm2), "--max-batch", "8", "--skip-proof")


def user(text):
    return {"role": "user", "content": text}


def damage_a_block(store, agent_id):
    with opened(store) as parts, parts.database.snapshot() as connection:
        version = transcripts.read_agent(connection, agent_id).version
        path = parts.blocks.path_of(version.cache.model, version.cache.last_block)
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_two_turns_across_a_restart_equal_mlx_lm_alone_and_only_new_tokens_are_prefilled(
    producer, redis_url, store, smollm2, real_model, reference
):
    """Of agents, one of which has a damaged block then, and of two calls of a session."""
    tokenizer = real_model.tokenizer

    system, own = ({"role": "system", "content": text} for text in (BRIEF, f"No two alike. {BRIEF}"))
    chats = [[user(text)] for text in CHATS]
    chats += [[system, user("Which box is on shelf 3?")], [system, user("Give a title.")], [own, user("Where is 2?")]]
    calls, damaged = [("session", "full", 2), ("session", "full", 3)], ("chat", "append", 4)
    agents = [(kind, context, n) for kind in ("raw", "chat") for n, context in enumerate(("append", "full"))]
    agents += [damaged, *calls]

    def submit(agent, given):
        of = {"session": "s"} if agent in calls else {"agent_id": str(agent), "context": agent[1]}
        return producer.submit(max_tokens=MAX_TOKENS, **of, **given)

    def first(kind, n):
        return {"prompt": RAW[n]} if kind == "raw" else {"messages": chats[n]}

    tickets = [submit((kind, context, n), first(kind, n)) for kind, context, n in agents]
    burst(redis_url, store, *options(smollm2))
    stored, answers = {}, {}
    for agent, ticket in zip(agents, tickets, strict=True):
        kind, _, n = agent
        ids = tokenizer.encode(RAW[n]) if kind == "raw" else reference.chat(chats[n])
        stored[agent] = [*ids, *reference.ids(ids)]
        answers[agent] = ticket.result(timeout_s=1).text
        assert answers[agent] == reference.text(ids), agent
    damage_a_block(store, str(damaged))

    tickets, expected = [], []
    for agent in agents:
        kind, context, n = agent
        if kind == "raw" and context == "append":
            new: dict[str, Any] = {"prompt": MORE_TEXT}
            ids = stored[agent] + tokenizer.encode(MORE_TEXT, add_special_tokens=False)
        elif kind == "raw":
            new = {"prompt": RAW[n] + answers[agent] + MORE_TEXT}
            ids = tokenizer.encode(new["prompt"])
        elif context == "append":
            new, ids = {"messages": [MORE_CHAT]}, reference.turn_after(stored[agent], MORE_CHAT)
        else:
            new = {"messages": [*chats[n], {"role": "assistant", "content": answers[agent]}, MORE_CHAT]}
            ids = reference.chat(new["messages"])
        expected.append(ids)
        tickets.append(submit(agent, new))
    assert "KV memory: 90 MB" in burst(redis_url, store, *options(smollm2), "--kv-max-bytes", str(EIGHT_BLOCKS))
    for agent, ticket, ids in zip(agents, tickets, expected, strict=True):
        result = ticket.result(timeout_s=1)
        assert result.text == reference.text(ids), agent
        assert result.usage.prompt_tokens == len(ids), agent
        if agent == damaged:
            assert (result.usage.cached_tokens, result.cache.miss_reason) == (0, "block_corrupt")
            continue
        assert result.usage.cached_tokens == min(common(stored[agent], ids), len(ids) - 1), agent
        assert result.usage.cached_tokens > 256 or agent not in calls
        assert result.cache.source in ("memory", "disk")  # some were read ahead
        assert (result.cache.miss_reason, result.cache.agent_version) == (None, None if agent in calls else 2)


def test_a_model_without_a_tool_format_calls_the_tool_that_it_has_to_and_keeps_to_a_schema(
    producer, redis_url, store, smollm2
):
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    schema = {"type": "object", "properties": {"city": city, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
              "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("weather", "trains")]
    named: Any = {"type": "function", "function": {"name": "trains"}}
    fields: dict[str, Any] = {"messages": [user("The weather in Rome for three days?")], "tools": tools}
    choices = [(None, 8), ("required", 80), (named, 80)]
    tickets = [producer.submit(tool_choice=choice, max_tokens=most, **fields) for choice, most in choices]
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    drawn = producer.submit(prompt="Once upon a time", response_format=form, max_tokens=80, temperature=1.5, seed=3)
    burst(redis_url, store, *options(smollm2))
    free, *called = [ticket.result(timeout_s=1) for ticket in tickets]
    assert (free.tool_calls, free.tool_error) == (None, None)
    for result in called:
        assert (result.finish_reason, result.content, result.tool_error) == ("tool_calls", "", None)
        jsonschema.validate(json.loads(result.tool_calls[0].function.arguments), schema)
    assert called[1].tool_calls[0].function.name == "trains"
    jsonschema.validate(json.loads(drawn.result(timeout_s=1).text), schema)
