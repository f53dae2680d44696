"""lm-eval: a task of its own form by local-completions (token ids, echo, log-probabilities) and local-chat-completions.

Needs a model: the folder STOKER_MODEL has its tokenizer.
"""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
URL, MODEL = os.environ["STOKER_URL"], os.environ["STOKER_MODEL"]
ITEMS = [
    {"question": "The capital of France is", "choices": [" Paris", " Berlin", " Oslo"], "answer": 0},
    {"question": "One, two, three, four,", "choices": [" nine", " five", " zero"], "answer": 1},
    {"question": "The opposite of hot is", "choices": [" big", " green", " cold"], "answer": 2},
]
CHOICE = """\
task: stoker_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
GENERATE = """\
task: stoker_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""
SERVED = {"tokenizer": MODEL, "model": "any", "num_concurrent": 2, "max_retries": 1}

with tempfile.TemporaryDirectory() as folder:
    items = Path(folder, "items.json")
    items.write_text("\n".join(map(json.dumps, ITEMS)))
    for name, text in (("choice", CHOICE), ("generate", GENERATE)):
        Path(folder, f"{name}.yaml").write_text(text.format(items=items))
    tasks = TaskManager(include_path=folder, include_defaults=False)
    arguments = {**SERVED, "base_url": f"{URL}/v1/completions", "batch_size": 2}
    ran = lm_eval.simple_evaluate(
        "local-completions", arguments, tasks=["stoker_choice", "stoker_generate"], task_manager=tasks
    )
    accuracy = ran["results"]["stoker_choice"]["acc,none"]
    assert accuracy >= 2 / 3, accuracy
    arguments = {**SERVED, "base_url": f"{URL}/v1/chat/completions"}
    ran = lm_eval.simple_evaluate(
        "local-chat-completions", arguments, tasks=["stoker_generate"], task_manager=tasks, apply_chat_template=True
    )
    assert len(ran["samples"]["stoker_generate"]) == len(ITEMS)
print("local-completions: choices by log-probabilities, and text; local-chat-completions: text")
