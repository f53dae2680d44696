"""Sixty flipped bytes over all files of a store of 30 agents; `make deep`: 5,000, of 200 agents."""

import logging
import os
from pathlib import Path

import pytest
from tests.worker.memory.flips import Flipper, Judge, Truth

pytestmark = pytest.mark.slow

IS_DEEP = "DEEP" in os.environ
N_FLIPS, N_AGENTS = (5000, 200) if IS_DEEP else (60, 30)
SEED = int(os.environ.get("FLIP_SEED", "1"))


def test_a_flipped_byte_is_a_named_error_or_no_error_and_never_another_text(
    quick_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # thousands of misses and refusals
    flipper = Flipper(Truth.make(quick_path / "truth", N_AGENTS), SEED)
    judge = Judge(flipper, quick_path / "work")
    for number in range(N_FLIPS):
        flip = flipper.choose()
        try:
            judge.judge(flip)
        except Exception as error:
            pytest.fail(f"flip {number} of FLIP_SEED={SEED}, {flip}: {error!r}")
    print(dict(judge.outcomes))
    # The flips reached what they should: each kind of outcome was seen.
    assert {"all agents right", "some agents unreadable", "refused", "saved", "saved anew"} <= judge.outcomes.keys()
    # Salvage loses next to nothing to one byte.
    lost = [int(outcome.split()[-1]) for outcome in judge.outcomes if outcome.startswith("salvaged")]
    assert lost
    assert max(lost) <= 10  # the rows of two pages, where a frame of the log names a wrong page
