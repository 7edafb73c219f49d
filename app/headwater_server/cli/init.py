"""``headwater init``: writes a folder for a new project."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headwater_server.errors import CommandError

__all__ = ["KINDS", "write_template"]

KINDS: Final = ("language-model", "model", "pipeline", "pytriton", "stream")
_TEMPLATES: Final = Path(__file__).with_name("templates")


def write_template(kind: str, folder: Path) -> list[Path]:
    """Write a template's files: a model, a configuration, a test and a README. Nothing is overwritten.

    Args:
        kind: one of `KINDS`.
        folder: the folder to write to; created if missing.

    Returns the paths of the written files.

    Raises:
        CommandError: a file exists already, or can't be written.
    """
    sources = sorted(path for path in (_TEMPLATES / kind).iterdir() if path.is_file())
    targets = [folder / source.name for source in sources]
    for target in targets:
        if target.exists() or target.is_symlink():
            raise CommandError(f"{target}: already exists, and is not overwritten; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            with target.open("x", encoding="utf-8") as file:
                file.write(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{folder}: can't write there: {error.strerror}; name another folder") from error
    return targets
