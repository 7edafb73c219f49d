"""The two wheels: each has every file of its package, and says what it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import RawMetadata, parse_email

import headwater
import headwater_server

ROOT = Path(__file__).parents[1]
ONLY_IN_THE_REPOSITORY = {"headwater/zoo/README.md"}
IGNORED = shutil.ignore_patterns("__pycache__", ".*", "*.so", "*.egg-info", "build")


def built(source: Path, into: Path) -> tuple[Path, set[str], RawMetadata, str]:
    """A source tree's wheel, the names of the package's files in it, its metadata and its entry points."""
    pip = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(into), str(source)], check=True, capture_output=True, timeout=300)
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = {name.rpartition("/")[2]: archive.read(name) for name in names if ".dist-info/" in name}
    metadata = parse_email(about["METADATA"])[0]
    assert "LICENSE" in about
    return (
        wheel,
        {name for name in names if ".dist-info/" not in name},
        metadata,
        about.get("entry_points.txt", b"").decode(),
    )


def files(root: Path, package: str) -> set[str]:
    return {str(path.relative_to(root)) for path in (root / package).rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_models_package_is_pure_python_for_any_python_and_numpy(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "inference", source, ignore=IGNORED)
    wheel, names, metadata, _ = built(source, tmp_path)
    assert wheel.name == f"headwater-{headwater.__version__}-py3-none-any.whl"
    assert names == files(source, "headwater") - ONLY_IN_THE_REPOSITORY
    assert "headwater/py.typed" in names
    assert metadata["requires_python"] == ">=3.10"
    assert sorted(metadata["requires_dist"]) == ["msgspec>=0.14", "numpy>=1.22"]


@pytest.mark.slow
def test_the_server_has_the_command_and_takes_the_models_package_of_its_version(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(ROOT / "app", source / "app", ignore=IGNORED)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel, names, metadata, entries = built(source, tmp_path)
    assert wheel.name == f"headwater_server-{headwater_server.__version__}-py3-none-any.whl"
    assert names == files(source / "app", "headwater_server")
    assert "headwater = headwater_server.__main__:main" in entries
    assert metadata["requires_python"] == "<3.13,>=3.10"
    assert f"headwater=={headwater_server.__version__}" in metadata["requires_dist"]


def test_both_packages_have_one_version() -> None:
    assert headwater.__version__ == headwater_server.__version__
