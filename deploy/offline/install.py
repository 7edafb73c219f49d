"""What `install.sh` runs, under the machine's Python: an environment out of this folder's wheels.

Imports the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["install"]

HERE: Final = Path(__file__).resolve().parent


class InstallError(Exception):
    """What keeps the environment from being made."""


def install(manifest: dict[str, Any], folder: Path) -> int:
    """Make the environment, and check it.

    Args:
        manifest: of the folder.
        folder: where the environment is made.

    Returns:
        The exit status of ``headwater check``.

    Raises:
        InstallError: something is wrong; nothing was made.
    """
    problems = [*_machine_problems(manifest), *_folder_problems(folder), *_file_problems(manifest)]
    if problems:
        raise InstallError("\n".join(problems))
    started = time.monotonic()
    print(f"Installing {len(manifest['wheels'])} packages into {folder} ...", flush=True)
    try:
        pip = _make_environment(folder)
        wheels = [str(HERE / "wheels" / wheel["file"]) for wheel in manifest["wheels"]]
        _run([*pip, "--isolated", "-qq", "install", "--no-index", "--no-deps", *wheels])
        if manifest["libpython"] is not None:
            shutil.copy(HERE / manifest["libpython"]["file"], folder / "lib")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"Installed Headwater {manifest['headwater']} in {time.monotonic() - started:.0f} s: {folder}/bin/headwater")
    # Any free port: a server that runs here already is no problem of this installation.
    return subprocess.run([str(folder / "bin" / "headwater"), "check", "--port", "0"], check=False).returncode


def _machine_problems(manifest: dict[str, Any]) -> Iterator[str]:
    machine = f"{platform.system()} {platform.machine()}"
    if machine != f"Linux {manifest['machine']}":
        yield f"expected Linux {manifest['machine']}, which these wheels are for, got {machine}"
    if platform.python_implementation() != "CPython":
        yield f"expected CPython, got {platform.python_implementation()}. Name another Python: --python PATH"
    name, version = platform.libc_ver()
    if name != "glibc" or _numbers(version) < _numbers(manifest["glibc"]):
        yield (
            f"expected glibc {manifest['glibc']} or later, which PyTriton's wheel needs, got"
            f" {f'{name} {version}' if name else 'another C library'}. Ubuntu 22.04, Debian 12 and RHEL 10 have it"
        )
    if not _has("venv") or not (_has("ensurepip") or _has("pip")):
        yield (
            f"expected a Python with the modules venv, and ensurepip or pip, got {sys.executable} without."
            " On Debian and Ubuntu: apt-get install python3-venv"
        )


def _folder_problems(folder: Path) -> Iterator[str]:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        yield f"expected a new folder, but {folder} is there. Remove it, or name another"
        return
    parent = next(parent for parent in folder.parents if parent.exists())
    if not os.access(folder if folder.exists() else parent, os.W_OK):
        yield f"expected a folder that may be made, but {parent} can't be written to. Name another, or use sudo"


def _file_problems(manifest: dict[str, Any]) -> Iterator[str]:
    """Whether all files are there, as they were made."""
    files = [(HERE / "wheels", wheel) for wheel in manifest["wheels"]]
    if manifest["libpython"] is not None:
        files.append((HERE, manifest["libpython"]))
    for folder, file in files:
        path = folder / file["file"]
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != file["sha256"]:
            yield f"{path} is {'damaged' if path.exists() else 'missing'}: copy or unpack this folder again"


def _make_environment(folder: Path) -> list[str]:
    """Make an empty environment. Returns the command that runs pip on it."""
    has_ensurepip = _has("ensurepip")
    options = [] if has_ensurepip else ["--without-pip"]
    _run([sys.executable, "-m", "venv", *options, str(folder)])
    python = str(folder / "bin" / "python")
    return [python, "-m", "pip"] if has_ensurepip else [sys.executable, "-m", "pip", "--python", python]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, check=False)
    if ended.returncode:
        raise InstallError(f"{' '.join(command[:4])} ... failed with status {ended.returncode}, for the reason above")


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="install.sh")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    manifest = json.loads((HERE / "manifest.json").read_text())
    try:
        sys.exit(install(manifest, Path(os.path.abspath(options.folder))))
    except InstallError as error:
        for problem in str(error).splitlines():
            print(f"install.sh: {problem}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
