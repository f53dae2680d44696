"""`memory gc --shared`: caches by age and use, and never a conversation."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.worker.memory.agents import files_below, ids
from tests.worker.memory.replica.sharing import BOTH, Machine, Share

from stoker_shared.errors import StoreUnusable
from stoker_worker.cli.main import main
from stoker_worker.memory.replica import caches
from stoker_worker.memory.replica.bucket import Bucket, BucketAway, Stored
from stoker_worker.memory.replica.collecting import collect_there

pytestmark = pytest.mark.slow

DAY_S = 86_400


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


@pytest.fixture
def written(machine: Callable[..., Machine]) -> Machine:
    """Three agents, the first two with a common beginning, used 30, 20 and 10 days ago."""
    one = machine("one")
    for name, tokens in (("a", ids(900)), ("b", (*ids(300), *ids(500, seed=2))), ("c", ids(700, seed=3))):
        one.agent(name).say(tokens)
        one.write_behind()
    return one


def lists_by_age(share: Share) -> list[Path]:
    paths = sorted(files_below(share.objects / "caches"), key=lambda path: path.stat().st_mtime_ns)
    for path, days in zip(paths, (30, 20, 10), strict=True):
        age(path, days)
    return paths


@BOTH
def test_nothing_goes_that_is_in_use(share: Share, written: Machine) -> None:
    before = files_below(share.objects)
    done = collect_there(Bucket(share.url))
    assert (done.files, done.agents) == (0, 0)
    assert files_below(share.objects) == before


def test_caches_unused_for_long_go_and_what_others_use_stays(share: Share, written: Machine) -> None:
    lists_by_age(share)
    done = collect_there(Bucket(share.url), unused_s=25 * DAY_S, dry_run=True)
    assert (done.files, done.agents) == (3, 1)  # two blocks and the tail
    before = len(files_below(share.objects))
    collect_there(Bucket(share.url), unused_s=25 * DAY_S)
    assert len(files_below(share.objects)) == before - 4


@BOTH
def test_a_budget_is_kept_by_use(share: Share, written: Machine, machine: Callable[..., Machine]) -> None:
    lists_by_age(share)
    half = collect_there(Bucket(share.url), dry_run=True).left_bytes // 2
    done = collect_there(Bucket(share.url), max_bytes=half)
    assert done.left_bytes <= half
    assert done.left_bytes == sum(
        p.stat().st_size for x in ("blocks", "pieces") for p in files_below(share.objects / x)
    )
    two = machine("two")
    assert two.agent("c").cached((*ids(700, seed=3), 1)) == 700
    assert two.agent("a").tokens() == ids(900)
    assert two.agent("a").cached((*ids(900), 1)) == 0


def test_files_that_no_list_names_go_after_a_day(share: Share, written: Machine) -> None:
    lists_by_age(share)[0].unlink()
    assert collect_there(Bucket(share.url)).files == 0
    for path in files_below(share.objects / "blocks") + files_below(share.objects / "pieces"):
        age(path, 2)
    assert collect_there(Bucket(share.url)).files == 3


def test_the_command(share: Share, written: Machine, tmp_path: Path) -> None:
    def gc(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["memory", "gc", "--store", str(tmp_path / "one"), *options])
        return done.exit_code, done.output

    assert "would remove 0 files (0 bytes)" in gc("--shared", share.url, "--dry-run")[1]
    code, output = gc("--shared", share.url, "--max-bytes", "0", "--json")
    assert (code, '"left_bytes": 0, "dry_run": false' in output) == (0, True)
    assert gc("--max-bytes", "0")[0] == gc("--shared", share.url, "--unused-for", "soon")[0] == 2
    assert "SharedStore" not in gc("--shared", "ftp://x")[1]


def test_a_bucket_that_is_no_shared_store_is_left_alone(tmp_path: Path) -> None:
    for name in ("blocks/precious", "pieces/too", "caches/as/well"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        age(tmp_path / name, 400)
    before = files_below(tmp_path)
    with pytest.raises(StoreUnusable, match=r"is no shared store: it has no stoker\.json"):
        collect_there(Bucket(f"file://{tmp_path}"), max_bytes=0)
    assert files_below(tmp_path) == before


@BOTH
def test_files_of_others_stay(share: Share, written: Machine) -> None:
    bucket = Bucket(share.url)
    for name in ("blocks/precious", "pieces/.DS_Store", "blocks/aa/bb/cc.safetensors"):
        bucket.put(name, b"x")
        age(share.objects / name, 400)
    assert collect_there(bucket, max_bytes=0).left_bytes == 0
    assert [bucket.get(name) for name in ("blocks/precious", "pieces/.DS_Store")] == [b"x", b"x"]


def test_a_clock_that_is_days_ahead_makes_nothing_old(
    share: Share, written: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in files_below(share.objects / "caches"):
        path.unlink()  # as if they were just being written
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 9 * DAY_S)
    assert collect_there(Bucket(share.url)).files == 0


def test_what_is_used_while_the_lists_are_read_stays(
    share: Share, written: Machine, machine: Callable[..., Machine]
) -> None:
    bucket = Bucket(share.url)
    lists_by_age(share)
    listed = bucket.listed

    def list_and_work(folder: str, limit_s: float | None = None, **more: str | None) -> list[Stored]:
        found = listed(folder, limit_s, **more)
        if folder == "caches" and written.agent("a").open().number == 1:
            written.agent("a").say((*ids(900), 1))
            written.write_behind()
        return found

    bucket.listed = list_and_work  # type: ignore[method-assign]
    assert collect_there(bucket, unused_s=25 * DAY_S).agents == 0
    assert machine("two").agent("a").cached((*ids(900), 1, 2)) == 901


def test_a_share_that_is_unmounted_meanwhile_does_not_count_as_empty(share: Share, written: Machine) -> None:
    """No list would name the caches, and all would go."""
    bucket = Bucket(share.url)
    listed = bucket.listed

    def list_nothing(folder: str, limit_s: float | None = None, **more: str | None) -> list[Stored]:
        if folder == "caches":
            share.go_away()
            share.objects.mkdir()  # on which it was mounted
        return listed(folder, limit_s, **more)

    bucket.listed = list_nothing  # type: ignore[method-assign]
    with pytest.raises(BucketAway, match="is the share mounted"):
        collect_there(bucket)
    share.come_back()


def test_a_cache_that_was_removed_is_written_again_when_its_agent_is_back(
    share: Share, written: Machine, machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_there(Bucket(share.url), max_bytes=0)
    monkeypatch.setattr(caches, "_KNOWN_S", 0.0)
    written.agent("a").say((*ids(900), 1))
    written.write_behind()
    assert machine("two").agent("a").cached((*ids(900), 1, 2)) == 901
