"""The files of the user's modules, which ``headwater serve --reload`` watches."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

__all__ = ["imported_files"]


def imported_files(folders: Sequence[str], error: BaseException | None = None) -> list[str]:
    """The files of the modules that were imported from these folders, without installed packages and Headwater:
    absolute paths, sorted.

    Args:
        folders: the user's folders.
        error: the exception of an import or of the model. The files in its traceback count too, because a module that
            can't be imported is not in `sys.modules`.
    """
    ours = str(Path(__file__).parents[1])
    away = _prefixes((ours, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))))
    places = _prefixes(folders)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    named = (file for file in (*files, *_files_of(error)) if isinstance(file, str) and file.endswith(".py"))
    sources = {os.path.abspath(file) for file in named}
    return sorted(
        source
        for source in sources
        if source.startswith(places) and not source.startswith(away) and os.path.isfile(source)
    )


def _prefixes(folders: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the paths of the files in these folders."""
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


def _files_of(error: BaseException | None) -> Iterator[str]:
    """The files in the tracebacks of an error and its causes, and the files that can't be parsed."""
    while error is not None:
        yield from (frame.filename for frame in traceback.extract_tb(error.__traceback__))
        if isinstance(error, SyntaxError) and error.filename:
            yield error.filename
        error = error.__cause__ or error.__context__
