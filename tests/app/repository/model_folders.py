"""Writes models of a repository for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["EMPTY_SCRIPT", "write_model"]

EMPTY_SCRIPT: Final = "class TritonPythonModel:\n    pass\n"


def write_model(folder: Path, config: str | None = None, *versions: str, script: str = "model.py") -> Path:
    """Write a model with a script in the folder of each version. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    for version in versions:
        (folder / version).mkdir()
        (folder / version / script).write_text(EMPTY_SCRIPT)
    return folder
