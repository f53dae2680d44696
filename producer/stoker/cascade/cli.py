"""`stoker trust`: how far the models are trusted with each class of tasks. Only command-line texts."""

from collections.abc import Callable

import click

from stoker.cascade.trust import Trusted, forget_trust, read_trust
from stoker.command_parts import json_option, open_producer, open_server, redis_option, require_consent, show, ticket_of
from stoker.operations import run
from stoker.tables import Table
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples, options_under

_which = options_under("Which")
_task = _which("--task", metavar="CLASS", help="Only this class of tasks.")


@click.group(
    cls=LaidOutGroup,
    sections={"Look": ("ls",), "Change": ("accept", "reject", "reset")},
    context_settings=SETTINGS,
    epilog=examples("stoker trust ls", "stoker trust reject JOB_ID", "stoker trust reset small --task invoices --yes"),
)
def trust() -> None:
    """Show or change how far models are trusted, by class of tasks.

    A verdict weighs less with each later one, so the counts are not whole numbers.
    """


@trust.command(epilog=examples("stoker trust ls", "stoker trust ls small --task invoices --json"))
@click.argument("model", required=False)
@_task
@json_option
@redis_option
@click.pass_obj
def ls(redis_url: str, model: str | None, task: str | None, as_json: bool) -> None:
    """List MODEL, or all models, in all classes."""
    is_meant = _filter(model, task)
    known = [trusted for trusted in run(open_server(redis_url), read_trust()) if is_meant(trusted)]
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
    text = Table(heading, rows, range(2, 6)).text() if rows else f"no verdicts {_which_ones(model, task)}"
    show(as_json, {"trust": [trusted.as_json() for trusted in known]}, text)


def _filter(model: str | None, task: str | None) -> Callable[[Trusted], bool]:
    return lambda trusted: model in (None, trusted.model) and task in (None, trusted.task)


def _which_ones(model: str | None, task: str | None) -> str:
    return f"on {model or 'all models'} in {f'class {task}' if task else 'all classes'}"


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
    question = f"Forget the verdicts {_which_ones(model, task)}?"
    require_consent(context, question, "nothing was forgotten", yes=yes, as_json=as_json)
    n_removed = run(open_server(context.obj), forget_trust(_filter(model, task)))
    text = f"forgot the verdicts on {n_removed} pair{'s' * (n_removed > 1)} of a model and a class"
    show(as_json, {"removed": n_removed}, text if n_removed else "there are no such verdicts")


def _judge(context: click.Context, job_id: str, as_json: bool, *, accepted: bool) -> None:
    with open_producer(context.obj) as producer:
        counted = ticket_of(producer, job_id).feedback(accepted=accepted)
    text = "accepted" if accepted else "rejected"
    show(as_json, {"job_id": job_id, "counted": counted}, text if counted else "the opposite verdict was given before")
    context.exit(0 if counted else 1)
