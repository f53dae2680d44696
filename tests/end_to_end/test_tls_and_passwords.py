"""`rediss://` with a private authority and a password, for producers and the worker; the password is never shown."""

import subprocess
import sys
import traceback
from urllib.parse import quote

import pytest
from redis import Redis
from tests.support.tls_fixture import PASSWORD, tls_server  # noqa: F401
from tests.support.worker_process import running_worker

from stoker import Producer, RedisUnavailable

pytestmark = pytest.mark.server


def shows_password(text, password=PASSWORD):
    """Whether it contains the password, the part a careless parser would cut off, or its quoted form."""
    return any(piece in text for piece in (password, quote(password, safe=""), password.partition("/")[0]))


def stoker(url, *arguments):
    command = [sys.executable, "-c", "from stoker.cli import main; main()", "--redis", url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("form", ["url", "url_with_query"])
def test_producer_command_and_worker_speak_tls_and_never_show_the_password(tls_server, tmp_path, form):  # noqa: F811
    url = getattr(tls_server, form)()
    with Producer(url) as producer, running_worker(url, tmp_path / "store", "-v", "--new-store") as worker:
        worker.wait_until_ready()
        assert producer.submit(agent_id="a", prompt="x", max_tokens=4).result(timeout_s=30).usage.completion_tokens == 4
        code, output = stoker(url, "submit", "--agent", "b", "--prompt", "x", "--max-tokens", "4", "--wait")
        assert code == 0, output
        with Redis.from_url(url) as connection:
            kept = repr([connection.hgetall(key) for key in connection.scan_iter("rq:*", _type="hash")])
            kept += repr([connection.get(key) for key in connection.scan_iter("stoker:*", _type="string")])
        assert "stoker-" in kept
    for text in (worker.log, output, kept, repr(producer), repr(producer.ticket("j"))):
        assert not shows_password(text), text


def test_a_refused_password_is_reported_in_one_line_without_it(tls_server, tmp_path):  # noqa: F811
    wrong = "marlin/#?&@:%41"
    url = tls_server.url_with_query(wrong)
    with pytest.raises(RedisUnavailable, match="refused") as caught:
        Producer(url).ping()
    code, output = stoker(url, "submit", "--agent", "a", "--prompt", "x")
    with running_worker(url, tmp_path / "store", "-v") as worker:
        assert (code, worker.wait()) == (1, 1)
    assert "refused" in worker.log
    for text in ("".join(traceback.format_exception(caught.value)), output, worker.log):
        assert "RedisUnavailable" in text
        assert not shows_password(text, wrong), text


def test_a_server_of_another_authority_is_refused(tls_server, tmp_path):  # noqa: F811
    url = tls_server.url().partition("?")[0]  # the system's authorities, which do not include ours
    with pytest.raises(RedisUnavailable, match=r"(?i)certificate"):
        Producer(url).ping()
    with running_worker(url, tmp_path / "store") as worker:
        assert worker.wait() == 1
    assert "certificate" in worker.log.lower()
    assert "Traceback" not in worker.log
    assert not shows_password(worker.log)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:swordfish/x@127.0.0.1:1/0",  # the URL ends early
        "redis://127.0.0.1:1/0?password=x@swordfish",
        "swordfish",
    ],
)
def test_a_url_that_is_mistyped_is_not_quoted(tmp_path, url):
    with pytest.raises((RedisUnavailable, ValueError)) as caught:
        Producer(url).ping()
    code, output = stoker(url, "submit", "--agent", "a", "--prompt", "x")
    with running_worker(url, tmp_path / "store", "-v") as worker:
        assert code != 0
        assert worker.wait() == 1
    assert "swordfish" not in "".join(traceback.format_exception(caught.value))
    assert "swordfish" not in output
    assert "swordfish" not in worker.log
