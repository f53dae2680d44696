"""`stoker-worker figures`: its options. The experiments measure; they are beside the packages in a checkout, and inside
in a wheel."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import click

from stoker_shared.errors import StokerError
from stoker_shared.help_layout import LaidOutCommand, examples, options_under
from stoker_worker.cli.ending import cleaned_up_when_terminated, errors_in_one_line

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_measuring = options_under("What it measures")
_output = options_under("Output")


@click.command(
    cls=LaidOutCommand,
    epilog=examples(
        "stoker-worker figures",
        "stoker-worker figures --model mlx-community/Qwen3-4B-4bit --minutes 30",
        "stoker-worker figures --only 010 --only 008",
    ),
)
@_measuring("--model", help="As for `run`.  [SmolLM2-135M-Instruct]")
@_measuring("--dtype", type=click.Choice(["float32", "auto"]), help="[float32 on a CPU and for SmolLM2, else auto]")
@_measuring(
    "--minutes",
    type=click.FloatRange(min=0.5),
    default=60.0,
    show_default=True,
    help="Limit for all parts together.",
)
@_measuring("--only", multiple=True, metavar="PART", help="An experiment's number, `machine` or `proof`; repeat it.")
@_measuring("--wired", is_flag=True, help="Measure wired memory too. MACOS CAN PANIC AND RESTART: save your work.")
@_measuring("--sleep", is_flag=True, help="Put this Mac to sleep beside a worker; you wake it.")
@_output("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("stoker-figures"), show_default=True,
         help="Folder of the page, its JSON and a log.")  # fmt: skip
@_output("--note", default="", help="A line for the page.")
def figures(out: Path, only: tuple[str, ...], wired: bool, sleep: bool, **asked: Any) -> None:
    """Measure this machine by stoker's own experiments in short, beside mlx-lm: an hour at most.

    The most telling parts come first; those that there was no time for are named. Stop your worker before: it would
    share the memory and the GPU.
    """
    with errors_in_one_line(), cleaned_up_when_terminated():
        from stoker_worker.cli.demo import demo_model

        kit = _experiments()
        named = frozenset(name for name, is_asked in (("wired", wired), ("sleep", sleep)) if is_asked)
        if unknown := set(only) - {part.name for part in kit.PARTS if not part.warning}:
            raise click.UsageError(f"no such part: {', '.join(sorted(unknown))}")
        out.mkdir(parents=True, exist_ok=True)
        asked["model"] = asked["model"] or demo_model(out.absolute())
        page, is_well = kit.run(out, kit.Options(**asked, named=named, only=only))
    click.echo(f"\n{page} has it all, and {page.with_suffix('.json').name} beside it the numbers")
    sys.exit(0 if is_well else 1)


def _experiments() -> ModuleType:
    folders = (_PACKAGE / "experiments", _PACKAGE.parents[1] / "experiments")
    folder = next((one for one in folders if (one / "figures.py").exists()), None)
    if folder is None:
        raise StokerError("the experiments are missing: install stoker from its wheel or from a checkout")
    sys.path.insert(0, str(folder))
    return import_module("figures")
