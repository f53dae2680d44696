"""Objects in a folder and in a bucket: made once whoever tries, and never waited for longer than promised."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.private_server import free_port
from tests.worker.memory.agents import ids
from tests.worker.memory.replica.sharing import BOTH, Machine, Share, SharedFolder

from stoker_shared.errors import SharedStoreAway, StoreUnusable
from stoker_worker.memory.replica import bucket as bucket_module
from stoker_worker.memory.replica.bucket import Bucket, BucketAway, meet

pytestmark = pytest.mark.slow


@BOTH
def test_objects_are_made_read_listed_and_removed(share: Share) -> None:
    bucket = Bucket(share.url)
    assert (bucket.get("a/1"), bucket.has("a/1"), bucket.listed("a")) == (None, False, [])
    assert bucket.create("a/1", b"one")
    assert not bucket.create("a/1", b"other")
    bucket.put("a/2", b"")
    bucket.put("b/3", b"three")
    assert (bucket.get("a/1"), bucket.get("a/2"), bucket.has("a/2")) == (b"one", b"", True)
    assert [(x.name, x.n_bytes) for x in bucket.listed("a")] == [("a/1", 3), ("a/2", 0)]
    assert abs(bucket.listed("b")[0].changed_at - time.time()) < 60
    bucket.remove(["a/1", "a/nothing", "b/3"])
    assert [x.name for x in bucket.listed("a", after="a/1")] == ["a/2"]
    found = bucket.find("a/2")
    assert found is not None
    assert abs(found.changed_at - bucket.time()) < 60
    assert [x.name for folder in ("a", "b") for x in bucket.listed(folder)] == ["a/2"]


@BOTH
def test_of_many_that_make_one_object_one_does(share: Share) -> None:
    buckets = [Bucket(share.url) for _ in range(8)]
    for name in ("a", "b", "c"):
        barrier = threading.Barrier(8)

        def create(number: int, name: str = name, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return buckets[number].create(name, bytes([number]) * 10_000)

        with ThreadPoolExecutor(8) as threads:
            done = list(threads.map(create, range(8)))
        assert sum(done) == 1
        assert buckets[0].get(name) == bytes([done.index(True)]) * 10_000


@BOTH
def test_an_outage_is_told_once_and_ends(share: Share, caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket(share.url)
    bucket.put("a", b"1")
    bucket.landmark = "a"
    share.go_away()
    for call in (lambda: bucket.create("b", b""), lambda: bucket.get("b"), lambda: bucket.listed("x")):
        with pytest.raises(BucketAway):
            call()
    assert bucket.outage.seconds > 0
    share.come_back()
    while bucket.outage.seconds:
        bucket.get("a")
        time.sleep(0.1)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["outage begins", "outage over"]


@pytest.mark.parametrize("call", [lambda bucket: bucket.get("a"), lambda bucket: bucket.listed("a")])
def test_a_folder_that_is_not_there_is_named_at_the_first_use(call: Callable[[Bucket], object], tmp_path: Path) -> None:
    with pytest.raises(BucketAway, match=f"{tmp_path}/away is not there: is the share mounted"):
        call(Bucket(f"file://{tmp_path}/away"))


@pytest.mark.parametrize(
    "call",
    [lambda bucket: bucket.create("a", b""), lambda bucket: bucket.put("a", b""), lambda bucket: bucket.remove(["a"])],
    ids=["create", "put", "remove"],
)
def test_a_share_that_hangs_is_not_waited_for(
    share: Share, monkeypatch: pytest.MonkeyPatch, call: Callable[[Bucket], object]
) -> None:
    for name in ("COMMIT_LIMIT_S", "_REMOVAL_S"):
        monkeypatch.setattr(bucket_module, name, 0.02)
    bucket, end = Bucket(share.url), threading.Event()
    hanging = {"put": lambda *_, **__: end.wait(), "delete": lambda *_: end.wait()}
    monkeypatch.setattr(bucket, "_api", type("Hanging", (), hanging))
    began = time.monotonic()
    for _ in range(50):
        with pytest.raises(BucketAway, match=r"no answer within|all calls hang"):
            call(bucket)
    assert time.monotonic() - began < 15
    assert bucket._hanging <= 32
    end.set()


@pytest.mark.parametrize(
    "url", ["s3:///prefix", "s3://key:secret@bucket/x", "file:///", "file://host/x", "/mnt/x", "ftp://a/b"]
)
def test_what_is_no_shared_store_is_refused(url: str) -> None:
    with pytest.raises(StoreUnusable, match="a shared store is s3://bucket/prefix or file:///folder"):
        Bucket(url)


@BOTH
def test_a_server_that_overwrites_and_one_of_another_format_are_refused(
    share: Share, machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = machine("one").store.parts.database
    overwriting = Bucket(share.url)
    monkeypatch.setattr(overwriting, "create", lambda name, content: True)
    with pytest.raises(StoreUnusable, match="overwrites an object that was to be new"):
        meet(overwriting, database)
    bucket = Bucket(share.url)
    bucket.put("stoker.json", b'{"format": "stoker-shared 2", "id": "x"}')
    with pytest.raises(StoreUnusable, match="is of format 'stoker-shared 2'"):
        meet(bucket, database)
    bucket.put("stoker.json", b"{")
    with pytest.raises(StoreUnusable, match=r"stoker\.json is damaged"):
        meet(bucket, database)


def test_a_share_whose_content_is_gone_is_away_and_not_begun_anew(tmp_path: Path) -> None:
    """As a folder on which the share is not mounted."""
    share = SharedFolder(tmp_path)
    one = Machine(tmp_path / "one", share).agent("a")
    one.say(ids(10))
    one.store.close()
    share.go_away()
    share.objects.mkdir()
    store = Machine(tmp_path / "one", share).store
    with pytest.raises(SharedStoreAway, match=r"stoker\.json is missing; it was there before"):
        store.look("a")
    store.close()


@BOTH
def test_a_share_that_a_second_client_does_not_see_is_refused(
    share: Share, machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "listed", lambda self, *_, **__: [])
    with pytest.raises(StoreUnusable, match="does not list an object that was made"):
        machine("one").store.meet()


@BOTH
def test_another_shared_store_in_the_place_of_the_one_before_is_not_written_to(
    share: Share, machine: Callable[..., Machine]
) -> None:
    one = machine("one")
    one.agent().say((1, 2, 3))
    one.store.close()
    Bucket(share.url).put("stoker.json", b'{"format": "stoker-shared 1", "id": "other"}')
    one = machine("one")
    with pytest.raises(BucketAway, match="another shared store is in the place"):
        one.store.meet()
    for problem in ("is away", "another shared store is in the place"):  # it answers
        with pytest.raises(SharedStoreAway, match=problem):
            one.agent().open()
        one.notice_return()


@BOTH
def test_a_large_version_has_more_time(share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "COMMIT_LIMIT_S", 0.05)
    bucket = Bucket(share.url)
    api = bucket._api

    class Slow:
        """A network that needs longer for it than for a short one."""

        def put(self, store: object, name: str, content: bytes, **options: object) -> None:
            time.sleep(0.2)
            api.put(store, name, content, **options)

    monkeypatch.setattr(bucket, "_api", Slow())
    assert bucket.create("a", bytes(5_000_000))


def test_a_version_in_a_folder_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(bucket_module, "sync", lambda path, to_platter=False: synced.append(path))
    folders = [tmp_path / name for name in ("agents/ab/abcd", "agents/ab", "agents", "")]
    for _ in range(2):  # also where an earlier process has made it, and nobody knows how far it came
        bucket = Bucket(f"file://{tmp_path}")
        synced.clear()
        bucket.create("agents/ab/abcd/1.json", b"{}")
        assert synced == [folders[0] / "1.json", *folders]
    synced.clear()
    bucket.create("agents/ab/abcd/2.json", b"{}")
    assert synced == [folders[0] / "2.json", folders[0]]


def test_the_password_of_an_endpoint_is_in_no_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:pass@word@127.0.0.1:{free_port()}")
    with pytest.raises(BucketAway) as caught:
        Bucket("s3://bucket/prefix").get("a")
    assert caught.value.__cause__ is None
    for text in (str(caught.value), caplog.text):
        assert "127.0.0.1" in text
        assert "pass" not in text
        assert "word" not in text


def test_without_the_extra_the_message_has_the_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreUnusable, match=r"pip install 'stoker\[shared\]'"):
        Bucket("file:///mnt/shared")
