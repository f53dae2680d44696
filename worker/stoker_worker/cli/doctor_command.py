"""`stoker-worker doctor`: options and output."""

import json
import logging
import sys
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_shared.text import printable
from stoker_worker.cli.ending import cleaned_up_when_terminated, errors_in_one_line
from stoker_worker.cli.run_options import settings_of

if TYPE_CHECKING:
    from stoker_worker.doctor import Finding

_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_WIDTH: Final = 22
_looking = options_under("What it looks at")


@click.command(
    cls=LaidOutCommand,
    epilog=examples(
        "stoker-worker doctor",
        "stoker-worker doctor --model mlx-community/Qwen3-4B-4bit --redis embedded",
    ),
)
@_looking("--model", help="Load it and prove its batching as well: a minute or two more.")
@_looking("--redis", "redis_url", metavar="URL", help="As for `run`.  [redis://127.0.0.1:6379]")
@_looking("--store", type=click.Path(path_type=Path), help="As for `run`.  [~/.stoker]")
@options_under("Output")("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor(as_json: bool, **options: Any) -> None:
    """Check this machine, Redis, the store and a model; exit code 1 if a check fails.

    The worker's other settings are read from its variables (STOKER_MAX_BATCH, ...) and its file, as `run` does.
    """
    with errors_in_one_line(), cleaned_up_when_terminated():
        from stoker_worker import doctor as checks

        logging.basicConfig(level=logging.CRITICAL)  # the findings are the output
        settings, _ = settings_of(options)
        found: list[tuple[str, Finding]] = []
        for name, finding in checks.examine(settings):
            found.append((name, finding))
            if not as_json:
                _print(name, finding)
    if as_json:
        click.echo(_report(found), nl=False)
    else:
        counts = Counter(str(finding.status) for _, finding in found)
        click.echo(f"\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
    sys.exit(1 if any(finding.status == "fail" for _, finding in found) else 0)


def _report(found: "list[tuple[str, Finding]]") -> str:
    """All findings as JSON."""
    checks = [{"name": name, **asdict(finding)} for name, finding in found]
    return json.dumps({"stoker": version("stoker"), "checks": checks}, indent=1, ensure_ascii=False) + "\n"


def _print(name: str, finding: "Finding") -> None:
    status = click.style(f"{finding.status:<4}", fg=_COLOURS[finding.status])
    click.echo(f"{status}  {name:<{_NAME_WIDTH}} {printable(finding.line, lines=True)}")
    if finding.advice:
        click.echo(f"{'':<{_NAME_WIDTH + 6}} -> {printable(finding.advice, lines=True)}")
