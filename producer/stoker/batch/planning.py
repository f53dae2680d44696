"""The options of a new batch; makes its record and its feeder from them and an input file."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from click.decorators import FC
from redis import Redis

from stoker.api.fields import BodyOptions
from stoker.batch.feeding import Feeder, ModelChoice
from stoker.batch.input_file import MAX_NAME_CHARACTERS, InputFile, Rows, batch_for, fingerprint_of, is_batch_name
from stoker.batch.json_lines import JsonLines
from stoker.batch.prompts import MAX_TOKENS, PLACE, PromptLines, Prompts
from stoker.batch.record import BatchRecord, read_record
from stoker.cascade.routing import Routing
from stoker.command_parts import or_usage_error
from stoker.new_job import JobOptions, checked_queue_name
from stoker.operations import run
from stoker.submit_command import read_check
from stoker_shared.help_layout import options_under
from stoker_shared.text import seconds_of
from stoker_shared.wire import DEFAULT_JOB_TIMEOUT_S, DEFAULT_QUEUE

_line = options_under("Lines")
_prompt = options_under("Prompts")
_models = options_under("Models and checks")
_job = options_under("Jobs")
_OPTIONS = (
    _line("--name", metavar="NAME", help="Start of the batch's id; another name makes another batch."),
    _line("--model-alias", "model_aliases", metavar="THEIRS=OURS", multiple=True,
          help="Run lines for the model THEIRS on the model OURS; repeatable."),
    _line("--any-model", is_flag=True, help="Run all lines on the loaded model, even if they name another."),
    _line("--max-tokens", type=click.IntRange(min=1), metavar="N",
          help=f"For lines without a limit.  [what the context leaves; text 16; prompts {MAX_TOKENS}]"),
    _prompt("--prompts", "are_prompts", is_flag=True,
            help="FILE has one prompt on each line: a chat message, with the line's number as its custom_id."),
    _prompt("--column", metavar="NAME",
            help="Column of a Parquet file with prompts, or with lists of messages.  [messages, else prompt]"),
    _prompt("--template", metavar="TEXT", help="The message, with {} where the prompt goes.  [{}]"),
    _prompt("--temperature", type=click.FloatRange(0, 2), metavar="X",
            help="0: always take the likeliest token.  [0.0]"),
    _prompt("--model", metavar="NAME", help="Only a worker that has loaded this model runs prompts.  [any]"),
    _models("--models", metavar="NAMES",
            help="Models to ask, the cheapest first, as a,b; or auto. The lines' own are not looked at."),
    _models("--check", type=click.File("r", encoding="utf-8"), metavar="FILE",
            help="A check as a JSON object, or a JSON Schema; if an answer fails it, the next model is asked."),
    _models("--min-trust", type=click.FloatRange(0, 1), metavar="X",
            help="Begin with a model only if this share of its answers passes."),
    _job("--queue", metavar="NAME", default=DEFAULT_QUEUE, show_default=True, help="RQ queue."),
    _job("--job-timeout-s", type=click.IntRange(min=1), default=DEFAULT_JOB_TIMEOUT_S, show_default=True, metavar="S",
         help="Longest run of one line, in seconds."),
    _job("--keep", "keep", default="7d", show_default=True, metavar="TIME",
         help="How long a line may wait, and how long its answer is kept: 90m, 12h, 7d."),
    _job("--max-redis-bytes", metavar="BYTES", type=click.IntRange(min=1),
         help="Send nothing while Redis holds more.  [1 GiB, or 80 % of its maxmemory]"),
)  # fmt: skip


def plan_options(command: FC) -> FC:
    """Give a command the options that `plan` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def input_file(source: Path, options: Mapping[str, Any]) -> InputFile:
    """The file of lines, or of prompts. Raises `click.UsageError`: it cannot be read, or an option of prompts is not
    valid."""
    prompts = _prompts_of(options)
    if not is_parquet(source) and options["column"] is not None:
        raise click.UsageError(f"--column is for files whose names end in {PARQUET}")

    def opened() -> Rows:
        if is_parquet(source):
            with parquet_packages():
                from stoker.batch.parquet_rows import ParquetRows
            return ParquetRows(source, prompts, options["column"])
        lines = JsonLines(source)
        return lines if prompts is None else PromptLines(lines, prompts)

    return or_usage_error(lambda: InputFile(opened()))


PARQUET: Final = ".parquet"


def is_parquet(path: Path) -> bool:
    """Whether a file is, or shall be, a table, by its name."""
    return path.suffix == PARQUET


@contextmanager
def parquet_packages() -> Iterator[None]:
    """Turns the error of a missing package into `click.UsageError`, which names the package to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        why = f"a Parquet file needs a package that is missing ({error.name}); install it with:"
        raise click.UsageError(f"{why} pip install 'stoker[parquet]'") from None


def _prompts_of(options: Mapping[str, Any]) -> Prompts | None:
    """``None`` if the file has lines of a batch. Raises `click.UsageError`: the options contradict each other, or the
    template has no place for the prompt."""
    given = {
        name: options[name] for name in ("column", "template", "temperature", "model") if options[name] is not None
    }
    if not options["are_prompts"]:
        if given:
            raise click.UsageError(f"--{next(iter(given))} needs --prompts; lines of a batch have their own")
        return None
    if PLACE not in given.get("template", PLACE):
        raise click.UsageError("--template has no {}, the place of the prompt")
    given.pop("column", None)
    return Prompts(**given)


def plan(connection: Redis, source: Path, lines: InputFile, options: Mapping[str, Any]) -> tuple[BatchRecord, Feeder]:
    """The record of this file's batch, and the feeder that sends its lines. `options` are the values of `plan_options`,
    by name. Raises `click.UsageError`: one of them is not valid."""
    name, keep_s = options["name"], _seconds(options["keep"])
    if name is not None and not is_batch_name(name):
        raise click.UsageError(f"--name: at most {MAX_NAME_CHARACTERS} English letters, digits, - and _")
    queue = or_usage_error(lambda: checked_queue_name(options["queue"]))
    choice = _choice(queue, options)
    prompts = _prompts_of(options)
    any_model = options["any_model"] or choice is not None or (prompts is not None and prompts.model is None)
    max_tokens = options["max_tokens"] or (None if prompts is None else MAX_TOKENS)
    line_options = BodyOptions(aliases_of(options["model_aliases"]), any_model, max_tokens)
    kind: list[Any] = [name, queue, asdict(line_options)]
    if choice is not None:
        kind += [choice.models, choice.check, choice.min_trust]
    fingerprint = fingerprint_of(lines.rows.digest, kind)
    batch = batch_for(name, fingerprint)
    if choice is not None:
        known = run(connection, read_record(batch))  # it continues, whoever serves the models now
        queue = known.queue if known is not None else ",".join(run(connection, choice.queues()))
    shown, created_s = source.name.encode(errors="replace").decode(), int(time.time())
    record = BatchRecord(batch, queue, shown, lines.n_requests, lines.n_lines, keep_s, created_s)
    jobs = JobOptions(options["job_timeout_s"], result_ttl_s=keep_s, failure_ttl_s=keep_s, ttl_s=keep_s)
    return record, Feeder(connection, lines, line_options, jobs, options["max_redis_bytes"], choice)


def _choice(queue: str, options: Mapping[str, Any]) -> ModelChoice | None:
    """Raises `click.UsageError`: only some of the options are given, or the check is not valid."""
    models, file, min_trust = options["models"], options["check"], options["min_trust"]
    if models is None and file is None and min_trust is None:
        return None
    if models is None or file is None:
        raise click.UsageError("--models and --check go together; one model will do: --models NAME --check FILE")
    check = or_usage_error(lambda: read_check(file))
    return ModelChoice(Routing(queue), models if models == "auto" else models.split(","), check, min_trust)


def aliases_of(given: tuple[str, ...]) -> dict[str, str]:
    """The values of `--model-alias`, from theirs to ours. Raises `click.UsageError`: one is not of the form
    THEIRS=OURS."""
    pairs = [alias.partition("=") for alias in given]
    if not all(theirs and ours for theirs, _, ours in pairs):
        raise click.UsageError("--model-alias: expected THEIRS=OURS")
    return {theirs: ours for theirs, _, ours in pairs}


def _seconds(duration: str) -> int:
    try:
        return seconds_of(duration, needs_unit=True)
    except ValueError as error:
        raise click.UsageError(f"--keep: {error}") from None
