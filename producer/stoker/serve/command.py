"""The command `stoker serve`: its options and their help. Only command-line texts."""

from pathlib import Path
from typing import Any

import click

from stoker.api.fields import BodyOptions
from stoker.batch.planning import aliases_of
from stoker.command_parts import or_usage_error, redis_option
from stoker.new_job import checked_queue_name
from stoker.serve.settings import ServeSettings, Tokens
from stoker_shared.help_layout import SETTINGS, LaidOutCommand, examples, options_under
from stoker_shared.wire import DEFAULT_QUEUE, MAX_REQUEST_BYTES

_serving = options_under("Serving")
_calls = options_under("Calls")
_limits = options_under("Limits")
_file = click.Path(dir_okay=False, path_type=Path)
_folder = click.Path(file_okay=False, path_type=Path)


def _usual_store() -> Path:
    """Raises `click.UsageError`: this user has no home folder."""
    try:
        return Path.home() / ".stoker-serve"
    except RuntimeError:
        raise click.UsageError("this user has no home folder: give --batch-store") from None


@click.command(
    cls=LaidOutCommand,
    context_settings=SETTINGS,
    epilog=examples(
        "stoker serve --any-model",
        "stoker serve --bind 0.0.0.0 --token-file tokens.txt",
        "curl http://127.0.0.1:8400/v1/models",
    ),
)
@_serving("--bind", default="127.0.0.1", show_default=True, metavar="HOST", help="Where to listen.")
@_serving("--port", type=click.IntRange(0, 65535), default=8400, show_default=True, help="0 for any free one.")
@_serving("--token-file", type=_file, metavar="FILE",
          help="Lines of a name and a bearer token; needed unless --bind is loopback.")  # fmt: skip
@_serving("--allow-origin", "allowed_origins", metavar="URL", multiple=True,
          help="A web site whose pages may call, as http://localhost:3000; repeatable.")  # fmt: skip
@_serving("--batch-store", type=_folder, metavar="FOLDER", default=_usual_store,
          help="Files, batches and responses.  [~/.stoker-serve]")  # fmt: skip
@_calls("--queue", metavar="NAME", default=DEFAULT_QUEUE, show_default=True, help="RQ queue.")
@_calls("--batch-queue", metavar="NAME", help="RQ queue of the lines of batches.  [--queue]")
@_calls("--model-alias", "model_aliases", metavar="THEIRS=OURS", multiple=True,
        help="Run calls for the model THEIRS on the model OURS; repeatable.")  # fmt: skip
@_calls("--any-model", is_flag=True, help="Run all calls on the loaded model, even if they name another.")
@_calls("--ignore-unknown-fields", "ignore_unknown", is_flag=True,
        help="Leave out fields that are not known, with a line in the log.")  # fmt: skip
@_calls("--max-tokens", type=click.IntRange(min=1), metavar="N",
        help="For calls without a limit.  [what the context leaves; text 16]")  # fmt: skip
@_calls("--no-worker", type=click.Choice(["refuse", "queue"]), default="refuse", show_default=True,
        help="While no worker is alive: answer 503, or let calls wait.")  # fmt: skip
@_limits("--max-body-bytes", type=click.IntRange(min=1), default=MAX_REQUEST_BYTES, show_default=True, metavar="BYTES",
         help="Largest request.")  # fmt: skip
@_limits("--max-file-bytes", type=click.IntRange(min=1), default=512 * 2**20, show_default=True, metavar="BYTES",
         help="Largest upload.")  # fmt: skip
@_limits("--max-waiting", type=click.IntRange(min=1), default=1000, show_default=True, metavar="N",
         help="Calls in flight per token name.")  # fmt: skip
@_limits("--timeout-s", type=click.IntRange(min=1), default=600, show_default=True, metavar="S",
         help="Longest call, in seconds.")  # fmt: skip
@redis_option
@click.pass_obj
def serve(redis_url: str, /, bind: str, port: int, **options: Any) -> None:
    """Serve the HTTP APIs of OpenAI and Anthropic in front of the queue."""
    try:
        from stoker.serve.server import serve as run_server
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the server's packages are missing ({error.name}); install them with: pip install 'stoker[serve]'"
        ) from None

    settings = _settings(**options)
    report = lambda line: click.echo(line, err=True)  # noqa: E731
    or_usage_error(lambda: run_server(redis_url, settings, bind=bind, port=port, report=report))


def _settings(
    *,
    token_file: Path | None, queue: str, batch_queue: str | None, no_worker: str, model_aliases: tuple[str, ...],
    any_model: bool, max_tokens: int | None, ignore_unknown: bool, **limits: Any,
) -> ServeSettings:  # fmt: skip
    """Raises `click.UsageError`: one of the options is not valid."""
    return ServeSettings(
        queue=or_usage_error(lambda: checked_queue_name(queue)),
        batch_queue=or_usage_error(lambda: checked_queue_name(batch_queue or queue)),
        body_options=BodyOptions(aliases_of(model_aliases), any_model, max_tokens, ignore_unknown),
        tokens=or_usage_error(lambda: Tokens.from_file(token_file)) if token_file else None,
        queue_without_worker=no_worker == "queue",
        **limits,
    )
