"""The wheel: it has every file of the two packages, and installs the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = ("app", "inference")
ONLY_IN_THE_REPOSITORY = {"headwater/zoo/README.md"}


@pytest.mark.slow
def test_it_has_every_file_of_the_packages_and_the_command(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ROOTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    roots = [source / name for name in ROOTS]
    there = {str(path.relative_to(root)) for root in roots for path in root.rglob("*") if path.is_file()}
    pip = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "headwater = headwater_server.__main__:main" in archive.read(entry).decode()
    assert names == there - ONLY_IN_THE_REPOSITORY
