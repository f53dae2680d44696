"""Prints the tables of the `memory` commands, made printable: a model may have written the values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.cells import cell_len
from rich.filesize import decimal

from stoker_shared.text import printable

if TYPE_CHECKING:  # a list of agents needs none of what these load
    from stoker_shared.message import Message
    from stoker_worker.memory.summary import AgentSummary, VersionSummary
    from stoker_worker.ports import Transcript


def print_list(agents: Iterable[Sequence[Mapping[str, Any]]], *, of: Literal["agent", "session"]) -> int:
    """Print one line for each agent or conversation, a page at a time; returns how many."""
    lines: list[Sequence[object]] = [
        [of.upper(), "VERSION", "TURNS", "TOKENS", "CACHED", "SIZE", "TRANSCRIPT", "PIECES", "BLOCKS", "USED", "STATE"]
    ]
    widths, n_agents = [0] * len(lines[0]), 0
    for some in agents:
        lines += [
            (
                agent["agent_id" if of == "agent" else of],
                *(agent[name] for name in ("version", "turns", "tokens", "cached_tokens")),
                *(decimal(agent[name]) for name in ("size_bytes", "transcript_bytes", "piece_bytes", "block_bytes")),
                _time(agent["last_used"]),
                agent["state"] if agent["problem"] is None else f"{agent['state']}: {agent['problem']}",
            )
            for agent in some
        ]
        widths = _print_lines(lines, widths)
        n_agents, lines = n_agents + len(some), []
    if lines:
        _print_lines(lines, widths)
    return n_agents


def print_agent(agent: "AgentSummary") -> None:
    """Print the facts about one agent, one on each line."""
    length = f"{agent.text_chars} chars" if agent.messages is None else f"{agent.messages} messages"
    facts = {
        "agent": agent.agent_id,
        "state": agent.state if agent.problem is None else f"{agent.state}: {agent.problem}",
        "version": agent.version,
        "turns": agent.turns,
        "length": None if agent.tokens is None else f"{agent.tokens} tokens, {length}",
        "cached": f"{agent.cached_tokens} tokens when it was saved",
        "transcripts": decimal(agent.transcript_bytes or 0),  # NULL in a damaged row; `ls` shows 0 bytes, too
        "pieces": f"{decimal(agent.piece_bytes or 0)}, tail and snapshots",
        "blocks": f"{agent.blocks}, {decimal(agent.block_bytes)}",
        "last used": _time(agent.last_used),
    }
    width = max(map(len, facts))
    for name, fact in facts.items():
        click.echo(f"{name:{width}}  {_cell(fact)}")


def print_versions(versions: Sequence["VersionSummary"]) -> None:
    titles = ("VERSION", "JOB", "BY", "ENDED", "FINISH", "TOKENS", "NEW", "CACHED", "SAVED", "ROLLBACK")
    rows = [
        (
            version.version,
            version.job_id,
            version.made_by,
            version.ended_by,
            version.finish_reason,
            version.tokens,
            version.new_tokens,
            version.cached_tokens,
            _time(version.saved_at),
            "yes" if version.can_return else None,
        )
        for version in versions
    ]
    _print_lines([titles, *rows], [0] * len(titles))


def print_conversation(transcript: "Transcript | None") -> None:
    if transcript is None:
        click.echo("(it cannot be read)")
        return
    for message in transcript.messages or ():
        click.secho(f"\n[{printable(message.role)}]", bold=True)
        click.echo(printable(_said(message), lines=True))
    if transcript.text is not None:
        click.echo(f"\n{printable(transcript.text, lines=True)}")


def _said(message: "Message") -> str:
    thinking = message.reasoning_content and f"thinking: {message.reasoning_content}"
    calls = [f"tool call: {call}" for call in message.tool_calls or ()]
    return "\n".join(line for line in (thinking, message.content, *calls) if line)


def _time(iso: str | None) -> str | None:
    return None if iso is None else iso.replace("T", " ").replace("+00:00", "Z")


def _print_lines(lines: Sequence[Sequence[object]], at_least: Sequence[int]) -> list[int]:
    """Print plain columns, because tens of thousands of rows must be quick; returns their widths."""
    cells = [[_cell(value) for value in line] for line in lines]
    columns = zip(at_least, zip(*cells, strict=True), strict=True)
    widths = [max(width, *map(cell_len, column)) for width, column in columns]
    padded = (
        "  ".join(x + " " * (width - cell_len(x)) for x, width in zip(line, widths, strict=True)) for line in cells
    )
    click.echo("\n".join(line.rstrip() for line in padded))
    return widths


def _cell(value: object) -> str:
    return "-" if value is None else printable(str(value))
