"""Real clients, unmodified, against `stoker serve`: `make clients` installs them, and `make test` skips all of this.

Each script of ``scripts/`` is run with the interpreter that has its package. It fails by its exit code, and its last
line tells what ran: the row of its client in docs/serve.md.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.support.model_fixture import CHECKOUT, smollm2_folder
from tests.support.wait import wait_for
from tests.support.worker_process import WorkerProcess

from stoker_worker.embedded_redis import EmbeddedServer

HERE = Path(__file__).parent
INSTALLED = CHECKOUT / ".cache" / "clients"
PAGE = CHECKOUT / "docs" / "serve.md"
TABLE = re.compile("(<!-- clients: written by `make clients` -->\n).*?(<!-- end of clients -->)", re.DOTALL)
PYTHON = {
    "instructor": "instructor",
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "llm": "llm",
    "openai_agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
}
EVALUATION = {"lm_eval": "lm-eval", "guidellm": "guidellm"}
NODE = {"openai": "openai", "anthropic": "@anthropic-ai/sdk", "ai_sdk": "ai"}
CALL = 'say I look.<tool_call>{"name": "%s", "arguments": {"%s": "echo -n say all done"}}</tool_call>'

pytestmark = [
    pytest.mark.scheduled,
    pytest.mark.skipif(not os.environ.get("CLIENTS"), reason="make clients installs them"),
]


class Site:
    """A worker and `stoker serve` on a Redis server of their own, as processes."""

    def __init__(self, folder: Path, redis_url: str, *worker: str) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self._arguments = ["--redis", redis_url, "--store", str(folder / "store"), *worker]
        self.worker = WorkerProcess(self._arguments, folder / "worker.log")
        options = ["--redis", redis_url, "--any-model", "--port", "0", "--batch-store", str(folder / "serve")]
        log = folder / "serve.log"
        with log.open("w") as stderr:
            self._serve = subprocess.Popen(
                [str(Path(sys.executable).with_name("stoker")), "serve", *options], stderr=stderr
            )
        wait_for(lambda: "serving" in log.read_text(), 30)
        found = re.search("http://[0-9.:]+", log.read_text())
        assert found
        self.url = found[0]
        self.worker.wait_until_ready(300)

    def kill_worker(self) -> None:
        """And start it again."""
        self.worker.kill()
        self.worker = WorkerProcess(self._arguments, self.folder / "worker-2.log").wait_until_ready()

    def close(self) -> None:
        self._serve.terminate()
        self.worker.signal(signal.SIGTERM)
        self._serve.wait(60)
        self.worker.wait(60)


@contextmanager
def site(folder: Path, *worker: str) -> Iterator[Site]:
    with EmbeddedServer(folder / "redis") as server:
        made = Site(folder, server.url, *worker)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("scripted"), "--engine", "scripted") as made:
        yield made


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("real"), "--model", str(smollm2_folder())) as made:
        yield made


ROWS: dict[str, tuple[str, str]] = {}
"""Version and what ran, by the client's name."""


@pytest.fixture(scope="module", autouse=True)
def page() -> Iterator[None]:
    """Writes the table of docs/serve.md, if every client ran."""
    yield
    if len(ROWS) == len(PYTHON) + len(EVALUATION) + len(NODE) + 3:
        rows = "".join(f"| {name} | {version} | {ran} |\n" for name, (version, ran) in sorted(ROWS.items()))
        table = f"| client | version | what ran |\n|---|---|---|\n{rows}"
        PAGE.write_text(TABLE.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", PAGE.read_text()))


def output_of(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    ran = subprocess.run(
        command,
        check=False,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return ran.stdout


def run(command: list[str], site: Site, **environment: str) -> str:
    """The last line of a script's output."""
    added = {"STOKER_URL": site.url, "HOME": str(site.folder), **environment}
    return output_of(command, site.folder, {**os.environ, **added}).strip().splitlines()[-1]


def version_in(folder: str, package: str) -> str:
    python = str(INSTALLED / folder / "bin" / "python")
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def version_of_node(package: str) -> str:
    found: dict[str, Any] = json.loads((INSTALLED / "node" / "node_modules" / package / "package.json").read_text())
    return str(found["version"])


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_client_runs_unmodified(name: str, scripted: Site) -> None:
    python = str(INSTALLED / "python" / "bin" / "python")
    ran = run([python, str(HERE / "scripts" / f"{name}_client.py")], scripted)
    ROWS[PYTHON[name]] = version_in("python", PYTHON[name]), ran


@pytest.mark.parametrize("name", EVALUATION)
def test_an_evaluation_runs_unmodified(name: str, real: Site) -> None:
    python = str(INSTALLED / "evaluation" / "bin" / "python")
    script = str(HERE / "scripts" / f"{name}_client.py")
    ran = run([python, script], real, STOKER_MODEL=str(smollm2_folder()))
    ROWS[EVALUATION[name]] = version_in("evaluation", EVALUATION[name]), ran


def test_ray_sends_1000_rows_while_the_worker_is_killed_and_each_is_run_once(tmp_path: Path) -> None:
    script = HERE / "scripts" / "ray_client.py"
    [code, *_] = re.findall("```python\n(.*?)```", (CHECKOUT / "docs" / "ray.md").read_text(), re.DOTALL)
    code = code[code.index("class ") :].replace('"http://127.0.0.1:8400/', "f\"{os.environ['STOKER_URL']}/")
    assert code in script.read_text()
    with (
        site(tmp_path, "--engine", "scripted", "--scripted-steps-per-s", "400", "--max-batch", "64") as ours,
        Redis.from_url(ours.redis_url) as connection,
        ThreadPoolExecutor(1) as client,
    ):
        stoker = [str(Path(sys.executable).with_name("stoker")), "--redis", ours.redis_url, "batch"]
        # By default Ray's processes have the lowest priority: beside other tests, they would take minutes.
        command = [str(INSTALLED / "ray" / "bin" / "python"), str(script), *stoker]
        running = client.submit(run, command, ours, RAY_worker_niceness="0")
        wait_for(lambda: connection.zcard("rq:finished:generate") > 250 or running.done(), 300)
        assert connection.zcard("rq:finished:generate") < 900, "too late to kill the worker in the middle"
        ours.kill_worker()
        ran = running.result()
        assert [connection.zcard(f"rq:{name}:generate") for name in ("finished", "failed")] == [999, 1]
    ROWS["ray"] = version_in("ray", "ray"), ran


@pytest.mark.parametrize("name", NODE)
def test_a_node_client_runs_unmodified(name: str, scripted: Site) -> None:
    copied = INSTALLED / "node" / f"{name}_node.mjs"  # a module looks for packages beside itself
    copied.write_text((HERE / "scripts" / copied.name).read_text())
    ROWS[f"{NODE[name]} (Node)"] = version_of_node(NODE[name]), run(["node", str(copied)], scripted)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def prefilled(events: list[dict[str, Any]]) -> int:
    """Prompt tokens of a thread so far that did not come from the cache; its first call has some 20,000."""
    usage = events[-1]["usage"]
    return int(usage["input_tokens"] - usage["cached_input_tokens"])


def completed(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def test_codex_runs_a_tool_and_goes_on_after_its_worker_was_killed(scripted: Site, project: Path) -> None:
    home = project.parent
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "any"\nmodel_provider = "stoker"\n[model_providers.stoker]\nname = "stoker"\n'
        f'base_url = "{scripted.url}/v1"\nwire_api = "responses"\n'
    )

    def codex(*arguments: str) -> list[dict[str, Any]]:
        program = str(INSTALLED / "node" / "node_modules" / ".bin" / "codex")
        command = [program, "exec", *arguments, "--skip-git-repo-check", "--json"]
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
        output = output_of(command, project, environment)
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    first = codex(CALL % ("exec_command", "cmd"))
    assert [item["text"] for item in completed(first, "agent_message")] == ["I look.", "all done"]
    assert [item["exit_code"] for item in completed(first, "command_execution")] == [0]
    scripted.kill_worker()
    second = codex("resume", "--last", "say second turn")
    assert [item["text"] for item in completed(second, "agent_message")] == ["second turn"]
    assert prefilled(second) - prefilled(first) < 1000, (first[-1], second[-1])
    ran = "a turn, a tool call that it carries out, its worker killed, a second turn from the cache"
    ROWS["Codex CLI"] = version_of_node("@openai/codex"), ran


def test_claude_code_runs_a_tool_and_goes_on_after_its_worker_was_killed(scripted: Site, project: Path) -> None:
    environment = {
        **{"PATH": os.environ["PATH"], "HOME": str(project.parent), "TERM": "dumb", "IS_SANDBOX": "1"},
        **{"ANTHROPIC_BASE_URL": scripted.url, "ANTHROPIC_AUTH_TOKEN": "none"},
        **dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "any"),
        **dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER"), "1"),
    }

    def claude(*arguments: str) -> dict[str, Any]:
        program = str(INSTALLED / "node" / "node_modules" / ".bin" / "claude")
        command = [program, "-p", *arguments, "--output-format", "json", "--allowedTools", "Bash"]
        output = output_of(command, project, environment)
        found: dict[str, Any] = json.loads(output)
        return found

    first = claude(CALL % ("Bash", "command"))
    assert (first["is_error"], first["result"], first["num_turns"]) == (False, "all done", 2)
    scripted.kill_worker()
    second = claude("say second turn", "-c")
    assert second["result"] == "second turn"
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > 9 * usage["input_tokens"], usage
    ran = "a turn, a tool call that it carries out, its worker killed, a second turn from the cache"
    ROWS["Claude Code"] = version_of_node("@anthropic-ai/claude-code"), ran
