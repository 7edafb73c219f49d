"""A stand-in for PyTriton where it isn't installed: the package ``pytriton`` in this folder.

It has the documented names with which scripts bind and serve models. It works with any version of numpy, and imports
only numpy. Clients, Triton's processes and telemetry are not part of it.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["missing_imports", "missing_name", "put_last_on_path"]

_FOLDER: Final = str(Path(__file__).parent)


def put_last_on_path() -> None:
    """Have ``import pytriton`` find the stand-in, unless PyTriton is installed."""
    if _FOLDER not in sys.path:
        sys.path.append(_FOLDER)


def missing_name(error: BaseException | None) -> str | None:
    """The module or attribute that an error reports as missing, such as ``pytriton.client``, if the stand-in lacks it.

    None: the error has another cause, or PyTriton is installed.
    """
    if isinstance(error, ImportError):
        imported = re.match(r"cannot import name '(\w+)'", str(error))
        name = f"{error.name}.{imported[1]}" if imported else str(error.name)
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = f"{error.obj.__name__}.{error.name}"
    else:
        return None
    return name if name.startswith("pytriton.") and _stands_in() else None


def missing_imports(source: bytes) -> Iterator[tuple[int, str]]:
    """The line and the name of every import of PyTriton in a script, in functions too, that the stand-in lacks.

    Empty if PyTriton is installed.
    """
    for node in ast.walk(ast.parse(source)) if _stands_in() else ():
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}".removesuffix(".*") for name in names]
        for name in names:
            if name.startswith("pytriton."):
                try:
                    pkgutil.resolve_name(name)
                except (ImportError, AttributeError):
                    yield node.lineno, name


def _stands_in() -> bool:
    """Whether the imported ``pytriton`` is the stand-in."""
    return (getattr(sys.modules.get("pytriton"), "__file__", None) or "").startswith(_FOLDER)
