"""The files of the user's modules, which ``headwater serve --reload`` watches."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["imported_files"]


def imported_files(folders: Sequence[str], error: BaseException | None = None) -> list[str]:
    """The files of the modules that were imported from these folders, not of installed packages.

    Args:
        folders: the user's.
        error: what an import or the model raised; the files that it went through count too, since a module that can't
            be imported is none.
    """
    ours = str(Path(__file__).parents[1])
    away = (ours, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    places = [Path(folder).absolute() for folder in folders]
    found = set()
    for file in (*files, *_files_of(error)):
        path = Path(file).absolute() if isinstance(file, str) and file.endswith(".py") else None
        if path is None or not path.is_file() or any(path.is_relative_to(one) for one in away):
            continue
        if any(path.is_relative_to(place) for place in places):
            found.add(str(path))
    return sorted(found)


def _files_of(error: BaseException | None) -> Iterator[str]:
    """The files in the tracebacks of an error and its causes, and of what can't be parsed."""
    while error is not None:
        yield from (frame.filename for frame in traceback.extract_tb(error.__traceback__))
        if isinstance(error, SyntaxError) and error.filename:
            yield error.filename
        error = error.__cause__ or error.__context__
