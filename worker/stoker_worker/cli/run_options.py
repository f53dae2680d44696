"""The options of `stoker-worker run`, which `config` has too: headings, ranges, and defaults as people read them.

A text in brackets at the end of an option's help is its default; `config` shows it where a setting has no value.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stoker_shared.environment import USUAL_PLACE
from stoker_shared.help_layout import options_under

Function = TypeVar("Function", bound=Callable[..., Any])


def _joined(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> str | None:
    return ",".join(pairs) or None


_PATH: Final = click.Path(path_type=Path)
_SECONDS: Final = click.FloatRange(min=0, min_open=True)

_serving = options_under("Model and queue")
_store = options_under("Agent memory")
_batch = options_under("Batch")
_ending = options_under("Starting and stopping")
_watching = options_under("Log, metrics and health")
_testing = options_under("Without a model")

_OPTIONS: Final = (
    _serving("--model", help="Hugging Face repo id or mlx-lm folder."),
    _serving("--adapter", type=_PATH, help="LoRA or DoRA adapter of mlx-lm: a folder.  [none]"),
    _serving("--chat-template", type=_PATH, help="Jinja file instead of the model's template.  [the model's]"),
    _serving(
        "--default",
        "defaults",
        metavar="KEY=VALUE",
        multiple=True,
        callback=_joined,
        help="Sampling of jobs that do not set it, such as temperature=0.7; repeatable.",
    ),
    _serving("--trust-remote-code", is_flag=True, default=None, help="Run Python code that is in the model's folder."),
    _serving(
        "--redis",
        "redis_url",
        metavar="URL",
        help="URL, file:///PATH of a file with it, or `embedded` for an own server.  [redis://127.0.0.1:6379]",
    ),
    _serving(
        "--redis-port",
        type=click.IntRange(1, 65535),
        help="Port of the embedded server.  [that of the last time, or 6379, if it is free]",
    ),
    _serving("--queues", help="Comma-separated, highest priority first.  [generate]"),
    _serving("--dtype", type=click.Choice(["auto", "native", "float32"]), help="auto: float32 on a CPU.  [auto]"),
    _serving("--skip-proof", is_flag=True, default=None, help="Do not try the model in a batch before serving it."),
    _store("--store", type=_PATH, help="Folder of the agents' memory.  [~/.stoker]"),
    _store("--store-dtype", type=click.Choice(["native", "q8", "q4"]), help="Cache blocks on disk.  [native]"),
    _store(
        "--store-max-bytes",
        type=click.IntRange(min=1),
        help="Disk space for the store.  [80 % of its own and the free space]",
    ),
    _store(
        "--memory-max-bytes",
        type=click.IntRange(min=0),
        help="RAM for caches of recent agents; 0: none.  [1/16 of all]",
    ),
    _store(
        "--keep-versions", type=click.IntRange(min=1), help="Versions of an agent that a rollback can return to.  [16]"
    ),
    _store(
        "--agent-ttl", metavar="DURATION", help="Remove agents unused for so long: 30d, 12h, 90m, seconds.  [never]"
    ),
    _store(
        "--shared-store",
        metavar="URL",
        help="Bucket or folder in which several workers keep agents: s3://bucket/prefix, file:///mnt/shared.  [none]",
    ),
    _store(
        "--shared-store-max-bps",
        type=click.IntRange(min=1),
        help="Bytes of cache per second written there.  [no limit]",
    ),
    _store("--share-prefixes/--no-share-prefixes", default=None, help="Use cached prefixes across agents.  [share]"),
    _batch(
        "--max-batch",
        type=click.IntRange(1, 256),
        help="Most jobs in flight at once.  [32, or what the KV memory holds]",
    ),
    _batch("--kv-max-bytes", type=click.IntRange(min=1), help="KV memory of the batch.  [from the device]"),
    _batch("--kv-bits", type=click.Choice(["8"]), help="Keep keys and values in 8 bits.  [the model's own precision]"),
    _batch(
        "--wired-memory",
        is_flag=True,
        default=None,
        help="Let macOS keep the GPU's memory resident; Macs have crashed with it (docs/operations.md).",
    ),
    _batch(
        "--max-step-s", type=_SECONDS, help="Seconds of prefill in a step; twice that while a batch fills up.  [0.5]"
    ),
    _batch(
        "--prefill-step-tokens",
        type=click.IntRange(min=1),
        help="Prompt tokens of a sequence between two decode steps, at most.  [from the model and the device]",
    ),
    _batch(
        "--draft-ngram", is_flag=True, default=None, help="Narrow batches: guess answers that repeat their context."
    ),
    _ending("--config", metavar="FILE", help=f"TOML file with settings; '' for none.  [{USUAL_PLACE}, if it exists]"),
    _ending(
        "--name", metavar="NAME", help="The worker's name among those of its queues, as it stays.  [that of the store]"
    ),
    _ending("--grace-s", type=click.FloatRange(min=0), help="Seconds a stop waits for running jobs.  [60]"),
    _ending(
        "--ignore-shutdown-command",
        is_flag=True,
        default=None,
        help="Ignore RQ's shutdown command, which every client of Redis with the right to publish can send.",
    ),
    _ending("--burst", is_flag=True, default=None, help="Leave when the queues are empty."),
    _ending("--max-jobs", type=click.IntRange(min=1), help="Leave after so many jobs.  [no limit]"),
    _ending("--max-idle-s", type=_SECONDS, help="Leave after so many seconds without a job.  [never]"),
    _ending(
        "--standby",
        is_flag=True,
        default=None,
        help="Wait while another worker has the name, queue or store; then run.",
    ),
    _ending(
        "--new-store",
        is_flag=True,
        default=None,
        help="Serve a queue whose agents' conversations are in another store; `append` then begins new ones.",
    ),
    _ending(
        "--patience-s",
        type=click.FloatRange(min=0),
        help="With a shared store: how long an agent's jobs are left to the worker that has its cache.  [10]",
    ),
    _watching("--log-format", type=click.Choice(["text", "json"]), help="json: an object on each line.  [text]"),
    _watching("-q", "--quiet", is_flag=True, default=None, help="Log warnings and errors only."),
    _watching("-v", "--verbose", is_flag=True, default=None, help="Log more."),
    _watching(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        help="Loopback port of /metrics, /healthz and /readyz; 0: any.  [none]",
    ),
    _watching("--stuck-after-s", type=_SECONDS, help="A longer step of the engine makes the worker not ready.  [120]"),
    _testing(
        "--engine",
        type=click.Choice(["mlx", "scripted"]),
        help="scripted: deterministic, no model; --model names it.  [mlx]",
    ),
    _testing("--scripted-steps-per-s", type=_SECONDS, help="Speed of the scripted engine.  [200]"),
)


def run_options(command: Function) -> Function:
    """Give a command the options of `run`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def default_as_read(option: click.Parameter) -> str:
    """The default as the option's help has it; empty if it has none."""
    found = re.search(r"\[([^]]*)\]$", getattr(option, "help", None) or "")
    return found[1] if found else ""
