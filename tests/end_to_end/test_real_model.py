"""The whole path on SmolLM2 in float32: the results in Redis equal mlx-lm's own, whatever was cached.

`test_every_layer_kind.py` proves its models in the same way at their first start; here that would take half a minute.
"""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import jsonschema
import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from tests.end_to_end.test_damage import file_of, flip
from tests.support.server_fixture import require_server_program
from tests.support.worker_process import running_worker

from stoker import Producer
from stoker_shared.wire import AGENT_TASK_PATH
from stoker_worker.embedded_redis import EmbeddedServer

pytestmark = [pytest.mark.model, pytest.mark.server, pytest.mark.fast_blas]

MAX_TOKENS = 10
EIGHT_BLOCKS = 8 * 256 * 46080  # bytes of a token's cache in float32; all sequences do not fit at once
RAW = ["The longest river in South America is", "To tie a bowline, first make"]
CHATS = ["Name two primary colours.", "What do bees make?"]
BRIEF = " ".join(f"Shelf {n} holds box {n * 7 % 31} with part number {n * n + 3}." for n in range(18))
MORE_TEXT = " After that,"
MORE_CHAT = {"role": "user", "content": "Say it in other words."}


@pytest.fixture(scope="module")
def reference(smollm2):
    """mlx-lm itself: one sequence, no cache, the worker's weights."""
    import mlx.core as mx
    from mlx_lm import load, stream_generate
    from mlx_lm.utils import dequantize_model

    network, tokenizer = load(str(smollm2))
    network.set_dtype(mx.float32)
    network = dequantize_model(network)
    mx.eval(network.parameters())

    @cache
    def generated(prompt_ids, max_tokens):
        return [step.token for step in stream_generate(network, tokenizer, list(prompt_ids), max_tokens)]

    class Reference:
        def __init__(self):
            self.tokenizer = tokenizer

        def ids(self, prompt_ids, max_tokens=MAX_TOKENS):
            return generated(tuple(prompt_ids), max_tokens)

        def text(self, prompt_ids, max_tokens=MAX_TOKENS):
            ids = self.ids(prompt_ids, max_tokens)
            return tokenizer.decode([token for token in ids if token not in tokenizer.eos_token_ids])

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


@pytest.fixture(scope="module")
def redis_of_a_worker(smollm2, tmp_path_factory):
    """Of a server with a worker that serves the model meanwhile, to all tests that need no restart."""
    require_server_program()
    folder = tmp_path_factory.mktemp("serving")
    with (
        EmbeddedServer(folder / "redis", has_password=False) as server,
        running_worker(server.url, folder / "store", *options(smollm2)),
    ):
        yield server.url


def user(text):
    return {"role": "user", "content": text}


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_two_turns_across_a_restart_equal_mlx_lm_alone_and_only_new_tokens_are_prefilled(
    redis_url, tmp_path, smollm2, reference
):
    """Of agents, one of which has a damaged block then, and of two calls of a session."""
    producer, tokenizer, store = Producer(redis_url), reference.tokenizer, tmp_path / "store"

    def run_worker(*more):
        with running_worker(redis_url, store, "--burst", *options(smollm2), *more) as worker:
            assert worker.wait(240) == 0, worker.log
        return worker

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
    run_worker()
    stored, answers = {}, {}
    for agent, ticket in zip(agents, tickets, strict=True):
        kind, _, n = agent
        ids = tokenizer.encode(RAW[n]) if kind == "raw" else reference.chat(chats[n])
        stored[agent] = [*ids, *reference.ids(ids)]
        answers[agent] = ticket.result(timeout_s=1).text
        assert answers[agent] == reference.text(ids), agent
    flip(file_of(store, str(damaged), "block"), None)

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
    assert "KV memory: 90 MB" in run_worker("--kv-max-bytes", str(EIGHT_BLOCKS)).log
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


def test_a_model_without_a_tool_format_calls_the_tool_that_it_has_to_and_keeps_to_a_schema(redis_of_a_worker):
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    schema = {"type": "object", "properties": {"city": city, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
              "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("weather", "trains")]
    named: Any = {"type": "function", "function": {"name": "trains"}}
    fields: dict[str, Any] = {"messages": [user("The weather in Rome for three days?")], "tools": tools}
    choices = [(None, 8), ("required", 80), (named, 80)]
    producer = Producer(redis_of_a_worker)
    tickets = [producer.submit(tool_choice=choice, max_tokens=most, **fields) for choice, most in choices]
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    drawn = producer.submit(prompt="Once upon a time", response_format=form, max_tokens=80, temperature=1.5, seed=3)
    free, *called = [ticket.result(timeout_s=240) for ticket in tickets]
    assert (free.tool_calls, free.tool_error) == (None, None)
    for result in called:
        assert (result.finish_reason, result.content, result.tool_error) == ("tool_calls", "", None)
        jsonschema.validate(json.loads(result.tool_calls[0].function.arguments), schema)
    assert called[1].tool_calls[0].function.name == "trains"
    jsonschema.validate(json.loads(drawn.result(timeout_s=240).text), schema)


def test_the_lines_of_a_batch_get_mlx_lms_own_answers(redis_of_a_worker, reference, tmp_path):
    bodies, prompts = [], []
    for n in range(9):
        limits = {"model": "any", "max_tokens": 4, "temperature": 0, "user": f"batch {n % 6}"}
        raw, chat = RAW[n % 2] + f" {n}", [user(f"{CHATS[n % 2]} ({n})")]
        bodies.append({**limits, **({"prompt": raw} if n % 3 == 0 else {"messages": chat})})
        prompts.append(reference.tokenizer.encode(raw) if n % 3 == 0 else reference.chat(chat))
    lines = [
        {"custom_id": f"line {n}", "method": "POST", "body": body,
         "url": "/v1/completions" if "prompt" in body else "/v1/chat/completions"}
        for n, body in enumerate(bodies)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    stoker = [sys.executable, "-c", "from stoker.cli import main; main()", "--redis", redis_of_a_worker]
    batch = ["batch", "run", "in.jsonl", "--out", "out.jsonl", "--in-order", "--any-model"]
    subprocess.run([*stoker, *batch], cwd=tmp_path, check=True, timeout=240)
    answers = [json.loads(text)["response"]["body"] for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [a["choices"][0].get("text") or a["choices"][0]["message"]["content"] for a in answers]
    assert texts == [reference.text(ids, 4) for ids in prompts]
    assert [a["usage"]["completion_tokens"] for a in answers] == [len(reference.ids(ids, 4)) for ids in prompts]
    assert [a["usage"]["prompt_tokens"] for a in answers] == list(map(len, prompts))


def test_a_rolled_back_conversation_goes_on_as_if_it_had_never_been_replaced(redis_of_a_worker, reference):
    """In messages as SDKs send them; the accidental job, the rollback and the next turn are enqueued at once."""
    producer = Producer(redis_of_a_worker)
    asked = {"role": "user", "content": [{"type": "text", "text": "Which box is "}, {"type": "text", "text": "first?"}]}
    sent: list[dict[str, Any]] = [{"role": "developer", "content": BRIEF}, asked]
    tickets = [producer.submit(agent_id="a", messages=sent, max_tokens=MAX_TOKENS)]
    tickets.append(producer.submit(agent_id="a", prompt=RAW[0], max_tokens=2))
    with Redis.from_url(redis_of_a_worker) as connection:
        queue = Queue("generate", connection=connection, serializer=JSONSerializer)
        queue.enqueue(AGENT_TASK_PATH, request={"agent_id": "a", "action": "rollback"})
    tickets.append(producer.submit(agent_id="a", messages=[MORE_CHAT], context="append", max_tokens=MAX_TOKENS))
    first, accident, after = (ticket.result(timeout_s=240) for ticket in tickets)
    messages = [{"role": "system", "content": BRIEF}, user("Which box is first?")]
    ids = reference.chat(messages)
    assert first.text == reference.text(ids)
    assert accident.cache.replaced_version == 1
    expected = reference.turn_after([*ids, *reference.ids(ids)], MORE_CHAT)
    assert after.text == reference.text(expected)
    assert (after.usage.prompt_tokens, after.cache.agent_version) == (len(expected), 4)
    assert after.usage.cached_tokens >= 256
