"""The folders of the user's modules on ``sys.path``, and environment variables that decide where modules come from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

__all__ = ["decides_modules", "module_named_headwater", "put_on_path", "user_folders"]

_LOADED_BY: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_")

_folders: list[str] = []


def decides_modules(variables: Iterable[str]) -> bool:
    """Whether one of these variables decides which modules and libraries a process loads."""
    return any(name.startswith(_LOADED_BY) for name in variables)


def put_on_path(folders: Iterable[str]) -> None:
    """Put folders first on ``sys.path``, as the folder of a script is. A folder from an earlier call keeps its place.

    Headwater imports its dependencies before this call, so that a user's ``queue.py`` isn't imported in place of
    Python's.
    """
    new = [folder for folder in folders if folder not in _folders]
    sys.path[:0] = new
    _folders[:0] = new


def user_folders() -> tuple[str, ...]:
    """The folders that `put_on_path` has put on ``sys.path``."""
    return tuple(_folders)


def module_named_headwater(folders: Iterable[str]) -> str | None:
    """The file of a module or package ``headwater`` in one of these folders that isn't Headwater itself; None if there
    is no such file.

    A folder ``headwater`` without ``__init__.py`` is not reported: it does not hide Headwater's package.
    """
    spec = PathFinder.find_spec("headwater", [folder for folder in folders if os.path.isdir(folder)])
    ours = Path(__file__).with_name("__init__.py")
    if spec is None or spec.origin is None or os.path.samefile(spec.origin, ours):
        return None
    return spec.origin
