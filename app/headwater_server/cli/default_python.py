"""The default Python: it runs the deployments that name no Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headwater_server.config.schema import Config
from headwater_server.config.sections import OWN_PYTHON

__all__ = ["DefaultPython", "default_python"]

ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""Environment variables that name the folder of the active Python environment."""


class DefaultPython(NamedTuple):
    """The default interpreter, and the reason for choosing it."""

    path: Path
    """The interpreter's path; `OWN_PYTHON` for Headwater's Python."""
    why: str

    def __str__(self) -> str:
        is_own = self.path == OWN_PYTHON
        path = f"Headwater's own Python, {sys.executable}" if is_own else self.path
        return f"models run under {path}: {self.why}"


def default_python(config: Config, option: str | None, folder: Path, environ: Mapping[str, str]) -> DefaultPython:
    """Choose the Python of the deployments that name no Python.

    It is the first of these that is given or, for ``.venv``, exists: the configuration's ``python``; the option
    ``--python``; the Python of the active environment; the Python of ``.venv`` beside the configuration, unless
    Headwater is installed in it; Headwater's Python. On a cluster, the active environment and ``.venv`` are not
    considered.

    Args:
        config: the configuration.
        option: the value of ``--python``.
        folder: the folder of the configuration, or the working folder.
        environ: the process's environment.
    """
    if config.python is not None:
        before = ", which comes before --python" if option else ""
        return DefaultPython(config.python, f"`python` of the configuration{before}")
    if option:
        return DefaultPython(Path(option).expanduser(), "--python")
    if config.cluster is not None:
        return DefaultPython(OWN_PYTHON, "no `python` is set, and other nodes lack this node's active environment")
    for variable in ACTIVE:
        if prefix := environ.get(variable):
            return _of_environment(Path(prefix), f"the active environment ({variable})")
    beside = folder / ".venv"
    if (beside / "bin" / "python").exists() and not (beside / "bin" / "headwater").exists():
        return _of_environment(beside, "the environment .venv in the folder of the configuration")
    return DefaultPython(OWN_PYTHON, "no `python` is set, and no environment is active")


def _of_environment(prefix: Path, why: str) -> DefaultPython:
    if os.path.realpath(prefix) == os.path.realpath(sys.prefix):
        return DefaultPython(OWN_PYTHON, why)
    return DefaultPython(prefix.absolute() / "bin" / "python", why)
