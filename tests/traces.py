"""What a model's replicas have on the machine, and what of it is left when they are gone."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from headwater_server.process.sweep import BACKEND_FOLDERS
from tests.running import Running, leftovers, segments_of

__all__ = ["Traces", "remove_backend_folders"]


class Traces:
    """Folders, process groups and shared memory of a model's replicas as they are now."""

    def __init__(self, running: Running, model: str) -> None:
        self.folders = running.replica_folders(model)
        self.groups = [json.loads((one / "journal.json").read_text())["host_pid"] for one in self.folders]
        self.segments = set().union(*(segments_of(one) for one in self.folders))
        assert self.folders
        assert self.segments
        assert all(_members(one) for one in self.groups)

    def left(self) -> list[str]:
        """What of it is still there."""
        found = [left for one in self.folders for left in leftovers(one, self.segments)]
        found += [f"folder {one}" for one in self.folders if one.exists()]
        return found + [f"process {pid} of group {one}" for one in self.groups for pid in _members(one)]


def remove_backend_folders(began_s: float, ended_s: float) -> None:
    """Remove the folders of Triton's Python backend that were made between two times; a killed Triton leaves them."""
    for folder in BACKEND_FOLDERS.glob("python_env_*"):
        with contextlib.suppress(OSError):  # not empty or gone: another server's
            if began_s <= folder.stat().st_mtime <= ended_s:
                folder.rmdir()


def _members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
    return found
