"""Ray Data: 1,000 rows over HTTP while the worker is killed, and a folder of Parquet files through `stoker batch`.

The arguments are the command `stoker batch`.
"""

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import ray
from ray.data.llm import HttpRequestProcessorConfig, build_processor

ray.init(num_cpus=2, object_store_memory=150 * 2**20, include_dashboard=False, logging_level="ERROR")

# As in docs/ray.md, from here on.


class CallsAtOnce:
    """Sends all calls of a batch at once, each with a key of its own."""

    def __init__(self):
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=3600)
        self.session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        await self.session.close()

    def post(self, url, headers, data):
        key = hashlib.sha256(data.encode()).hexdigest()
        call = self.session.post(url, headers={**headers, "Idempotency-Key": key}, data=data)
        return asyncio.ensure_future(call)


config = HttpRequestProcessorConfig(
    url=f"{os.environ['STOKER_URL']}/v1/chat/completions",
    session_factory=CallsAtOnce,
    batch_size=64,
    max_retries=9,
)


def payload(row):
    message = {"role": "user", "content": row["prompt"]}
    body = {"model": "m", "messages": [message], "max_tokens": 200, "temperature": 0}
    return {"payload": {**body, "metadata": {"row": str(row["id"])}}}  # no two rows have the same key


def answer(row):
    choices, error = (row["http_response"].get(name) for name in ("choices", "error"))
    return {
        "id": row["id"],
        "text": choices[0]["message"]["content"] if choices else None,
        "error": error["message"] if error else None,
    }


processor = build_processor(config, preprocess=payload, postprocess=answer)
# To here.

N_ROWS, N_OF_FILES = 1000, 40


def asked(row):
    return {"id": row["id"], "prompt": f"say row {row['id']}" if row["id"] < N_ROWS - 1 else "fail because it says so"}


rows = processor(ray.data.range(N_ROWS).map(asked)).take_all()
assert sorted(row["id"] for row in rows) == list(range(N_ROWS))
refused = [row for row in rows if row["error"] is not None]
assert [row["id"] for row in refused] == [N_ROWS - 1], refused
assert all(row["text"] == f"row {row['id']}" for row in rows if row["error"] is None)

folder = Path.cwd()
ray.data.range(N_OF_FILES).map(asked).repartition(2).write_parquet(str(folder / "rows"))
files = sorted((folder / "rows").glob("*.parquet"))
assert len(files) == 2
(folder / "answers").mkdir()
unnamed = {name: value for name, value in os.environ.items() if name != "STOKER_URL"}
for file in files:
    out = str(folder / "answers" / file.name)
    subprocess.run([*sys.argv[1:], "run", str(file), "--prompts", "--out", out], check=True, env=unnamed)
answers = ray.data.read_parquet(str(folder / "answers")).take_all()
assert sorted(row["id"] for row in answers) == list(range(N_OF_FILES))
assert all(row["text"] == f"row {row['id']}" and row["status"] == 200 for row in answers)
print("1,000 rows of `HttpRequestProcessorConfig`, the worker killed; Parquet files through `stoker batch` and back")
