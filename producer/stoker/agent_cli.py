"""`stoker agent`: reads and changes an agent's memory by jobs, from any machine. Only command-line texts.

`stoker-worker memory` does the same at the store itself.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar
from uuid import uuid4

import click
from click.decorators import FC

from stoker.agents import Agents, JobsOfAgent
from stoker.command_parts import json_option, open_producer, redis_option, require_consent, show, status_text
from stoker.producer import Producer
from stoker.wait_line import shown_wait
from stoker_shared.agents import AgentForgotten, AgentForked, AgentInfo, AgentResult, AgentRolledBack
from stoker_shared.errors import AgentNotFound
from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples, options_under
from stoker_shared.text import printable

R = TypeVar("R", bound=AgentResult)

_job = options_under("Job")
_expecting = _job("--expect-version", type=int, metavar="N", help="Fail unless the agent is at this version.")


@click.group(
    cls=LaidOutGroup,
    sections={"Look": ("info",), "Change": ("fork", "rollback", "forget")},
    context_settings=SETTINGS,
    epilog=examples("stoker agent info reviewer", "stoker agent rollback reviewer --to 7"),
)
def agent() -> None:
    """Show or change an agent's memory, by a job that runs in order with the agent's others."""


def _job_options(function: FC) -> FC:
    for option in (
        redis_option,
        json_option,
        options_under("Output")(
            *("--timeout-s", "--timeout", "timeout_s"),
            type=click.FloatRange(min=0),
            default=30.0,
            metavar="S",
            help="Longest wait for a worker to do it, in seconds; the job then still waits.  [30]",
        ),
        _job("--queue", metavar="NAME", help="RQ queue: that of the agent's other jobs.  [generate]"),
        _job("--job-id", metavar="ID", help="Your own id: repeating the command makes no second job."),
    ):
        function = option(function)
    return function


@agent.command(epilog=examples("stoker agent info reviewer", "stoker agent info reviewer --json | jq .tokens"))
@click.argument("agent_id", metavar="AGENT")
@_job_options
@click.pass_obj
def info(redis_url: str, /, agent_id: str, as_json: bool, **options: Any) -> None:
    """Show AGENT: its version, its size, and the versions to which it can return. Fails if there is no such agent."""
    _run(redis_url, as_json, options, lambda agents, given: agents.info(agent_id, **given))


@agent.command(epilog=examples("stoker agent fork reviewer reviewer-2"))
@click.argument("agent_id", metavar="AGENT")
@click.argument("target", metavar="NEW_AGENT")
@_expecting
@_job_options
@click.pass_obj
def fork(redis_url: str, /, agent_id: str, target: str, as_json: bool, **options: Any) -> None:
    """Make NEW_AGENT, which continues from where AGENT is."""
    _run(redis_url, as_json, options, lambda agents, given: agents.fork(agent_id, target, **given))


@agent.command(epilog=examples("stoker agent rollback reviewer", "stoker agent rollback reviewer --to 7"))
@click.argument("agent_id", metavar="AGENT")
@_job("--to", "version", type=click.IntRange(1), metavar="N", help="That version; else the one before the newest.")
@_expecting
@_job_options
@click.pass_obj
def rollback(redis_url: str, /, agent_id: str, version: int | None, as_json: bool, **options: Any) -> None:
    """Return AGENT to an earlier version. This makes a new version, so a second rollback undoes it."""
    _run(redis_url, as_json, options, lambda agents, given: agents.rollback(agent_id, version, **given))


@agent.command(epilog=examples("stoker agent forget reviewer --yes", "stoker agent forget reviewer --jobs --yes"))
@click.argument("agent_id", metavar="AGENT")
@_job("--yes", is_flag=True, help="Do not ask for confirmation.")
@_job("--jobs", "with_jobs", is_flag=True, help="Then also cancel and remove its jobs in Redis, with their texts.")
@_expecting
@_job_options
@click.pass_context
def forget(context: click.Context, /, agent_id: str, yes: bool, with_jobs: bool, as_json: bool, **options: Any) -> None:
    """Remove AGENT: its conversation, its results, and every block that only it used. Tells what Redis still has of it:
    its jobs of all queues, with their prompts and answers."""
    question = f"Remove agent {agent_id!r} and its conversation for good?"
    require_consent(context, question, "nothing was removed", yes=yes, as_json=as_json)
    with open_producer(context.obj) as producer:
        # Before `forget`, so that it does not wait for them; and after it, because more jobs may have been enqueued.
        removed = producer.agents.jobs(agent_id, remove=True).removed if with_jobs else 0
        done = _result(producer, as_json, options, lambda agents, given: agents.forget(agent_id, **given))
        left = producer.agents.jobs(agent_id, remove=with_jobs)
        left = replace(left, removed=left.removed + removed)
    value = {**done.model_dump(mode="json"), "in_redis": asdict(left)}
    show(as_json, value, f"{_words(done)}\n{_words_of_jobs(left, with_jobs)}")


def _run(
    redis_url: str, as_json: bool, options: dict[str, Any], call: Callable[[Agents, dict[str, Any]], AgentResult]
) -> None:
    with open_producer(redis_url) as producer:
        done = _result(producer, as_json, options, call)
    if isinstance(done, AgentInfo) and not done.exists:
        raise AgentNotFound(f"there is no agent {done.agent_id!r}")
    show(as_json, done.model_dump(mode="json"), _words(done))


def _result(
    producer: Producer, as_json: bool, options: dict[str, Any], call: Callable[[Agents, dict[str, Any]], R]
) -> R:
    timeout_s = options.pop("timeout_s")
    given = {name: value for name, value in options.items() if value is not None}
    job_id = given.setdefault("job_id", str(uuid4()))
    with shown_wait(lambda: status_text(producer.ticket(job_id).status()), quiet=as_json):
        return call(producer.agents, {**given, "timeout_s": timeout_s})


def _words_of_jobs(left: JobsOfAgent, with_jobs: bool) -> str:
    words = f"removed {left.removed} of its jobs from Redis; " if with_jobs else ""
    states = [f"{n} {name}" for name in ("waiting", "running", "ended") if (n := getattr(left, name))]
    if not states:
        return f"{words}Redis has no job of it{' any more' if with_jobs else ''}"
    then = "they are new, or being saved: repeat the command" if with_jobs else "--jobs removes them"
    return f"{words}Redis still has jobs of it: {', '.join(states)}; {then}"


def _words(done: AgentResult) -> str:
    name = repr(done.agent_id)
    match done:
        case AgentForgotten(existed=False):
            return f"there is no agent {name}"
        case AgentForgotten():
            shared = f"; {done.shared_blocks} more are in use by other agents" if done.shared_blocks else ""
            return f"forgot {name} and {done.blocks} blocks ({done.block_bytes} bytes){shared}"
        case AgentForked():
            return f"{done.target!r} continues from {name} at version {done.from_version}: {done.tokens} tokens"
        case AgentRolledBack():
            return f"{name} is at version {done.version}, as it was at version {done.to_version}: {done.tokens} tokens"
        case AgentInfo():
            return _description(done)


def _description(info: AgentInfo) -> str:
    lines = [f"agent     {info.agent_id}", f"version   {info.version}, last used {info.last_used or 'unknown'}"]
    if info.tokens is not None:
        length = f"{info.messages} messages" if info.messages is not None else f"{info.text_chars} characters"
        lines.append(f"length    {info.tokens} tokens, {length}; {info.cached_tokens} tokens cached")
    lines.append(f"on disk   {info.own_bytes} bytes, blocks {info.block_bytes} bytes")
    lines.append(f"state     {info.state}" + (f": {info.problem}" if info.problem else ""))
    versions = ", ".join(str(version.version) for version in info.versions)
    lines.append(f"rollback  to {versions}" if versions else "rollback  to no version")
    return "\n".join(map(printable, lines))
