"""The layout of ``--help`` in both commands: options and commands under headings, examples below. Parses nothing."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_LAST: Final = "Other"
_WHOLE_SENTENCE: Final = 500
"""Characters; click would cut a command's first sentence off at the end of the line."""


class _Option(click.Option):
    def __init__(self, *arguments: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.heading = heading


class _WithExamples(click.Command):
    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:  # unchanged: click would rewrap its lines
            formatter.write(f"\n{self.epilog}\n")


class LaidOutCommand(_WithExamples):
    """A command whose help lists its options under headings, in the order of their first option."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):  # the usage line has the arguments
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)):
                records.setdefault(getattr(parameter, "heading", _LAST), []).append(record)
        for heading, rows in records.items():
            with formatter.section(heading if len(records) > 1 else "Options"):
                formatter.write_dl(rows)


class LaidOutGroup(_WithExamples, click.Group):
    """A group whose help lists its commands under the headings of `sections`, and all others at the end."""

    command_class = LaidOutCommand

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.sections = sections

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        left = [name for name, command in self.commands.items() if not command.hidden]
        width = max(map(len, left), default=0)
        for heading, names in (*self.sections.items(), (_LAST, tuple(left))):
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(_WHOLE_SENTENCE))
                for name in names
                if name in left
            ]
            left = [name for name in left if name not in names]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class OptionMaker(Protocol):
    """`click.option`, as far as the commands use it."""

    def __call__(self, *names: str, **attributes: Any) -> Callable[[Function], Function]: ...


def options_under(heading: str) -> OptionMaker:
    """`click.option` for the options under one heading of a `LaidOutCommand`."""
    return partial(click.option, cls=_Option, heading=heading)


def examples(*lines: str) -> str:
    """An `epilog` with these command lines."""
    return "Examples:\n" + "\n".join(f"  {line}" for line in lines)
