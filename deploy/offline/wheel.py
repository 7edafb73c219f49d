"""Slims a wheel: leaves out what does not run, and packs the rest so that it compresses well with others."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["slim"]

ELF: Final = b"\x7fELF"
# Of elf(5): PT_LOAD, SHF_ALLOC, SHT_NOBITS, SHT_DYNSYM.
LOAD: Final = 1
ALLOCATED: Final = 2
NO_BYTES: Final = 8
SYMBOLS: Final = 11
LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)
"""The date of every packed file: a wheel is then the same whenever it is made."""


def slim(wheel: Path, python: str, *, strip: bool) -> int:
    """Rewrite a wheel without what does not run, as the archive of its files, uncompressed, with a new ``RECORD``.

    Left out are folders of tests, PyTriton's stubs for other Pythons, the libraries that only these need, and what
    only debuggers read.

    Args:
        wheel: rewritten in place.
        python: that it is for, as ``3.12``.
        strip: whether to run ``strip``, of binutils, on programs and libraries.

    Returns:
        How many bytes of files were left out.
    """
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            runnable = {info.filename for info in infos if info.external_attr >> 16 & 0o111}
            archive.extractall(folder)
        size = sum(info.file_size for info in infos)
        for info in infos:
            if not _runs(PurePosixPath(info.filename), python):
                (folder / info.filename).unlink()
        _remove_unneeded_libraries(folder)
        if strip:
            for path in _files(folder):
                _strip(path)
        left = sum(path.stat().st_size for path in _files(folder))
        _pack(folder, wheel, runnable)
    return size - left


def _runs(path: PurePosixPath, python: str) -> bool:
    """Whether a file of a wheel is neither a test nor a stub for another Python."""
    stub = re.search(r"/python_backend_stubs/([\d.]+)/", str(path))
    return (stub is None or stub[1] == python) and not {"tests", "test"}.intersection(path.parts[1:-1])


def _remove_unneeded_libraries(folder: Path) -> None:
    """Remove the libraries that a wheel brings along (``NAME.libs``) and no other file in it names."""
    libraries = {path for path in _files(folder) if path.parent.name.endswith(".libs")}
    unneeded = libraries
    while unneeded:
        named = {
            library for path in _files(folder) if path.name != "RECORD" for library in _named(libraries - {path}, path)
        }
        unneeded = libraries - named
        for library in unneeded:
            library.unlink()
        libraries = named


def _named(libraries: set[Path], file: Path) -> set[Path]:
    content = file.read_bytes() if libraries else b""
    return {library for library in libraries if library.name.encode() in content}


def _strip(path: Path) -> None:
    """Remove what only debuggers read of a program or shared library, unless that would change what is loaded of it."""
    if not _is_elf(path):
        return
    stripped = path.with_name(f"{path.name}.stripped")
    command = ["strip", "--strip-all", "-o", str(stripped), str(path)]
    ended = subprocess.run(command, capture_output=True, check=False)
    if ended.returncode == 0 and _loads_alike(stripped.read_bytes(), path.read_bytes()):
        shutil.copymode(path, stripped)
        stripped.replace(path)
    stripped.unlink(missing_ok=True)


def _loads_alike(stripped: bytes, whole: bytes) -> bool:
    """Whether a stripped ELF file can be loaded, and has the same sections with the same bytes at the same addresses.

    The symbol table may differ, since it numbers sections.
    """
    if not all((offset - address) % alignment == 0 for offset, address, alignment in _segments(stripped)):
        return False
    addresses = [[address for _, address, _ in _segments(content)] for content in (stripped, whole)]
    return addresses[0] == addresses[1] and _sections(stripped) == _sections(whole)


def _segments(content: bytes) -> list[tuple[int, int, int]]:
    """Offset, address and alignment of each part of a 64-bit ELF file that is loaded."""
    entries = _table(content, "<IIQQQQQQ", 0x20, 0x36)
    return [(offset, address, alignment) for kind, _, offset, address, *_, alignment in entries if kind == LOAD]


def _sections(content: bytes) -> list[tuple[int, bytes]]:
    """Address and bytes of each section of a 64-bit ELF file that is loaded, but the symbol table."""
    entries = _table(content, "<IIQQQQIIQQ", 0x28, 0x3A)
    return [
        (address, content[offset : offset + size])
        for _, kind, flags, address, offset, size, *_ in entries
        if flags & ALLOCATED and kind not in (NO_BYTES, SYMBOLS)
    ]


def _table(content: bytes, layout: str, start: int, shape: int) -> Iterator[tuple[int, ...]]:
    """Entries of a table that an ELF header describes: its offset is at ``start``, size and count are at ``shape``."""
    (offset,) = struct.unpack_from("<Q", content, start)
    size, count = struct.unpack_from("<HH", content, shape)
    return (struct.unpack_from(layout, content, offset + size * index) for index in range(count))


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ELF)) == ELF


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _pack(folder: Path, wheel: Path, runnable: set[str]) -> None:
    """Pack a folder as a wheel whose ``RECORD`` lists what is there.

    Args:
        folder: of the unpacked wheel.
        wheel: written.
        runnable: names of the files that may be executed.
    """
    (record,) = folder.glob("*.dist-info/RECORD")
    names = {path.relative_to(folder).as_posix(): path for path in _files(folder) if path != record}
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name, path in names.items():
            content = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f"{_quoted(name)},sha256={digest},{len(content)}\n")
            archive.writestr(_info(name, name in runnable), content)
        record_name = record.relative_to(folder).as_posix()
        archive.writestr(_info(record_name, False), "".join([*lines, f"{_quoted(record_name)},,\n"]))


def _quoted(name: str) -> str:
    """A name as a field of CSV."""
    return '"{}"'.format(name.replace('"', '""')) if "," in name or '"' in name else name


def _info(name: str, is_runnable: bool) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, LONG_AGO)
    info.external_attr = (0o100755 if is_runnable else 0o100644) << 16
    return info
