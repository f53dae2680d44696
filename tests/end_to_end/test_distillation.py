"""From a batch to an adapter that serves: mlx-lm's trainer takes the training set of the example, on SmolLM2."""

from types import SimpleNamespace

import pytest
from tests.producer.batch.taught_lines import answered, asked, training_set, user, write
from tests.support.worker_process import burst

pytestmark = [pytest.mark.model, pytest.mark.server, pytest.mark.fast_blas, pytest.mark.scheduled]

THINGS = ("lamp", "kettle", "jacket", "phone", "chair", "clock", "bicycle", "radio")
CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Osaka", "Tunis", "Perth")
ANSWER = "TEAM=repairs"


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


def test_a_small_model_learns_a_larger_ones_answers_and_serves_them(trained, producer, redis_url, smollm2, store):
    adapter, losses = trained
    assert losses[-1] < losses[0] / 4
    model, messages = f"{smollm2.name}+taught", [user(question("ladder", "Rome"))]
    ticket = producer.submit(messages=messages, model=model, max_tokens=8)
    burst(redis_url, store, "--model", str(smollm2), "--adapter", str(adapter))
    result = ticket.result(timeout_s=1)
    assert (result.model, result.text) == (model, ANSWER)
