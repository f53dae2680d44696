"""The product keeps the invariants in random histories: its workers, its store, a Redis server.

`DEEP=N` plays 4 N more histories, where the scheduled lane plays 300.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEEP = int(os.environ.get("DEEP", "0"))
AT_ONCE = 40


def broken(redis_url, first, last):
    """In processes of their own: what their threads are made of is replaced, and sets have one order each time. Each
    plays a few histories, because workers that crash in one keep their files open."""
    environment, found = os.environ | {"PYTHONHASHSEED": "0"}, []
    for seed in range(first, last, AT_ONCE):
        seeds = map(str, (seed, min(seed + AT_ONCE, last)))
        command = [sys.executable, "-m", "tests.several_workers.world", redis_url, *seeds]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found += done.stdout.splitlines()
    return found


def test_no_history_breaks_an_invariant_of_the_product(redis_url):
    assert broken(redis_url, 0, 8) == []


@pytest.mark.scheduled
@pytest.mark.timeout(0)
def test_no_history_of_many_breaks_an_invariant_of_the_product(redis_url):
    assert broken(redis_url, 8, 4 * DEEP + 8 if DEEP else 300) == []
