"""Input and output lines of a batch of chats as `stoker batch` writes them, and the example that makes a training set
of both."""

import json
import subprocess
import sys
from pathlib import Path

from tests.producer.played_worker import result_fields

from stoker.api.chat import CHAT_URL
from stoker.batch.input_file import BadLine, answer_id_for, job_id_for
from stoker.batch.output_file import not_run_line, success_line
from stoker_shared.result import GenerationResult

BATCH = "night-0123456789abcdef"
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "training_set.py"


def user(text):
    return {"role": "user", "content": text}


def asked(number, *messages, url=CHAT_URL, **body):
    """The input line of this number; a message may be its text."""
    given = {"model": "m", "messages": [user(x) if isinstance(x, str) else x for x in messages], **body}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": given}


def answered(number, text="Yes.", *, model="large", task=None, accepted=None, url=CHAT_URL, **fields):
    """The output line of a success.

    Args:
        accepted: the verdict of a check; ``None`` for a job without one.
    """
    if accepted is not None:
        rejected = {"model": "small", "accepted": False, "reason": "regex: not found"}
        fields["attempts"] = [rejected, {**rejected, "model": model, "accepted": accepted}]
    result = GenerationResult.model_validate({**result_fields("j", text), "model": model, "task": task, **fields})
    return success_line(answer_id_for(job_id_for(BATCH, number, f"c{number}")), f"c{number}", url, 0, result)


def failed(number):
    return not_run_line(answer_id_for(job_id_for(BATCH, number, None)), BadLine(number, None, "code", "why"))


def write(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def training_set(folder, *options, to="training"):
    """Runs the example on the folder's `in.jsonl` and `out.jsonl`; returns its exit code, stdout and stderr."""
    command = [sys.executable, "-I", str(EXAMPLE), "in.jsonl", "out.jsonl", to, *options]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr
