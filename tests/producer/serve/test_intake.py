"""From bytes to a job: large bodies are read in another process, and what is wrong with them comes back from it."""

import asyncio
import json
import multiprocessing
from contextlib import closing
from tempfile import SpooledTemporaryFile

from starlette.datastructures import Headers

from stoker.api.chat import CHAT_URL
from stoker.api.failure import Failure
from stoker.api.fields import BodyOptions
from stoker.serve import intake
from stoker.serve.intake import CallHead, Intake
from stoker.serve.settings import ANYBODY, ServeSettings

HEAD = CallHead.of(CHAT_URL, Headers({"x-stoker-agent": "a"}), ANYBODY)
LARGE = "x" * 300_000


def call_jobs(*texts, **fields):
    """What becomes of calls with these texts, one after the other; functions are called in between."""

    async def run():
        with (
            closing(Intake(ServeSettings(body_options=BodyOptions(any_model=True)))) as made,
            SpooledTemporaryFile() as f,
        ):
            for text in texts:
                if callable(text):
                    text()
                    continue
                messages = [{"role": "user", "content": text}]
                f.seek(0)
                f.truncate()
                f.write(json.dumps({"messages": messages, **fields}).encode())
                try:
                    yield await made.call_jobs(f, HEAD)
                except Failure as failure:
                    yield failure

    async def collected():
        return [one async for one in run()]

    return asyncio.run(collected())


def test_calls_of_any_size_become_jobs_with_the_fields_of_their_headers():
    small, large = call_jobs("x", LARGE, stream=True, n=2, cache="read")
    assert (small.call, small.has_one_text) == (large.call, large.has_one_text)
    assert large.jobs[0].size_bytes > len(LARGE)
    assert small.jobs[0].job_id != large.jobs[0].job_id


def test_what_is_wrong_with_a_large_body_is_named_as_for_a_small_one():
    small, large = call_jobs("x", LARGE, top_p=3)
    assert (small.status, small.body, small.retryable) == (large.status, large.body, large.retryable)
    assert large.error["param"] == "top_p"


def test_a_large_body_is_read_in_another_process(monkeypatch):
    def no_read(raw):
        raise Failure(418, "read here")

    monkeypatch.setattr(intake, "json_object", no_read)
    small, large = call_jobs("x", LARGE)
    assert small.status == 418
    assert large.jobs[0].size_bytes > len(LARGE)


def test_after_the_death_of_that_process_another_one_reads():
    def kill():
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    first, second, third = call_jobs(LARGE, kill, LARGE, LARGE)
    assert (second.status, second.retryable) == (503, True)
    assert first.jobs[0].size_bytes == third.jobs[0].size_bytes
