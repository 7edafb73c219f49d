"""The packages of an offline folder: what the lock says for a Python, and their wheels, fetched by pip."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

__all__ = ["GLIBC", "MACHINE", "OfflineError", "fetch", "metadata", "missing", "name_of", "pins"]

MACHINE: Final = "x86_64"
GLIBC: Final = (2, 35)
"""The oldest glibc that the wheels may need: PyTriton's do."""
OLDEST_GLIBC: Final = 5
"""The minor version that the first platform tag of wheels stands for."""


class OfflineError(Exception):
    """Why no folder can be built, and how to fix it."""


def pins(lock: str, python: str) -> dict[str, str]:
    """The versions that a lock has for a Python, by name.

    Args:
        lock: its text.
        python: as ``3.12``.
    """
    found: dict[str, str] = {}
    for line in lock.splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(_environment(python)):
                (pin,) = requirement.specifier
                found[canonicalize_name(requirement.name)] = pin.version
    return found


def fetch(requirements: Iterable[str], python: str, folder: Path) -> None:
    """Have pip put a wheel for each requirement into a folder, from where pip is told to take packages.

    Raises:
        OfflineError: pip failed; it has printed why.
    """
    # pip takes a platform by its word, and no older one for it.
    tags = [f"manylinux_{GLIBC[0]}_{minor}" for minor in range(GLIBC[1], OLDEST_GLIBC - 1, -1)]
    platforms = [f"{tag}_{MACHINE}" for tag in (*tags, "manylinux2014", "manylinux2010", "manylinux1")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "--no-input", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--dest={folder}"]
    ended = subprocess.run([*command, *(f"--platform={one}" for one in platforms), *requirements], check=False)
    if ended.returncode:
        raise OfflineError("pip could not fetch the wheels, for the reason above: tell it where packages are")


def metadata(wheel: Path) -> RawMetadata:
    """What a wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA") and one.count("/") == 1)
        return parse_email(archive.read(path))[0]


def name_of(wheel: Path) -> str:
    """The package's name, as indexes write it."""
    return parse_wheel_filename(wheel.name)[0]


def missing(wheels: Mapping[str, Path], root: str, extras: Iterable[str], python: str) -> dict[str, str]:
    """What a package needs besides the wheels that are there.

    Args:
        wheels: by package.
        root: the package.
        extras: of its extras.
        python: as ``3.12``.

    Returns:
        Requirements, by package.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(root, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = pair = waiting.pop()
        if pair in seen:
            continue
        seen.add(pair)
        for text in metadata(wheels[name]).get("requires_dist", []):
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({**_environment(python), "extra": extra}):
                continue
            wanted = canonicalize_name(requirement.name)
            if wanted in wheels:
                waiting += [(wanted, extra) for extra in ("", *requirement.extras)]
            else:
                found[wanted] = f"{requirement.name}{requirement.specifier}"
    return found


def _environment(python: str) -> dict[str, str]:
    """What markers ask for, of the machine that the wheels are for."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": MACHINE,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
