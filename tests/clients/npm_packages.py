"""Clients that npm installs, with the Node that runs them: each folder of ``npm`` out of nothing but its lock file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["AGENTS_FOLDER", "make_packages", "packages_are_made", "path_of_packages", "version_of_package"]

LOCKS: Final = Path(__file__).parent / "npm"
FOLDER: Final = Path(__file__).parents[2] / ".venv-clients" / "npm"
NODE: Final = "node"
"""The folder that is installed first. Under an older Node npm leaves out packages, and installs older ones."""
AGENTS_FOLDER: Final = FOLDER / "agents"
STAMP: Final = "lock.sha256"


def packages_are_made() -> bool:
    """Whether the packages are installed, and are what the lock files say."""
    return all(_is_made(lock) for lock in LOCKS.iterdir())


def make_packages() -> None:
    """Install what is missing. If that fails, the reason is printed; the log lies beside the folder."""
    for lock in sorted(LOCKS.iterdir(), key=lambda path: path.name != NODE):
        if _is_made(lock):
            continue
        folder, log = FOLDER / lock.name, FOLDER / f"{lock.name}.log"
        print(f"Installing npm/{lock.name} into .venv-clients/npm (a few minutes) ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(lock, folder)
        # Not `ci`: it wants the packages of all processors in the lock file, which not every registry has.
        command = ["npm", "install", "--no-audit", "--no-fund"]
        environment = {**os.environ, "PATH": path_of_packages()}
        try:
            with log.open("w") as output:
                subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"left out: what npm installs: {error}; see {log}", file=sys.stderr)
            return
        (folder / STAMP).write_text(_digest(lock))


def _is_made(lock: Path) -> bool:
    stamp = FOLDER / lock.name / STAMP
    return stamp.is_file() and stamp.read_text() == _digest(lock)


def _digest(lock: Path) -> str:
    return hashlib.sha256((lock / "package-lock.json").read_bytes()).hexdigest()


def path_of_packages() -> str:
    """``PATH`` with the commands of these packages."""
    folders = [FOLDER / name / "node_modules" / ".bin" for name in (NODE, "agents")]
    return os.pathsep.join([*map(str, folders), os.environ["PATH"]])


def version_of_package(name: str) -> str:
    """What the lock file says of a package."""
    lock = json.loads((LOCKS / "agents" / "package-lock.json").read_text())
    return str(lock["packages"][f"node_modules/{name}"]["version"])
