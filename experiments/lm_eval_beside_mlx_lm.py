"""Two tasks of lm-evaluation-harness through stoker and through mlx-lm's own evaluator, item by item.

    stoker-worker run --model FOLDER --dtype float32 --redis URL
    python experiments/lm_eval_beside_mlx_lm.py --model FOLDER --redis URL

The first needs stoker's worker; the second `pip install lm_eval` beside it. The tasks and their items were written for
this comparison (`lm_eval_tasks/`): the harness' own come from the Hugging Face hub.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

TASKS = {"stoker_facts": "multiple choice", "stoker_passages": "perplexity"}
RESULTS = Path(__file__).resolve().parent / "results" / "lm_eval_results.json"


def evaluate(lm: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    begin = time.perf_counter()
    found = simple_evaluate(
        model=lm,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=".", include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    seconds = time.perf_counter() - begin
    items = {
        task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }
    metrics = {
        task: {name: value for name, value in values.items() if isinstance(value, float) and "stderr" not in name}
        for task, values in found["results"].items()
    }
    return {"metrics": metrics, "items": items, "seconds": round(seconds, 2)}


def numbers(value: Any) -> list[float]:
    """All numbers of nested lists; ``True`` is 1.0."""
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in numbers(part)]
    return [float(value)]


def through_mlx_lm(folder: Path) -> dict[str, Any]:
    from stoker_worker.models.blas import preload_blas

    preload_blas()
    import mlx.core as mx
    from mlx_lm.evaluate import MLXLM
    from mlx_lm.utils import dequantize_model

    lm = MLXLM(str(folder), use_chat_template=False)
    lm._model.set_dtype(mx.float32)
    lm._model = dequantize_model(lm._model)  # as the worker does with `--dtype float32`
    return evaluate(lm)


def through_stoker(folder: Path, redis_url: str) -> dict[str, Any]:
    from lm_eval_adapter import StokerLM
    from transformers import AutoTokenizer

    from stoker import Producer

    with Producer(redis_url) as producer:
        return evaluate(StokerLM(producer, AutoTokenizer.from_pretrained(folder), timeout_s=600))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="mlx-lm folder, the one that the worker has loaded")
    parser.add_argument("--redis", required=True, help="URL of the worker's server")
    args = parser.parse_args()
    folder = args.model.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(Path(__file__).resolve().parent / "lm_eval_tasks")
    ours, theirs = through_stoker(folder, args.redis), through_mlx_lm(folder)
    pairs = list(zip(numbers(list(ours["items"].values())), numbers(list(theirs["items"].values())), strict=True))
    found = {
        "model": folder.name,
        "items": {task: len(items) for task, items in ours["items"].items()},
        "stoker": {"metrics": ours["metrics"], "seconds": ours["seconds"]},
        "mlx_lm": {"metrics": theirs["metrics"], "seconds": theirs["seconds"]},
        "largest_difference_of_an_item": max(abs(one - other) for one, other in pairs),
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
