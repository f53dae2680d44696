"""The figures of docs/operations.md are those of the worker's own rules; nobody has to trust a table."""

import re
from pathlib import Path

import pytest

from stoker_worker.engine import provider
from stoker_worker.engine.kv_memory import KVCost
from stoker_worker.memory import ram_cache
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

pytestmark = pytest.mark.scheduled

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "operations.md").read_text()
GIB = 2**30
TOKENS = 8192
BITS_PER_WEIGHT = 4.5
WEIGHTS = {"Qwen3-4B": 4.02e9, "Qwen3-8B": 8.19e9, "Qwen3-30B-A3B": 30.5e9}
GPU_SHARE = {24: 2 / 3, 64: 3 / 4, 128: 3 / 4}
"""Of the RAM: macOS' usual default."""


def table(first_heading):
    lines = iter(PAGE.splitlines())
    next(line for line in lines if line.startswith(f"| {first_heading} |"))
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def specification(shape):
    n_layers, n_heads, dim = map(int, re.findall(r"\d+", shape))
    layer = LayerSpec(LayerKind.FULL, n_kv_heads=n_heads, key_dim=dim, value_dim=dim)
    return ModelCacheSpec((layer,) * n_layers, "bfloat16")


def test_the_sizing_tables_follow_from_the_workers_rules():
    specs = {}
    for model, shape, per_token, weights, per_agent in table("model"):
        specs[model] = KVCost(specification(shape), provider._GPU_PREFILL_TOKENS, in_rows=True)
        n_bytes = specs[model].block_bytes / 256
        assert per_token == f"{n_bytes / 1024:.0f} KiB"
        assert weights == f"{WEIGHTS[model] * BITS_PER_WEIGHT / 8 / GIB:.1f} GiB"
        assert per_agent == f"{TOKENS * n_bytes / 1e9:.2f} GB"
    rows = list(table("RAM"))
    assert len(rows) == len(specs) * len(GPU_SHARE)
    for ram, model, kv_memory, at_once, longest, in_ram in rows:
        ram_bytes, cost = int(ram.split()[0]) * GIB, specs[model]
        share = GPU_SHARE[int(ram.split()[0])] * provider._GPU_SHARE_OF_MEMORY
        kv_bytes = int(ram_bytes * share - WEIGHTS[model] * BITS_PER_WEIGHT / 8)
        if kv_bytes <= 0:
            assert kv_memory == "does not fit"
            continue
        blocks = kv_bytes // cost.block_bytes
        assert kv_memory == f"{kv_bytes / GIB:.1f} GiB"
        assert at_once == str(blocks // cost.sequence_blocks(TOKENS))
        assert longest == f"{cost.longest_sequence(blocks):,} tokens"
        per_agent = TOKENS * cost.block_bytes // 256
        assert in_ram == str(int(ram_bytes * ram_cache.DEFAULT_SHARE) // per_agent)
    [disk] = re.findall(r"^\*\*Disk\.\*\* 100 GB hold .*?;", PAGE, re.MULTILINE | re.DOTALL)
    fitting = {str(int(100e9) // (TOKENS * cost.block_bytes // 256)) for cost in specs.values()}
    assert fitting == set(re.findall(r"(?<![\w,])\d+(?= agents| with)", disk))
