"""`stoker trust`: how far the models are trusted with each class of tasks. Only command-line texts."""

import json
from collections.abc import Sequence

import click
from redis import Redis

from stoker.cascade.trust import Trusted, forget_trust, read_trust
from stoker.command_parts import agrees, json_option, open_producer, or_usage_error, redis_option, show, ticket_of
from stoker.connection import open_connection
from stoker.operations import run
from stoker.tables import Table
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples, options_under

_which = options_under("Which")
_task = _which("--task", metavar="CLASS", help="Only this class of tasks.")


@click.group(
    cls=LaidOutGroup,
    sections={"Look": ("ls", "show", "export"), "Change": ("accept", "reject", "reset")},
    context_settings=SETTINGS,
    epilog=examples("stoker trust ls", "stoker trust reject JOB_ID", "stoker trust reset small --task invoices --yes"),
)
def trust() -> None:
    """Show or change how far models are trusted, by class of tasks.

    A verdict weighs less with each later one, so the counts are not whole numbers.
    """


@trust.command(epilog=examples("stoker trust ls", "stoker trust ls --task invoices --json"))
@_task
@json_option
@redis_option
@click.pass_obj
def ls(redis_url: str, task: str | None, as_json: bool) -> None:
    """List all models in all classes."""
    found = [trusted for trusted in _known(redis_url) if task in (None, trusted.task)]
    _show(found, as_json, "no verdicts yet" if task is None else f"no verdicts in class {task!r}")


@trust.command(name="show", epilog=examples("stoker trust show small"))
@click.argument("model")
@json_option
@redis_option
@click.pass_obj
def show_one(redis_url: str, model: str, as_json: bool) -> None:
    """Show MODEL in all classes."""
    _show([trusted for trusted in _known(redis_url) if trusted.model == model], as_json, f"no verdicts on {model!r}")


@trust.command(epilog=examples("stoker trust export"))
@redis_option
@click.pass_obj
def export(redis_url: str) -> None:
    """Print all counts, one JSON object a line."""
    for trusted in _known(redis_url):
        click.echo(json.dumps(trusted.as_json()))


@trust.command(epilog=examples("stoker trust accept JOB_ID"))
@click.argument("job_id")
@json_option
@redis_option
@click.pass_context
def accept(context: click.Context, job_id: str, as_json: bool) -> None:
    """Count the answer of a job as good, in place of its check's verdict."""
    _judge(context, job_id, as_json, accepted=True)


@trust.command(epilog=examples("stoker trust reject JOB_ID"))
@click.argument("job_id")
@json_option
@redis_option
@click.pass_context
def reject(context: click.Context, job_id: str, as_json: bool) -> None:
    """Count the answer of a job as bad, in place of its check's verdict."""
    _judge(context, job_id, as_json, accepted=False)


@trust.command(epilog=examples("stoker trust reset small --task invoices --yes", "stoker trust reset --yes"))
@click.argument("model", required=False)
@_task
@_which("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@redis_option
@click.pass_context
def reset(context: click.Context, model: str | None, task: str | None, yes: bool, as_json: bool) -> None:
    """Forget the verdicts on MODEL, or on all models, as if they were new."""
    if as_json and not yes:
        raise click.UsageError("--json needs --yes")
    which = f"on {model or 'all models'} in {f'class {task}' if task else 'all classes'}"
    if not (yes or agrees(f"Forget the verdicts {which}?")):
        click.echo("nothing was forgotten", err=True)
        context.exit(1)
    n_removed = run(
        _server(context.obj),
        forget_trust(lambda trusted: model in (None, trusted.model) and task in (None, trusted.task)),
    )
    text = f"forgot the verdicts on {n_removed} pair{'s' * (n_removed > 1)} of a model and a class"
    show(as_json, {"removed": n_removed}, text if n_removed else "there are no such verdicts")


def _judge(context: click.Context, job_id: str, as_json: bool, *, accepted: bool) -> None:
    with open_producer(context.obj) as producer:
        counted = ticket_of(producer, job_id).feedback(accepted=accepted)
    text = "accepted" if accepted else "rejected"
    show(as_json, {"job_id": job_id, "counted": counted}, text if counted else "the opposite verdict was given before")
    context.exit(0 if counted else 1)


def _server(url: str) -> Redis:
    return or_usage_error(lambda: open_connection(url))


def _known(url: str) -> list[Trusted]:
    return run(_server(url), read_trust())


def _show(known: Sequence[Trusted], as_json: bool, if_none: str) -> None:
    rows = [
        [
            trusted.task,
            trusted.model,
            f"{trusted.counts.accepted:.1f}",
            f"{trusted.counts.rejected:.1f}",
            f"{100 * trusted.counts.rate:.0f} %",
            f"{100 * trusted.counts.lower_bound():.0f} %",
        ]
        for trusted in known
    ]
    heading = ["class", "model", "accepted", "rejected", "rate", "at least"]
    text = Table(heading, rows, range(2, 6)).text() if rows else if_none
    show(as_json, {"trust": [trusted.as_json() for trusted in known]}, text)
