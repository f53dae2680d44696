"""Two workers with SmolLM2 in float32 and a shared store: agents of a worker that was killed go on at the other one,
with mlx-lm's own greedy answers and without computing their caches again.
"""

import pytest
from tests.end_to_end.macs import SHORT
from tests.support.worker_process import running_worker
from tests.worker.memory.agents import files_below

from stoker_shared.wire import LAST_KEY

pytestmark = [pytest.mark.model, pytest.mark.server, pytest.mark.fast_blas, pytest.mark.scheduled]

pytest.importorskip("obstore")

MAX_TOKENS = 12
ENV = {**SHORT, "STOKER_LEASE_TTL_S": "4", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # two beside each other
LONG = " ".join(f"Shelf {n} holds box {n * 7 % 31} with part number {n * n + 3}." for n in range(20))
PROMPTS = {"a": LONG, "b": "The longest river in South America is", "c": f"{LONG} To tie a bowline, first make"}
MORE = " After that,"


@pytest.mark.timeout(1500)
def test_agents_of_a_worker_that_was_killed_go_on_at_another_one_as_mlx_lm_alone(
    redis_url, producer, connection, real_model, smollm2, tmp_path
):
    (tmp_path / "mounted").mkdir()
    options = (
        "--model",
        str(smollm2),
        "--max-batch",
        "2",
        "--skip-proof",
        "--shared-store",
        f"file://{tmp_path / 'mounted'}",
    )

    def mac(name):
        return running_worker(redis_url, tmp_path / name, "--name", name, *options, env=ENV)

    with mac("mac1") as one, mac("mac2") as two:
        workers = {"mac1": one.wait_until_ready(400), "mac2": two.wait_until_ready(400)}
        tickets = {
            agent: producer.submit(agent_id=agent, prompt=prompt, context="append", max_tokens=MAX_TOKENS)
            for agent, prompt in PROMPTS.items()
        }
        first = {agent: ticket.result(timeout_s=300) for agent, ticket in tickets.items()}
        made_by = connection.hget(LAST_KEY.format(queue="generate"), "a").decode()
        one.wait_for(
            lambda: len(files_below(tmp_path / "mounted" / "caches")) == len(PROMPTS)
        )  # made when all is there
        workers["mac1" if "mac1" in made_by else "mac2"].kill()
        tickets = {
            agent: producer.submit(agent_id=agent, prompt=MORE, context="append", max_tokens=MAX_TOKENS)
            for agent in PROMPTS
        }
        second = {agent: ticket.result(timeout_s=300) for agent, ticket in tickets.items()}
    encode, decode = real_model.loaded.tokenizer.encode, real_model.tokenizer.decode
    ends = real_model.tokenizer.eos_token_ids
    for agent, prompt in PROMPTS.items():
        ids = encode(prompt, special_start=True)
        answer = real_model.alone(ids, MAX_TOKENS)
        assert first[agent].text == decode([token for token in answer if token not in ends]), agent
        stored = [*ids, *answer]
        ids = [*stored, *encode(MORE, special_start=False)]
        answer = real_model.alone(ids, MAX_TOKENS)
        assert second[agent].text == decode([token for token in answer if token not in ends]), agent
        assert second[agent].usage.cached_tokens in (len(stored), len(stored) - 1), agent
        assert (second[agent].cache.agent_version, second[agent].cache.miss_reason) == (2, None)
