"""The layout of `--help`: headings in order, everything once, examples unchanged."""

import click
from click.testing import CliRunner

from stoker_shared.help_layout import SETTINGS, LaidOutGroup, examples, options_under

size = options_under("Size")
colour = options_under("Colour")


@click.group(cls=LaidOutGroup, sections={"First": ("paint",)}, context_settings=SETTINGS)
def main():
    """A box."""


@main.command(epilog=examples("box paint --red   # a long line that nobody breaks " + "x" * 60, "box paint"))
@size("--wide", is_flag=True, help="Wider.")
@colour("--red", is_flag=True, help="Redder.")
@size("--high", is_flag=True, help="Higher.")
@colour("--secret", hidden=True)
@click.argument("where", required=False)
def paint(wide, red, high, secret, where):
    """Paint it."""
    click.echo(f"{wide} {red} {high} {secret}")


@main.command()
def forgotten():
    """Not in any section."""


def output_of(*arguments):
    return CliRunner().invoke(main, arguments).output


def test_options_are_under_their_headings():
    lines = [line.rstrip() for line in output_of("paint", "-h").splitlines()]
    begin = lines.index("Size:")
    assert lines[begin:] == [
        "Size:",
        "  --wide  Wider.",
        "  --high  Higher.",
        "",
        "Colour:",
        "  --red  Redder.",
        "",
        "Other:",
        "  -h, --help  Show this message and exit.",
        "",
        "Examples:",
        "  box paint --red   # a long line that nobody breaks " + "x" * 60,
        "  box paint",
    ]
    assert output_of("paint", "--red", "--secret", "s") == "False True False s\n"


def test_a_command_that_no_section_names_is_not_lost():
    lines = [line.rstrip() for line in output_of("-h").splitlines()]
    assert lines[lines.index("First:") :] == [
        "First:",
        "  paint      Paint it.",
        "",
        "Other:",
        "  forgotten  Not in any section.",
    ]
