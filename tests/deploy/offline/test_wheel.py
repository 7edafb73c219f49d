"""A slimmed wheel: what it leaves out, what it keeps, and its record."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.offline.wheel import slim

CODE = b"def one() -> int:\n    return 1\n"
FILES = {
    "good/__init__.py": CODE,
    "good/backends/python_backend_stubs/3.11/stub": b"#!/bin/sh\necho eleven, with libeleven-1a.so.1\n",
    "good/backends/python_backend_stubs/3.12/stub": b"#!/bin/sh\necho twelve, with libtwelve-2b.so.1\n",
    "good/tests/test_good.py": b"assert False\n",
    "good/part/test/data.bin": b"\0" * 1000,
    "good/testing/__init__.py": CODE,
    "good/tests.py": CODE,
    "good.libs/libeleven-1a.so.1": b"needs libdeep-3c.so.1",
    "good.libs/libdeep-3c.so.1": b"names itself: libdeep-3c.so.1",
    "good.libs/libtwelve-2b.so.1": b"needs nothing",
    'good/a, "b".txt': b"a name with a comma",
    "good-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: good\nVersion: 1.0\n",
    "good-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "good-1.0.dist-info/RECORD": b"",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """One with everything that is left out, and what looks like it."""
    path = tmp_path / "good-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in FILES.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name.endswith("stub") else 0o644) << 16
            archive.writestr(info, content)
    return path


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_other_pythons_stubs_their_libraries_and_tests_are_left_out(wheel: Path) -> None:
    left_out = set(FILES) - {"good-1.0.dist-info/RECORD"}
    slim(wheel, "3.12", strip=False)
    assert left_out - names(wheel) == {
        "good/backends/python_backend_stubs/3.11/stub",
        "good/tests/test_good.py",
        "good/part/test/data.bin",
        "good.libs/libeleven-1a.so.1",
        "good.libs/libdeep-3c.so.1",
    }


def test_it_says_how_much_is_left_out(wheel: Path) -> None:
    gone = slim(wheel, "3.11", strip=False)
    kept = names(wheel) - {"good-1.0.dist-info/RECORD"}
    with zipfile.ZipFile(wheel) as archive:
        assert all(archive.read(name) == FILES[name] for name in kept)
    assert gone == sum(len(content) for name, content in FILES.items() if name not in kept)


def test_the_record_lists_what_is_there(wheel: Path) -> None:
    slim(wheel, "3.12", strip=False)
    with zipfile.ZipFile(wheel) as archive:
        rows = list(csv.reader(io.StringIO(archive.read("good-1.0.dist-info/RECORD").decode())))
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        for name, digest, size in rows:
            if name == "good-1.0.dist-info/RECORD":
                assert not digest
                assert not size
                continue
            content = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(content)))


def test_the_same_wheel_comes_of_the_same_files(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / wheel.name
    other.parent.mkdir()
    with zipfile.ZipFile(other, "w") as archive:
        for name, content in reversed(FILES.items()):
            info = zipfile.ZipInfo(name, (2020, 1, 2, 3, 4, 6))
            info.external_attr = (0o755 if name.endswith("stub") else 0o644) << 16
            archive.writestr(info, content)
    for path in (wheel, other):
        slim(path, "3.12", strip=False)
    assert wheel.read_bytes() == other.read_bytes()


def test_what_could_be_executed_still_can(wheel: Path, tmp_path: Path) -> None:
    slim(wheel, "3.12", strip=False)
    with zipfile.ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    assert modes.pop("good/backends/python_backend_stubs/3.12/stub") == 0o755
    assert set(modes.values()) == {0o644}


@pytest.mark.skipif(shutil.which("strip") is None, reason="needs strip, of binutils")
def test_a_stripped_library_is_smaller_and_loads_and_a_broken_one_stays(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("uvloop.loop")  # its wheel has debug symbols
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin)
    broken = b"\x7fELF" + bytes(1000)
    path = tmp_path / "good-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**FILES, f"good/{library.name}": library.read_bytes(), "good/broken": broken}.items():
            archive.writestr(name, content)
    slim(path, "3.12", strip=True)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("good/broken") == broken
        archive.extract(f"good/{library.name}", tmp_path)
    stripped = tmp_path / "good" / library.name
    assert stripped.stat().st_size < library.stat().st_size / 2
    load = "import ctypes, sys; ctypes.PyDLL(sys.argv[1]).PyInit_loop"
    assert subprocess.run([sys.executable, "-c", load, stripped], timeout=60, check=False).returncode == 0
