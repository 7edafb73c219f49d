"""``python -m deploy.offline``: build a folder that installs Headwater without a network. `make offline` runs it."""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet

from deploy.offline.packages import GLIBC, MACHINE, OfflineError, fetch, metadata, missing, name_of, pins
from deploy.offline.wheel import slim

__all__ = ["archive", "build"]

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", "app")
"""What the server's wheel is made of; that of the models' package is made of ``inference``."""
SERVER: Final = "headwater-server"
SCRIPTS: Final = ("install.sh", "install.py")
# Most of what is packed is code for x86-64, whose jumps compress better as absolute addresses.
COMPRESSION: Final = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}]
MIB: Final = 2**20
PART_BYTES = 47 * MIB
"""Ways to copy files to such a machine often have a limit."""


def build(python: str, extras: Sequence[str], into: Path, *, is_slim: bool, libpython: Path | None) -> Path:
    """Build the folder.

    Args:
        python: the version it is for, as ``3.12``.
        extras: of the server's, such as ``lm``.
        into: where the folder is made; one that is there is replaced.
        is_slim: whether to leave out what does not run.
        libpython: a file to bring along, ``libpython3.12.so.1.0``.

    Returns:
        The folder.

    Raises:
        OfflineError: an argument is wrong, or packages can't be had.
    """
    locked = pins((ROOT / "requirements.lock").read_text(), python)
    if libpython is not None and libpython.name != f"libpython{python}.so.1.0":
        raise OfflineError(f"LIBPYTHON: expected a file libpython{python}.so.1.0, got {libpython}")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".offline-", dir=into) as name:
        folder = Path(name) / "folder"
        wheels = folder / "wheels"
        wheels.mkdir(parents=True)
        _build_own(wheels, Path(name) / "sources")
        about = metadata(_by_name(wheels)[SERVER])
        if python not in SpecifierSet(about["requires_python"]):
            raise OfflineError(f"PYTHON_VERSION: expected {about['requires_python']}, got {python}")
        if unknown := sorted(set(extras) - set(about["provides_extra"])):
            known = ", ".join(about["provides_extra"])
            raise OfflineError(f"EXTRAS: expected some of {known}, got {', '.join(unknown)}")
        print(f"Fetching the wheels for Python {python} ...", flush=True)
        while wanted := missing(_by_name(wheels), SERVER, extras, python):
            # What the lock leaves open, as the libraries of torch's CUDA build, is taken as it is required.
            fetch(
                sorted(f"{one}=={locked[one]}" if one in locked else text for one, text in wanted.items()),
                python,
                wheels,
            )
        if is_slim:
            _slim(wheels, python)
        for script in SCRIPTS:
            shutil.copy(Path(__file__).with_name(script), folder)
        if libpython is not None:
            shutil.copyfile(libpython, folder / libpython.name)
        manifest = {
            "headwater": about["version"],
            "python": python,
            "machine": MACHINE,
            "glibc": "{}.{}".format(*GLIBC),
            "libpython": None if libpython is None else _described(folder / libpython.name),
            "wheels": [{"name": one, **_described(path)} for one, path in _by_name(wheels).items()],
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        result = into / f"headwater-{about['version']}-offline-py{python}-{MACHINE}"
        shutil.rmtree(result, ignore_errors=True)
        return folder.rename(result)


def archive(folder: Path) -> list[Path]:
    """Pack a folder as ``FOLDER.tar.xz.1`` and so on beside it, parts of one archive, which is the same whenever it is
    made of the same files."""
    path = folder.with_name(f"{folder.name}.tar.xz")
    for former in path.parent.glob(f"{path.name}.*"):
        former.unlink()
    with (
        lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=COMPRESSION) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for file in (folder, *sorted(folder.rglob("*"))):
            tar.add(file, file.relative_to(folder.parent), recursive=False, filter=_anonymous)
    parts: list[Path] = []
    with path.open("rb") as whole:
        while content := whole.read(PART_BYTES):
            parts.append(path.with_name(f"{path.name}.{len(parts) + 1}"))
            parts[-1].write_bytes(content)
    path.unlink()
    return parts


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    info.mode = 0o755 if info.mode & 0o111 else 0o644
    return info


def _build_own(wheels: Path, sources: Path) -> None:
    """Build both own wheels, from a copy: setuptools would take what an earlier build has left in ``build``."""
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "inference", sources / "inference", ignore=ignored)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, sources)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "--no-input", "wheel", "--no-deps"]
    command += ["--no-build-isolation", f"--wheel-dir={wheels}", str(sources / "inference"), str(sources)]
    # The oldest date that a zip file can have.
    ended = subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": "315532800"}, check=False)
    if ended.returncode:
        raise OfflineError("Headwater's own wheels could not be built, for the reason above")


def _slim(wheels: Path, python: str) -> None:
    strip = shutil.which("strip") is not None
    without = "" if strip else "; debug symbols stay, since there is no `strip` (on Debian: apt-get install binutils)"
    print(f"Leaving out what does not run{without} ...", flush=True)
    left_out = sum(slim(wheel, python, strip=strip) for wheel in _by_name(wheels).values())
    print(f"  {left_out / MIB:.1f} MiB of files", flush=True)


def _by_name(wheels: Path) -> dict[str, Path]:
    return dict(sorted((name_of(wheel), wheel) for wheel in wheels.iterdir()))


def _described(file: Path) -> dict[str, str | int]:
    version = {"version": metadata(file)["version"]} if file.suffix == ".whl" else {}
    content = file.read_bytes()
    return {**version, "file": file.name, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def main() -> None:
    """Entry point; see the module's docstring."""
    own = "{}.{}".format(*sys.version_info)
    parser = argparse.ArgumentParser(prog="python -m deploy.offline", description=(__doc__ or "").partition(":")[2])
    parser.add_argument("--python", default=own, metavar="X.Y", help=f"the version that the machine has ({own})")
    parser.add_argument("--extras", default="", metavar="NAME,...", help="of the server's, for models under its Python")
    parser.add_argument("--slim", action="store_true", help="leave out what does not run, and pack it as tar.xz")
    parser.add_argument("--libpython", type=Path, metavar="FILE", help="bring along this libpythonX.Y.so.1.0")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="FOLDER", help="(dist)")
    options = parser.parse_args()
    extras = options.extras.replace(",", " ").split()
    try:
        folder = build(options.python, extras, options.into, is_slim=options.slim, libpython=options.libpython)
    except OfflineError as error:
        sys.exit(f"make offline: {error}")
    wheels = list((folder / "wheels").iterdir())
    print(f"{folder}: {len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / MIB:.1f} MiB")
    if options.slim:
        print("Compressing (a minute or two) ...", flush=True)
        for part in archive(folder):
            print(f"{part}: {part.stat().st_size / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
