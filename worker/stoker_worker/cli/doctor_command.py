"""`stoker-worker doctor`: looks at everything a worker needs and measures a model. Options and output only."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_shared.text import printable
from stoker_worker.cli.ending import cleaned_up_when_terminated, errors_in_one_line
from stoker_worker.cli.run_settings import settings_of

if TYPE_CHECKING:
    from stoker_worker.doctor.check import Finding
    from stoker_worker.doctor.report import Report
    from stoker_worker.settings import WorkerSettings

_FILE: Final = Path("stoker-doctor.json")
_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_WIDTH: Final = 22
_looking = options_under("What it looks at")
_output = options_under("Output")


@click.command(
    cls=LaidOutCommand,
    epilog=examples(
        "stoker-worker doctor",
        "stoker-worker doctor --model mlx-community/Qwen3-4B-4bit --redis embedded",
    ),
)
@_looking("--model", help="Load it and measure it as well: a minute or two more.")
@_looking("--redis", "redis_url", metavar="URL", help="As for `run`.  [redis://127.0.0.1:6379]")
@_looking("--store", type=click.Path(path_type=Path), help="As for `run`.  [~/.stoker]")
@_looking(
    "--wired-memory",
    is_flag=True,
    help="Measure with wired memory, as `run` has it. Only this option turns it on: Macs have crashed with it.",
)
@_output("--json", "as_json", is_flag=True, help="Print the file's content instead of lines.")
@_output("--out", type=click.Path(path_type=Path, dir_okay=False), help=f"Write a file.  [with --model: {_FILE}]")
def doctor(as_json: bool, out: Path | None, **options: Any) -> None:
    """Check this machine, Redis, the store and a model; exit code 1 if a check fails.

    The worker's other settings are read from its variables (STOKER_MAX_BATCH, ...) and its file, as `run` does.
    """
    with errors_in_one_line(), cleaned_up_when_terminated():
        logging.basicConfig(level=logging.CRITICAL)  # what the checks find is what the reader should see
        settings = settings_of(options).settings
        file = out or (_FILE if settings.model is not None else None)
        report = _examined(settings, file, as_json=as_json)
    if as_json:
        click.echo(report.text(), nl=False)
    else:
        _print_end(report, file)
    sys.exit(1 if report.failed else 0)


def _examined(settings: "WorkerSettings", file: Path | None, *, as_json: bool) -> "Report":
    from stoker_worker.doctor.examination import examine
    from stoker_worker.doctor.report import Report

    try:
        report = Report(file)
        for name, finding in examine(settings):
            report.add(name, finding)
            if not as_json:
                _print(name, finding)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror or error}") from error
    return report


def _print(name: str, finding: "Finding") -> None:
    status = click.style(f"{finding.status:<4}", fg=_COLOURS[finding.status])
    click.echo(f"{status}  {name:<{_NAME_WIDTH}} {printable(finding.line, lines=True)}")
    if finding.advice:
        click.echo(f"{'':<{_NAME_WIDTH + 6}} -> {printable(finding.advice, lines=True)}")


def _print_end(report: "Report", file: Path | None) -> None:
    from stoker_worker.doctor.check import Status

    n_ok, n_warn, n_fail = (report.count(status) for status in Status)
    click.echo(f"\n{n_ok} ok, {n_warn} to look at, {n_fail} failed")
    if file is not None:
        click.echo(f"{file} has it all, without prompts and passwords")
