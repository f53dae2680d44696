"""Beside the calls: ids, other sites, health, metrics, the name of a model, and fields that nobody knows."""

import time

import httpx
import openai
import pytest
from tests.producer.serve.conftest import serving_at
from tests.producer.serve.test_calls import ask, give

from stoker.api.fields import BodyOptions

SITE = "http://localhost.example:3000"
RECORD = {"queues": ["generate"], "host": "h", "pid": 1, "started_at": 1.0, "mode": "rows", "context_tokens": 64}


@pytest.fixture
def worker(hand):
    """Registers the played worker with a model, or with ``None`` while it loads."""
    yield lambda model: hand.register({**RECORD, "model": model})
    hand.unregister()


def test_the_id_that_a_client_gives_comes_back_beside_the_jobs(served):
    answer = httpx.post(
        f"{served.url}/v1/completions", json={"model": "m", "prompt": "say x"}, headers={"X-Request-Id": "mine"}
    )
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-stoker-job']}"
    given = {"X-Request-Id": "mine"}
    no_json = httpx.post(f"{served.url}/v1/completions", headers=given)
    elsewhere = httpx.get(f"{served.url}/v1/models", headers={**given, "Host": "evil.example"})
    for refused, status in ((no_json, 415), (elsewhere, 403)):
        assert (refused.status_code, refused.headers["x-request-id"]) == (status, "mine")


def test_pages_of_other_sites_may_call_only_if_they_are_named(served, serve):
    asked = {"Origin": SITE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert httpx.options(f"{served.url}/v1/models", headers=asked).status_code >= 400
    assert httpx.get(f"{served.url}/v1/models", headers={"Origin": SITE}).status_code == 403
    named = serve(allowed_origins=(SITE,))
    allowed = httpx.options(f"{named.url}/v1/models", headers=asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, SITE)
    answer = httpx.get(f"{named.url}/v1/models", headers={"Origin": SITE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, SITE)
    assert httpx.get(f"{named.url}/v1/models", headers={"Origin": "http://other.example"}).status_code == 403


def test_requests_are_counted_by_path_and_status(served, client):
    ask(client, "say x")
    httpx.get(f"{served.url}/v1/models/none")
    httpx.get(f"{served.url}/nothing/here")
    assert [httpx.get(served.url + path).json() for path in ("/healthz", "/health")] == [{"status": "ok"}] * 2
    text = httpx.get(f"{served.url}/metrics").text
    for series in (
        'stoker_serve_requests_total{path="/v1/chat/completions",status="200"}',
        'stoker_serve_requests_total{path="/v1/models/{name:path}",status="404"}',
        'stoker_serve_requests_total{path="other",status="404"}',
        "stoker_serve_requests_open 1.0",
        'stoker_serve_first_byte_seconds_count{path="/v1/chat/completions"}',
    ):
        assert series in text


def test_while_redis_is_away_a_health_check_is_told_when_to_come_again():
    with serving_at("redis://127.0.0.1:1") as serving:
        answer = httpx.get(f"{serving.url}/healthz", timeout=60)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["code"] == "queue_unavailable"


def test_a_call_for_another_model_and_a_look_for_it_get_one_text(serve, worker):
    worker("right")
    client = serve(body_options=BodyOptions()).client()
    with pytest.raises(openai.NotFoundError) as called:
        client.completions.create(model="wrong", prompt="say x")
    with pytest.raises(openai.NotFoundError) as looked:
        client.models.retrieve("wrong")
    assert called.value.body == looked.value.body
    assert called.value.code == "model_not_found"
    assert "'right'" in str(called.value)
    assert client.completions.create(model="right", prompt="say x").choices[0].text == "x"


def test_while_the_model_loads_calls_are_told_to_come_later(serve, worker):
    worker(None)
    client = serve(worker_wait_s=0.0).client()
    with pytest.raises(openai.InternalServerError) as refused:
        ask(client, "say x")
    assert (refused.value.status_code, refused.value.code) == (503, "model_loading")
    assert refused.value.response.headers["retry-after"] == "5"
    worker("m")
    end = time.monotonic() + 20
    while True:
        try:
            assert ask(client, "say x").choices[0].message.content == "x"
            break
        except openai.InternalServerError:
            assert time.monotonic() < end


def scored(*tokens):
    entries = [
        {"token": token, "logprob": -1.0, "top_logprobs": [{"token": token, "logprob": -1.0}]} for token in tokens
    ]
    return {"start": 0, "content": [None, *entries]}


def test_several_prompts_are_several_choices_in_their_order(client, hand):
    answer = client.completions.create(model="m", prompt=["say a", "say b", "say c"], n=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "b"), (2, "c")]
    assert answer.usage.prompt_tokens == 30
    chunks = list(client.completions.create(model="m", prompt=["say a", "say b"], stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "a", 1: "b"}


def test_an_echo_has_the_prompt_and_its_scores_before_the_answer(client, hand):
    said = give(
        text="!",
        prompt={"text": "He went", "token_ids": [1, 2, 3]},
        prompt_logprobs=scored(" we", "nt"),
        logprobs={"content": [{"token": "!", "logprob": -0.5}]},
    )
    answer = client.completions.create(model="m", prompt=said, echo=True, logprobs=1, max_tokens=1)
    choice = answer.choices[0]
    assert choice.text == "He went!"
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["He", " we", "nt", "!"], [None, -1, -1, -0.5])
    assert (choice.logprobs.top_logprobs[0], choice.logprobs.text_offset) == (None, [0, 2, 5, 7])
    asked = hand.request(answer.id.removeprefix("cmpl-"))
    assert (asked["prompt_logprobs"], asked["return_prompt"]) == (1, True)


def test_tokens_of_a_text_and_the_text_of_tokens(served, hand):
    prompt = give(prompt={"text": "ab", "token_ids": [7, 8]})
    of_agent = {"X-Stoker-Agent": "a"}  # a client may send it with each call
    assert httpx.post(f"{served.url}/tokenize", json={"prompt": prompt}, headers=of_agent).status_code == 200
    assert httpx.post(f"{served.url}/tokenize", json={"prompt": prompt}).json()["tokens"] == [7, 8]
    asked = hand.request(hand.all_jobs()[-1])
    assert (asked["max_tokens"], asked["return_prompt"]) == (0, True)
    for path, name, value in (("detokenize", "tokens", "x"), ("detokenize", "tokens", []), ("tokenize", "prompt", "")):
        refused = httpx.post(f"{served.url}/{path}", json={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
