"""Prints the tables of the `memory` commands. Needs rich; texts from a store are never read as markup."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from stoker_shared.request import Message
from stoker_worker.memory.summary import AgentSummary, VersionSummary
from stoker_worker.ports import Transcript


def print_agents(agents: Sequence[AgentSummary]) -> None:
    """Print one line for each agent."""
    rows = (
        (
            agent.agent_id if agent.agent_id is not None else f"? ({agent.folder})",
            agent.version,
            agent.turns,
            agent.tokens,
            agent.cached_tokens,
            _length(agent),
            decimal(agent.record_bytes),
            decimal(agent.tail_bytes),
            decimal(agent.snapshot_bytes),
            decimal(agent.block_bytes),
            decimal(agent.shared_bytes),
            _time(agent.last_used),
            agent.state if agent.problem is None else f"{agent.state}: {agent.problem}",
        )
        for agent in agents
    )
    titles = "AGENT VERSION TURNS TOKENS CACHED LENGTH RECORDS TAIL SNAPSHOTS BLOCKS (SHARED) USED STATE"
    _print_table(titles.split(), rows)


def print_versions(versions: Sequence[VersionSummary]) -> None:
    """Print one line for each version."""
    rows = (
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
    )
    _print_table(["VERSION", "JOB", "BY", "ENDED", "FINISH", "TOKENS", "NEW", "CACHED", "SAVED", "ROLLBACK"], rows)


def print_conversation(transcript: Transcript | None) -> None:
    """Print the messages or the text, if they can be read."""
    console = _console()
    if transcript is None:
        console.print(Text("(it cannot be read)"))
        return
    for message in transcript.messages or ():
        console.print(Text(f"\n[{_plain(message.role)}]", style="bold"))
        console.print(Text(_plain(_said(message))))
    if transcript.text is not None:
        console.print(Text(f"\n{_plain(transcript.text)}"))


def _said(message: Message) -> str:
    calls = [f"tool call: {call}" for call in message.tool_calls or ()]
    return "\n".join([message.content, *calls] if message.content else calls)


def _length(agent: AgentSummary) -> str | None:
    if agent.messages is not None:
        return f"{agent.messages} messages"
    return None if agent.text_chars is None else f"{agent.text_chars} chars"


def _time(iso: str | None) -> str | None:
    return None if iso is None else iso.replace("T", " ").replace("+00:00", "Z")


def _print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", justify="left")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else _plain(str(cell))) for cell in row))
    _console().print(table)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # a pipe has no width
    return console


def _plain(text: str) -> str:
    """Without control characters, which would steer the terminal: a model may have written them."""
    return "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)
