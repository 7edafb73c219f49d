"""Virtual environments that borrow what is installed here."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["make_environment"]


def make_environment(folder: Path, *packages: str) -> Path:
    """Make a virtual environment of this Python. Returns its interpreter.

    Args:
        folder: the environment's.
        packages: begin the names of what it borrows of the installed packages.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    place = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if packages and entry.name.startswith(packages):
            (place / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
