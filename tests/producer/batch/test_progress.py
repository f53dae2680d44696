"""The progress of a batch, on a terminal and in a log."""

import re

import pytest

from stoker.batch import progress
from stoker.batch.collecting import Tally
from stoker.batch.progress import Progress


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "_DRAW_EVERY_S", 0.0)


def lines_of(terminal):
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", terminal.getvalue())]


def test_the_bar_moves(as_terminal):
    terminal = as_terminal(100)
    with Progress(200, Tally()) as bar:
        bar.show(0, 0)
        bar.show(90, 10)
        bar.show(190, 10, "nobody is there")
    first, half, last = [line for line in lines_of(terminal) if line]
    assert first.startswith("[--------------------]   0 %  0 done, 0 failed, 200 waiting")
    assert half.startswith("[##########----------]  50 %  90 done, 10 failed, 100 waiting")
    assert last.startswith("[####################] 100 %")
    assert last.rstrip().endswith("0 waiting, nobody is there")


def test_a_line_for_people_gets_a_line_of_its_own(as_terminal):
    terminal = as_terminal(100)
    with Progress(200, Tally()) as bar:
        bar.report("batch b: 200 lines")
        bar.show(1, 0)
        bar.report("line 7 failed")
        bar.show(2, 0)
    assert "batch b: 200 lines" in lines_of(terminal)
    assert "line 7 failed" in lines_of(terminal)
    assert lines_of(terminal)[-1] == ""  # the last line is empty, so that the next text begins there


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_a_narrow_terminal_wraps_no_line(as_terminal, columns):
    terminal = as_terminal(columns)
    with Progress(200_000, Tally()) as bar:
        bar.show(100_000, 50_000, "a note that is longer than it should be")
    assert max(map(len, lines_of(terminal))) < columns
    assert "100,000 done" in terminal.getvalue()


def test_a_log_gets_a_line_every_few_seconds(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    tally = Tally()
    with Progress(200, tally) as lines:
        lines.show(0, 0)
        lines.show(10, 0)
        now, tally.n_answers, tally.completion_tokens = 110.0, 50, 1000
        tally.prompt_tokens, tally.cached_tokens = 400, 100
        lines.show(50, 0)
    assert capsys.readouterr().err.splitlines() == [
        "0 done, 0 failed, 200 waiting",
        "50 done, 0 failed, 150 waiting, 100 tokens/s, 25 % cached, 30 s left",
    ]


def test_a_log_names_a_pause_once_and_guesses_no_end_in_it(capsys, monkeypatch):
    times = iter((100.0, 110.0, 120.0, 130.0))
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    tally = Tally()
    with Progress(200, tally) as lines:
        lines.show(0, 0)
        tally.n_answers = 10
        for note in ("no server", "no server", None):
            lines.show(10, 0, note)
    first, pause, after = capsys.readouterr().err.splitlines()
    assert (first, pause) == ("0 done, 0 failed, 200 waiting", "10 done, 0 failed, 190 waiting, no server")
    assert after.endswith(" left")
