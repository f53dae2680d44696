"""guidellm: a short benchmark of made-up prompts over chat completions, one request after the other.

Needs a model: the folder STOKER_MODEL has its tokenizer.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={os.environ['STOKER_URL']},model=any"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
        *("--tokenizer", f"kind=huggingface_auto,model={os.environ['STOKER_MODEL']}"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=8"),
        *("--output", f"kind=json,path={report}"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment, timeout=300, cwd=folder)
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (3, 0), totals
print("a benchmark of three requests, without an error")
