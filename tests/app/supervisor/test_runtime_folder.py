"""The server's runtime folder after somebody has removed it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from app.supervisor import runtime_folder
from app.supervisor.runtime_folder import RuntimeFolder


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
