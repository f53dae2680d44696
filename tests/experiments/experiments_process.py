"""Runs commands of experiments one after another in one process, which imports MLX and loads the model once.

The test's side is `ExperimentsProcess`. The process reads ``[script, option, ...]`` as a JSON line of its stdin, and
answers with a JSON line: null, or the traceback. What a script prints goes to the process's log.
"""

import functools
import importlib
import json
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


class ExperimentsProcess:
    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: str, *options: str) -> None:
        """Raises `AssertionError` with the script's error, or with the log's end if the process died."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([script, *options]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, f"the process died:\n{self._log.read_text()[-2000:]}"
        except BaseException:  # a timeout too: its answer would be taken for the next script's
            self.close()
            raise
        assert json.loads(answer) is None, json.loads(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._log.open("ab") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
                )
        return self._process


def serve() -> None:
    sys.path.insert(0, str(EXPERIMENTS))
    bench = importlib.import_module("bench").Bench
    bench.load = functools.cache(bench.load)
    for line in sys.stdin:
        script, *options = json.loads(line)
        sys.argv = [script, *options]
        answer = None
        try:
            with redirect_stdout(sys.stderr):
                runpy.run_path(str(EXPERIMENTS / script), run_name="__main__")
        except BaseException:
            answer = traceback.format_exc()[-2000:]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
