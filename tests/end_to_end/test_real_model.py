"""The whole path on SmolLM2 in float32: the results in Redis equal mlx-lm's own, whatever was cached."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from tests.support.worker_process import running_worker

from stoker import Producer
from stoker_shared.wire import AGENT_TASK_PATH

pytestmark = [pytest.mark.model, pytest.mark.server, pytest.mark.fast_blas]

MAX_TOKENS = 14
TWELVE_BLOCKS = 12 * 256 * 46080  # bytes of a token's cache in float32; eight sequences do not fit at once
RAW = ["The longest river in South America is", "To tie a bowline, first make"]
CHATS = ["Name two primary colours.", "What do bees make?"]
BRIEF = " ".join(f"Shelf {n} holds box {n * 7 % 31} with part number {n * n + 3}." for n in range(24))
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

    class Reference:
        def __init__(self):
            self.tokenizer = tokenizer

        def ids(self, prompt_ids, max_tokens=MAX_TOKENS):
            return [step.token for step in stream_generate(network, tokenizer, list(prompt_ids), max_tokens)]

        def text(self, prompt_ids, max_tokens=MAX_TOKENS):
            ids = self.ids(prompt_ids, max_tokens)
            return tokenizer.decode([token for token in ids if token not in tokenizer.eos_token_ids])

        def chat(self, messages):
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    return Reference()


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """The proofs of the model so far: one is enough for all stores."""
    return tmp_path_factory.mktemp("proofs") / "model-proofs.json"


@pytest.fixture
def run_worker(redis_url, tmp_path, smollm2, proofs):
    store = tmp_path / "store"

    def run(*arguments):
        if proofs.exists():
            store.mkdir(exist_ok=True)
            shutil.copy(proofs, store)
        options = ("--burst", "--model", str(smollm2), "--max-batch", "8", *arguments)
        with running_worker(redis_url, store, *options) as worker:
            assert worker.wait(240) == 0, worker.log
        shutil.copy(store / proofs.name, proofs)
        return worker

    return run


def user(text):
    return {"role": "user", "content": text}


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_two_turns_across_a_restart_equal_mlx_lm_alone_and_only_new_tokens_are_prefilled(
    redis_url, run_worker, reference
):
    producer, tokenizer = Producer(redis_url), reference.tokenizer
    agents = [(kind, context, n) for kind in ("raw", "chat") for context in ("append", "full") for n in range(2)]

    def first(kind, context, n):
        given = {"prompt": RAW[n]} if kind == "raw" else {"messages": [user(CHATS[n])]}
        return {"context": context, "max_tokens": MAX_TOKENS, **given}

    tickets = [producer.submit(agent_id=str(agent), **first(*agent)) for agent in agents]
    run_worker()
    stored, answers = {}, {}
    for agent, ticket in zip(agents, tickets, strict=True):
        kind, _, n = agent
        ids = tokenizer.encode(RAW[n]) if kind == "raw" else reference.chat([user(CHATS[n])])
        stored[agent] = [*ids, *reference.ids(ids)]
        answers[agent] = ticket.result(timeout_s=1).text
        assert answers[agent] == reference.text(ids), agent

    tickets, expected = [], []
    for agent in agents:
        kind, context, n = agent
        if kind == "raw" and context == "append":
            new: dict[str, Any] = {"prompt": MORE_TEXT}
            ids = stored[agent] + tokenizer.encode(MORE_TEXT, add_special_tokens=False)
        elif kind == "raw":
            new = {"prompt": RAW[n] + answers[agent] + MORE_TEXT}
            ids = tokenizer.encode(new["prompt"])
        else:
            whole = [user(CHATS[n]), {"role": "assistant", "content": answers[agent]}, MORE_CHAT]
            new = {"messages": [MORE_CHAT] if context == "append" else whole}
            ids = reference.chat(whole)
            if context == "append":
                closing = "" if stored[agent][-1] in tokenizer.eos_token_ids else "<|im_end|>"
                turn = f"{closing}\n<|im_start|>user\n{MORE_CHAT['content']}<|im_end|>\n<|im_start|>assistant\n"
                ids = stored[agent] + tokenizer.encode(turn, add_special_tokens=False)
        expected.append(ids)
        tickets.append(producer.submit(agent_id=str(agent), **{"context": context, "max_tokens": MAX_TOKENS, **new}))
    assert "KV memory: 12 blocks" in run_worker("--kv-max-bytes", str(TWELVE_BLOCKS)).log
    for agent, ticket, ids in zip(agents, tickets, expected, strict=True):
        result = ticket.result(timeout_s=1)
        assert result.text == reference.text(ids), agent
        assert result.usage.prompt_tokens == len(ids), agent
        assert result.usage.cached_tokens == min(common(stored[agent], ids), len(ids) - 1), agent
        assert result.cache.source in ("memory", "disk")  # some were read ahead
        assert (result.cache.miss_reason, result.cache.agent_version) == (None, 2)


def test_calls_of_a_session_equal_mlx_lm_alone_and_only_new_tokens_are_prefilled(redis_url, run_worker, reference):
    producer = Producer(redis_url)
    system = {"role": "system", "content": BRIEF}
    main, side = [system, user("Which box is on shelf 3?")], [system, user("Give a title of three words.")]
    conversations, stored = [main, side], [[], []]
    for turn in range(2):
        tickets = [producer.submit(session="s", messages=whole, max_tokens=MAX_TOKENS) for whole in conversations]
        run_worker("--memory-max-bytes", "0")
        for n, (whole, ticket) in enumerate(zip(conversations, tickets, strict=True)):
            ids, result = reference.chat(whole), ticket.result(timeout_s=1)
            assert result.text == reference.text(ids), (turn, n)
            if turn:
                assert result.usage.cached_tokens == common(stored[n], ids) > 256
                assert (result.cache.source, result.cache.miss_reason) == ("disk", None)
            stored[n] = [*ids, *reference.ids(ids)]
            assert len(stored[n]) == result.usage.prompt_tokens + result.usage.completion_tokens
            conversations[n] = [*whole, {"role": "assistant", "content": result.text}, MORE_CHAT]


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_block_and_another_models_store_cost_time_and_never_an_answer(
    redis_url, run_worker, reference, tmp_path, smollm2
):
    producer = Producer(redis_url)
    messages = [{"role": "system", "content": BRIEF}, user("Which box is on shelf 3?")]
    producer.submit(agent_id="a", messages=messages, context="append", max_tokens=MAX_TOKENS)
    run_worker()
    ids = reference.chat(messages)
    stored = [*ids, *reference.ids(ids)]
    assert len(ids) > 256
    shutil.copytree(tmp_path / "store", tmp_path / "kept")
    block, _ = sorted((tmp_path / "store" / "blocks").rglob("*.safetensors"), key=lambda path: len(path.name))
    damage(block)
    ticket = producer.submit(agent_id="a", messages=[MORE_CHAT], context="append", max_tokens=MAX_TOKENS)
    run_worker()
    result = ticket.result(timeout_s=1)
    whole = [*messages, {"role": "assistant", "content": reference.text(ids)}, MORE_CHAT]
    expected = reference.chat(whole)
    assert expected[: len(stored)] == stored
    assert result.text == reference.text(expected)
    assert (result.usage.cached_tokens, result.cache.miss_reason) == (0, "block_corrupt")

    # The undamaged store again, opened by a worker whose model encodes positions differently: a different model.
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "kept").rename(tmp_path / "store")
    shutil.copytree(smollm2, tmp_path / "other", copy_function=os.symlink)
    config = json.loads((smollm2 / "config.json").read_text())
    (tmp_path / "other" / "config.json").unlink()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "rope_theta": config["rope_theta"] + 1}))
    ticket = producer.submit(agent_id="a", messages=[MORE_CHAT], context="append", max_tokens=2)
    run_worker("--model", str(tmp_path / "other"))
    result = ticket.result(timeout_s=1)
    assert (result.usage.cached_tokens, result.cache.miss_reason) == (0, "other_model")
    assert result.usage.prompt_tokens == len(expected)


def test_a_model_without_a_tool_format_calls_the_tool_that_it_has_to(redis_url, run_worker):
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    schema = {"type": "object", "properties": {"city": city, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
              "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("weather", "trains")]
    named: Any = {"type": "function", "function": {"name": "trains"}}
    fields: dict[str, Any] = {
        "messages": [user("The weather in Rome for three days?")],
        "tools": tools,
        "max_tokens": 80,
    }
    choices = [None, "required", named]
    tickets = [Producer(redis_url).submit(tool_choice=choice, **fields) for choice in choices]
    run_worker()
    free, *called = [ticket.result(timeout_s=1) for ticket in tickets]
    assert (free.tool_calls, free.tool_error) == (None, None)
    for result in called:
        assert (result.finish_reason, result.content, result.tool_error) == ("tool_calls", "", None)
        jsonschema.validate(json.loads(result.tool_calls[0].function.arguments), schema)
    assert called[1].tool_calls[0].function.name == "trains"


def test_the_lines_of_a_batch_get_the_answers_of_single_jobs(redis_url, run_worker, tmp_path):
    bodies = []
    for n in range(24):
        limits = {"model": "any", "max_tokens": 6, "temperature": 0, "user": f"batch {n % 8}"}
        given = {"prompt": RAW[n % 2] + f" {n}"} if n % 3 == 0 else {"messages": [user(f"{CHATS[n % 2]} ({n})")]}
        bodies.append({**limits, **given})
    lines = [
        {"custom_id": f"line {n}", "method": "POST", "body": body,
         "url": "/v1/completions" if "prompt" in body else "/v1/chat/completions"}
        for n, body in enumerate(bodies)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def batch(*arguments):
        stoker = [sys.executable, "-c", "from stoker.cli import main; main()", "--redis", redis_url, "batch"]
        subprocess.run([*stoker, *arguments], cwd=tmp_path, check=True, timeout=60)

    batch("submit", "in.jsonl", "--any-model", "--name", "b")
    run_worker()
    batch("fetch", "b", "--out", "out.jsonl", "--in-order")
    answers = [json.loads(text)["response"]["body"] for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [a["choices"][0].get("text") or a["choices"][0]["message"]["content"] for a in answers]

    requests = [
        {"agent_id": f"alone {n}", "max_tokens": 6} | {k: v for k, v in body.items() if k in ("prompt", "messages")}
        for n, body in enumerate(bodies)
    ]
    tickets = Producer(redis_url).submit_many(requests)
    run_worker("--max-batch", "1")
    alone = [ticket.result(timeout_s=1) for ticket in tickets]
    assert texts == [result.text for result in alone]
    assert [a["usage"]["completion_tokens"] for a in answers] == [r.usage.completion_tokens for r in alone]
    assert [a["usage"]["prompt_tokens"] for a in answers] == [r.usage.prompt_tokens for r in alone]


def test_a_rolled_back_conversation_goes_on_as_if_it_had_never_been_replaced(redis_url, run_worker, reference):
    """In messages as SDKs send them; the accidental job, the rollback and the next turn are enqueued at once."""
    producer = Producer(redis_url)
    asked = {"role": "user", "content": [{"type": "text", "text": "Which box is "}, {"type": "text", "text": "first?"}]}
    sent: list[dict[str, Any]] = [{"role": "developer", "content": BRIEF}, asked]
    tickets = [producer.submit(agent_id="a", messages=sent, max_tokens=MAX_TOKENS)]
    tickets.append(producer.submit(agent_id="a", prompt=RAW[0], max_tokens=2))
    with Redis.from_url(redis_url) as connection:
        queue = Queue("generate", connection=connection, serializer=JSONSerializer)
        queue.enqueue(AGENT_TASK_PATH, request={"agent_id": "a", "action": "rollback"})
    tickets.append(producer.submit(agent_id="a", messages=[MORE_CHAT], context="append", max_tokens=MAX_TOKENS))
    run_worker()
    first, accident, after = (ticket.result(timeout_s=1) for ticket in tickets)
    messages = [{"role": "system", "content": BRIEF}, user("Which box is first?")]
    ids = reference.chat(messages)
    assert first.text == reference.text(ids)
    assert accident.cache.replaced_version == 1
    stored = [*ids, *reference.ids(ids)]
    closing = "" if stored[-1] in reference.tokenizer.eos_token_ids else "<|im_end|>"
    turn = f"{closing}\n<|im_start|>user\n{MORE_CHAT['content']}<|im_end|>\n<|im_start|>assistant\n"
    expected = stored + reference.tokenizer.encode(turn, add_special_tokens=False)
    assert after.text == reference.text(expected)
    assert (after.usage.prompt_tokens, after.cache.agent_version) == (len(expected), 4)
    assert after.usage.cached_tokens >= 256


def test_a_missing_model_is_reported_in_one_line(redis_url, tmp_path):
    options = ("--burst", "--model", str(tmp_path / "nowhere"))
    with running_worker(redis_url, tmp_path / "store", *options) as worker:
        assert worker.wait(120) == 1
    assert "ModelNotLoadable" in worker.log.strip().splitlines()[-1]
    assert "Traceback" not in worker.log
