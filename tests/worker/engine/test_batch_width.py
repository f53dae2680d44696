"""How many sequences may run together after failed steps."""

import pytest

from stoker_worker.engine.step_limits import BatchWidth


def go_well(width, steps=64):
    for _ in range(steps):
        width.went_well()


def test_half_as_many_run_after_a_failed_step_and_all_again_after_quiet_steps():
    width = BatchWidth(8)
    width.broke(range(8))
    assert (width.now, width.is_searching) == (4, True)
    go_well(width, 63)
    assert width.now == 4
    go_well(width, 1)
    assert (width.now, width.is_searching) == (8, False)


def test_a_width_that_breaks_twice_is_not_tried_again(caplog):
    width = BatchWidth(8)
    width.broke(range(6))
    go_well(width, 128)
    width.broke(range(10, 16))
    assert "6 sequences together broke twice; at most 5" in caplog.text
    go_well(width, 1000)
    assert (width.now, width.most, width.is_searching) == (5, 5, False)


def test_when_two_together_fail_the_log_reports_that_the_model_cannot_be_batched(caplog):
    width = BatchWidth(4)
    for _ in range(2):
        width.broke([1, 2])
        go_well(width)
    assert (width.now, width.most) == (1, 1)
    assert "cannot batch this model" in caplog.text


@pytest.mark.parametrize("n", [2, 5])
def test_a_sequence_that_fails_alone_clears_the_width_of_blame(n):
    width = BatchWidth(8)
    for others in (range(10, 9 + n), range(20, 19 + n)):
        width.broke([1, *others])
        width.broke([1])
    assert width.most == n - 1
    width.blame(1)
    go_well(width, 1000)
    assert (width.now, width.most) == (8, 8)


def test_the_blame_of_one_sequence_keeps_the_failures_of_others_on_record():
    width = BatchWidth(8)
    width.broke([1, 2, 3])
    width.broke([4, 5, 6])
    width.blame(7)
    assert width.most == 2
    width.broke([7, 8])
    width.blame(7)
    assert width.most == 2
