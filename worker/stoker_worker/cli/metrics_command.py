"""`stoker-worker metrics`: prints what the worker on this machine counts. Only command-line texts."""

import time
from http.client import HTTPException
from typing import Final
from urllib.request import urlopen

import click

from stoker_shared.environment import ENV_PREFIX
from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_shared.text import printable

_EVERY_S: Final = 5.0
_options = options_under("Options")


@click.command(
    cls=LaidOutCommand,
    epilog=examples(
        "stoker-worker metrics --once --metrics-port 9410",
        f"{ENV_PREFIX}METRICS_PORT=9410 stoker-worker metrics --once | grep jobs_ended",
    ),
)
@_options("--metrics-port", type=click.IntRange(1, 65535), required=True, envvar=f"{ENV_PREFIX}METRICS_PORT",
          show_envvar=True, help="The worker's own `--metrics-port`.")  # fmt: skip
@_options("--once", is_flag=True, help="Print them once, instead of every 5 seconds.")
def metrics(metrics_port: int, once: bool) -> None:
    """Print the metrics of the worker on this machine, in Prometheus' text format."""
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    while True:
        try:
            with urlopen(url, timeout=10) as reply:
                text = reply.read().decode()
        except (OSError, HTTPException) as error:
            raise click.ClickException(f"no worker with metrics at {url}: {error}") from error
        click.echo(printable(text, lines=True), nl=False)
        if once:
            return
        click.echo()
        time.sleep(_EVERY_S)
