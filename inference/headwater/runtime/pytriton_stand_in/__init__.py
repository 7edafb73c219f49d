"""A stand-in for PyTriton where it isn't installed: the package ``pytriton`` in this folder.

It has the documented names with which scripts bind and serve models, for any numpy, and imports numpy only. Clients,
Triton's processes and telemetry are not part of it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["missing_name", "put_last_on_path"]

_FOLDER: Final = str(Path(__file__).parent)


def put_last_on_path() -> None:
    """Have ``import pytriton`` find the stand-in, unless PyTriton is installed."""
    if _FOLDER not in sys.path:
        sys.path.append(_FOLDER)


def missing_name(error: BaseException | None) -> str | None:
    """The module or attribute that an error says is missing, such as ``pytriton.client``, if the stand-in lacks it.

    None: the error is about something else, or PyTriton is installed.
    """
    if isinstance(error, ImportError):
        imported = re.match(r"cannot import name '(\w+)'", str(error))
        name = f"{error.name}.{imported[1]}" if imported else str(error.name)
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = f"{error.obj.__name__}.{error.name}"
    else:
        return None
    file = getattr(sys.modules.get("pytriton"), "__file__", None) or ""
    return name if name.startswith("pytriton.") and file.startswith(_FOLDER) else None
