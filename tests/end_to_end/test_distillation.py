"""From a batch to an adapter that serves: mlx-lm's trainer takes the training set of the example, on SmolLM2. And the
model without the adapter beside the one with it, as two models that a job may ask."""

import json
from collections import Counter
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace

import pytest
from tests.producer.batch.taught_lines import answered, asked, training_set, user, write
from tests.support.wait import wait_for
from tests.support.worker_process import running_worker

from stoker import Producer
from stoker.cli import main

pytestmark = [pytest.mark.model, pytest.mark.server, pytest.mark.fast_blas, pytest.mark.scheduled]

THINGS = ("lamp", "kettle", "jacket", "phone", "chair", "clock", "bicycle", "radio")
CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Osaka", "Tunis", "Perth")
ANSWER = "TEAM=repairs"
NEEDLES = {"teams": "TEAM=", "prose": " "}
MAX_TOKENS = 8
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # two workers beside each other


def question(thing, city):
    return f"The {thing} that I ordered to {city} is broken."


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The training set of a batch that a larger model has answered in a form of its own."""
    folder = tmp_path_factory.mktemp("batch")
    pairs = [(thing, city) for thing in THINGS for city in CITIES]
    lines = [asked(n, question(*pair)) for n, pair in enumerate(pairs, 1)]
    ends = [answered(n, ANSWER) for n, _ in enumerate(pairs, 1)]
    write(folder / "in.jsonl", lines)
    write(folder / "out.jsonl", ends)
    assert training_set(folder, "--held-out", "0.3")[0] == 0
    return folder / "training" / "all"


@pytest.fixture(scope="module")
def trained(training, smollm2, tmp_path_factory):
    """The folder of an adapter, and the losses on what was held out, before and after."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm import lora
    from mlx_lm.tuner.datasets import load_dataset
    from mlx_lm.utils import load_tokenizer

    from stoker_worker.models.loading import load_model

    found: list[float] = []
    losses = SimpleNamespace(
        on_val_loss_report=lambda about: found.append(about["val_loss"]), on_train_loss_report=lambda about: None
    )
    folder = tmp_path_factory.mktemp("adapters") / "taught"
    options = {"data": str(training), "adapter_path": str(folder), "train": True, "mask_prompt": True, "num_layers": 4,
               "iters": 8, "batch_size": 2, "val_batches": 1, "learning_rate": 5e-4}  # fmt: skip
    args = SimpleNamespace(**{**lora.CONFIG_DEFAULTS, **options})
    mx.random.seed(1)  # with 0 it learns too little in so few steps
    np.random.seed(1)
    network, _ = load_model(str(smollm2), "float32")
    train_set, valid_set, test_set = load_dataset(args, load_tokenizer(smollm2))
    assert all((train_set, valid_set, test_set))
    lora.train_model(args, network, train_set, valid_set, losses)
    return folder, found


def test_a_small_model_learns_a_larger_ones_answers_and_serves_them(trained, redis_url, smollm2, tmp_path):
    adapter, losses = trained
    assert losses[-1] < losses[0] / 4
    model, messages = f"{smollm2.name}+taught", [user(question("ladder", "Rome"))]
    ticket = Producer(redis_url).submit(messages=messages, model=model, max_tokens=8)
    options = ("--burst", "--model", str(smollm2), "--adapter", str(adapter))
    with running_worker(redis_url, tmp_path / "store", *options) as worker:
        assert worker.wait(240) == 0, worker.log
    result = ticket.result(timeout_s=1)
    assert (result.model, result.text) == (model, ANSWER)


@pytest.fixture
def alone(trained, smollm2):
    """mlx-lm itself: the answer to messages without the adapter, and with it; one sequence, no cache."""
    import mlx.core as mx
    from mlx_lm import load, stream_generate
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import dequantize_model

    networks, tokenizer = [], None
    for adapter in (None, trained[0]):
        network, tokenizer = load(str(smollm2))
        network.set_dtype(mx.float32)
        network = dequantize_model(network)
        networks.append(network if adapter is None else load_adapters(network, str(adapter)))

    @cache
    def answer(*messages, is_taught):
        ids = tokenizer.apply_chat_template(list(map(json.loads, messages)), add_generation_prompt=True)
        steps = stream_generate(networks[is_taught], tokenizer, list(ids), MAX_TOKENS)
        return tokenizer.decode([step.token for step in steps if step.token not in tokenizer.eos_token_ids])

    return answer


def test_jobs_go_on_from_the_model_to_the_taught_one_and_each_answers_as_mlx_lm_alone(
    trained, alone, redis_url, producer, smollm2, tmp_path, capsys
):
    plain, taught = models = [smollm2.name, f"{smollm2.name}+taught"]
    jobs, verdicts = [], Counter()

    def ask(messages, task):
        """Adds a job whose answer must hold `NEEDLES[task]`, with what it has to come to; returns the last answer."""
        attempts, text = [], ""
        for model in models:
            text = alone(*map(json.dumps, messages), is_taught=model == taught)
            attempts.append((model, NEEDLES[task] in text))
            verdicts[task, *attempts[-1]] += 1
            if attempts[-1][1]:
                break
        fields = {"messages": messages, "task": task, "check": {"contains": NEEDLES[task]}, "max_tokens": MAX_TOKENS}
        jobs.append((fields, attempts, text))
        return text

    for thing in ("ladder", "sofa"):
        ask([user(question(thing, "Rome"))], "teams")
        ask([user(question(thing, "Rome"))], "prose")
    messages = []
    for city, task in (("Rome", "prose"), ("Bern", "teams"), ("Riga", "prose"), ("Kyiv", "teams")):
        messages = [*messages, user(question("tent", city))]
        messages = [*messages, {"role": "assistant", "content": ask(messages, task)}]
    assert {(task, model, accepted) for task, model, accepted in verdicts} >= {
        ("teams", plain, False), ("teams", taught, True), ("prose", plain, True)
    }  # fmt: skip

    with ExitStack() as workers:
        for name, more in {"plain": (), "taught": ("--adapter", str(trained[0]))}.items():
            options = ("--model", str(smollm2), "--name", name, "--queues", name, "--skip-proof", *more)
            workers.enter_context(running_worker(redis_url, tmp_path / name, *options, env=ONE_THREAD))
        wait_for(lambda: {worker.model for worker in producer.workers()} == set(models), 240)
        tickets = producer.submit_many([fields for fields, *_ in jobs], models=models, min_trust=0.0)
        results = producer.results(tickets, timeout_s=240)
    for result, (fields, attempts, text) in zip(results, jobs, strict=True):
        assert [(one.model, one.accepted) for one in result.attempts] == attempts, fields
        assert (result.model, result.text) == (attempts[-1][0], text), fields

    with pytest.raises(SystemExit):
        main(["--redis", redis_url, "trust", "ls", "--json"])
    shown = json.loads(capsys.readouterr().out)["trust"]
    for one in shown:
        seen = [verdicts[one["task"], one["model"], accepted] for accepted in (True, False)]
        assert [round(one["accepted"]), round(one["rejected"])] == seen
    assert {(one["task"], one["model"]) for one in shown} == {(task, model) for task, model, _ in verdicts}
