"""The command `stoker dashboard`: its options and their help. Only command-line texts."""

from typing import Any

import click

from stoker.command_parts import or_usage_error, redis_option
from stoker_shared.help_layout import LaidOutCommand, examples, options_under

_serving = options_under("Serving")


@click.command(
    cls=LaidOutCommand,
    epilog=examples("stoker dashboard", "ssh -L 9181:127.0.0.1:9181 HOST    # from another machine"),
)
@_serving("--bind", default="127.0.0.1", show_default=True, metavar="HOST", help="Where to listen.")
@_serving("--port", type=click.IntRange(0, 65535), default=9181, show_default=True, help="0 for any free one.")
@_serving("--allow-remote", is_flag=True, help="Let --bind be reached from other machines. There is no password.")
@_serving(
    "--name", "names", multiple=True, help="Host name or address that browsers may use; may be given several times."
)
@redis_option
@click.pass_obj
def dashboard(redis_url: str, /, **options: Any) -> None:
    """Serve rq-dashboard: queues, jobs and results in a browser."""
    try:
        from stoker.dashboard.server import serve_dashboard

        or_usage_error(lambda: serve_dashboard(redis_url, report=lambda line: click.echo(line, err=True), **options))
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the dashboard's packages are missing ({error.name}); install them with: pip install 'stoker[dashboard]'"
        ) from None
