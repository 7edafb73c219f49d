"""What `install.sh` runs, under the machine's Python: an environment out of this folder's wheels.

Imports the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["install"]

HERE: Final = Path(__file__).resolve().parent
LINK: Final = "machine.pth"
"""Gives the environment the packages of the machine's Python, after its own."""


class InstallError(Exception):
    """What keeps the environment from being made."""


def install(manifest: dict[str, Any], folder: Path, without: Collection[str]) -> int:
    """Make the environment, and check it.

    Args:
        manifest: of the folder.
        folder: where the environment is made.
        without: excluded packages that this machine need not have.

    Returns:
        The exit status of ``headwater check``.

    Raises:
        InstallError: something is wrong; nothing was made.
    """
    problems = [*_machine_problems(manifest), *_folder_problems(folder), *_file_problems(manifest)]
    problems += _report_excluded(manifest["excluded"], without)
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
        if manifest["excluded"]:
            link = _site_packages(folder) / LINK
            link.write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in _own_places()))
            conflicts = list(_conflicts(pip, manifest))
            with link.open("a") as file:
                file.write(_hiding(_unusable(conflicts, manifest)))
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


def _report_excluded(excluded: dict[str, str], without: Collection[str]) -> Iterator[str]:
    """Say which version this Python has of each package that the folder leaves out; the problems are those missing."""
    unknown = sorted(set(without) - set(excluded))
    if unknown:
        yield f"--without: expected names among {', '.join(excluded) or 'none'}, got {', '.join(unknown)}"
    if excluded:
        print(f"From {sys.executable}, as this folder leaves them out:")
    missing = []
    for name, pin in excluded.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name}: none" + (", gone without" if name in without else f" (the lock has {pin})"))
            missing += [name] if name not in without else []
            continue
        is_pin = found.partition("+")[0] == pin
        print(f"  {name} {found}" + ("" if is_pin else f": warning: Headwater is tested with {pin}"))
    if missing:
        yield (
            f"{sys.executable} lacks {', '.join(missing)}. Name the Python that has them (--python PATH), install them,"
            f" build a folder that does not exclude them, or go without: --without {','.join([*without, *missing])}"
        )


def _make_environment(folder: Path) -> list[str]:
    """Make an empty environment. Returns the command that runs pip on it."""
    has_ensurepip = _has("ensurepip")
    options = [] if has_ensurepip else ["--without-pip"]
    _run([sys.executable, "-m", "venv", *options, str(folder)])
    python = str(folder / "bin" / "python")
    return [python, "-m", "pip"] if has_ensurepip else [sys.executable, "-m", "pip", "--python", python]


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"


def _own_places() -> list[str]:
    """Folders of packages of this Python, which may be a virtual environment itself, and of this user."""
    own = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [place for place in own if os.path.isdir(place)]


def _conflicts(pip: Sequence[str], manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Packages that Headwater uses and what each requires and the environment does not have, which is printed as pip
    says it."""
    ended = subprocess.run([*pip, "--isolated", "check"], capture_output=True, text=True, check=False)
    excluded = set(manifest["excluded"])
    used = {wheel["name"] for wheel in manifest["wheels"]} | excluded | set(manifest["pruned"])
    for line in ended.stdout.splitlines():
        found = re.match(r"(\S+) \S+ (?:has requirement|requires) ([\w.-]+)", line)
        if not found:
            continue
        package, required = _canonical(found[1]), _canonical(found[2])
        # What is left out, or has another version than the lock's, was said already.
        if package in used and not (required in excluded and package not in excluded):
            print(f"warning: {line}")
            yield package, required


def _unusable(conflicts: Collection[tuple[str, str]], manifest: dict[str, Any]) -> set[str]:
    """The packages of this Python that need another numpy than PyTriton, and those that need them in turn.

    They are found, but fail when they are imported, and so would packages that use them only if they are there.
    """
    names = {*manifest["excluded"], *manifest["pruned"]}
    found = {package for package, required in conflicts if required == "numpy" and package in names}
    while more := {name for name in names - found if not found.isdisjoint(_required(name))}:
        found |= more
    return found


def _required(name: str) -> Iterator[str]:
    """What a package of this Python requires, without its extras."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires(name) or ():
            if "extra ==" not in text:
                yield _canonical(re.split(r"[^\w.-]", text)[0])


def _hiding(names: Collection[str]) -> str:
    """The line of the link that hides packages, which is said; empty if there are none."""
    modules = sorted(
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if {_canonical(owner) for owner in owners} <= set(names)
    )
    if not modules:
        return ""
    print(
        f"warning: {', '.join(sorted(names))}: hidden, since they need another numpy than PyTriton does; models that"
        " need them won't load. To have them, build a folder that brings them: `make offline` without them in EXCLUDE"
    )
    return f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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
    parser.add_argument("--without", default="")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    manifest = json.loads((HERE / "manifest.json").read_text())
    without = {_canonical(name) for name in options.without.replace(",", " ").split()}
    try:
        sys.exit(install(manifest, Path(os.path.abspath(options.folder)), without))
    except InstallError as error:
        for problem in str(error).splitlines():
            print(f"install.sh: {problem}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
