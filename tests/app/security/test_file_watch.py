"""Files that change."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headwater_server.security.file_watch import POLL_S, FileWatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def test_each_change_is_seen_once(file: Path) -> None:
    watch = FileWatch([file])
    assert not watch.has_changed()
    file.write_text("three")
    assert [watch.has_changed(), watch.has_changed()] == [True, False]
    other = file.with_name("other")
    other.write_text("three")
    os.replace(other, file)
    assert [watch.has_changed(), watch.has_changed()] == [True, False]
    file.chmod(0o666)
    assert [watch.has_changed(), watch.has_changed()] == [True, False]
    file.unlink()
    assert [watch.has_changed(), watch.has_changed()] == [True, False]
    file.write_text("three")
    assert [watch.has_changed(), watch.has_changed()] == [True, False]


def test_a_link_that_leads_elsewhere_is_a_change(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("two")
    link = tmp_path / "link"
    link.symlink_to(file)
    watch = FileWatch([link])
    link.unlink()
    link.symlink_to(other)
    assert watch.has_changed()


def test_what_changed_before_the_first_look_is_seen(file: Path) -> None:
    watch = FileWatch([file])
    file.write_text("three")

    async def run() -> None:
        seen = asyncio.Event()
        task = asyncio.create_task(watch.run(seen.set))
        await asyncio.wait_for(seen.wait(), 10)
        task.cancel()

    asyncio.run(run())


def test_it_looks_often_enough_for_a_change_to_hold_within_half_a_second() -> None:
    assert POLL_S <= 0.25


def test_other_files_may_be_watched_and_no_change_is_lost(file: Path, tmp_path: Path) -> None:
    other, absent = tmp_path / "other", tmp_path / "absent"
    watch = FileWatch([file])
    file.write_text("three")
    other.write_text("two")
    watch.watch([file, other, absent], other.stat().st_ctime + 1)
    absent.write_text("one")
    assert watch.changed() == {file, absent}
    watch.watch([other], 0)
    file.write_text("five")
    assert watch.changed() == set()


def test_a_file_that_changed_before_it_was_watched_counts(file: Path) -> None:
    watch = FileWatch([])
    watch.watch([file], file.stat().st_ctime - 1)
    assert [watch.changed(), watch.changed()] == [{file}, set()]
