"""Triton model repositories for tests."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_repository"]

HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"


def write_repository(folder: Path, models: Mapping[str, tuple[str, str]]) -> None:
    """Write a repository.

    Args:
        folder: an empty folder.
        models: the configuration and the script of each model, either maybe empty.
    """
    for name, (config, script) in models.items():
        (folder / name / "1").mkdir(parents=True)
        if config:
            (folder / name / "config.pbtxt").write_text(textwrap.dedent(config))
        if script:
            (folder / name / "1" / "model.py").write_text(HEAD + textwrap.dedent(script))
