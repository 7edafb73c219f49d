"""The server's runtime folder after somebody has removed it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater_server.supervisor import front, runtime_folder
from headwater_server.supervisor.front import watch_folder
from headwater_server.supervisor.runtime_folder import RuntimeFolder


@pytest.mark.parametrize("failing", ["_locked", "lock_instance_folder"])
def test_a_folder_that_could_not_be_made_again_is_made_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(folder: Path) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    folder = RuntimeFolder(tmp_path)
    shutil.rmtree(folder.path)
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(runtime_folder, failing, fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                folder.make_again()
            assert folder.is_lost
    assert len(os.listdir("/proc/self/fd")) == open_files
    folder.make_again()
    assert not folder.is_lost
    assert len(os.listdir("/proc/self/fd")) == open_files
    folder.close()
    assert not folder.path.exists()


async def test_all_workers_are_replaced_after_a_removal_even_if_the_first_try_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "FOLDER_EVERY_S", 0.01)
    folder = RuntimeFolder(tmp_path)

    replaced: asyncio.Queue[bool] = asyncio.Queue()
    failures = [OSError(errno.EMFILE, "Too many open files")]

    async def start(path: Path) -> None:
        if failures:
            raise failures.pop()
        os.close(os.open(path, os.O_CREAT))

    control: Any = SimpleNamespace(start=start)
    observer: Any = SimpleNamespace(is_damaged=False, restore=lambda: None)
    workers: Any = SimpleNamespace(replace_those_without_files=lambda *, all: replaced.put_nowait(all))
    children: Any = SimpleNamespace(end_cut_off=lambda: None)
    shutil.rmtree(folder.path)
    watching = asyncio.create_task(watch_folder(folder, control, observer, workers, children))
    assert await replaced.get()
    assert not await replaced.get()
    watching.cancel()
    folder.close()
