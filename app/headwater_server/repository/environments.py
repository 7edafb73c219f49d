"""The Python environments that models of a Triton model repository name by ``EXECUTION_ENV_PATH``.

The parameter's value is a folder with ``bin/python``, or an archive of ``conda-pack``, which is unpacked once for all
replicas of a server.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headwater_server.process.interpreter import (
    NUMPY_ALONE,
    InterpreterError,
    find_interpreter,
    foreign_environment,
)
from headwater_server.repository.model_config import ENVIRONMENT, RepositoryModel

__all__ = ["MODELS_FOLDER", "EnvironmentFault", "named_path", "python_of"]

MODELS_FOLDER: Final = "$$TRITON_MODEL_DIRECTORY"
"""Stands for the model's folder in the parameter's value."""
MAX_UNPACKED_BYTES: Final = 32 * 1024**3
MAX_FILES: Final = 1_000_000


class EnvironmentFault(Exception):
    """A model's environment can't be used; the message names the parameter and the reason."""


def named_path(model: RepositoryModel) -> Path | None:
    """The path that a model names, None if it names none.

    Raises:
        EnvironmentFault: the path is relative, or nothing is there.
    """
    if ENVIRONMENT not in model.config.parameters:
        return None
    value = model.config.parameters[ENVIRONMENT].string_value
    path = Path(value.replace(MODELS_FOLDER, str(model.folder)))
    if not path.is_absolute():
        raise EnvironmentFault(f"{ENVIRONMENT}: expected an absolute path, or {MODELS_FOLDER}/..., got {value!r}")
    if not path.exists():
        raise EnvironmentFault(f"{ENVIRONMENT}: there is no {path}")
    return path


def python_of(path: Path, unpacked: Path, stage: Path, environ: Mapping[str, str]) -> str:
    """The interpreter of an environment, checked.

    Args:
        path: a folder, or an archive.
        unpacked: the folder for unpacked archives; made if it isn't there.
        stage, environ: see `foreign_environment`.

    Raises:
        EnvironmentFault: it has no Python that can run a model, or can't be unpacked.
    """
    folder = path if path.is_dir() else _unpacked(path, unpacked)
    python = folder / "bin" / "python"
    if not python.exists():
        raise EnvironmentFault(f"{ENVIRONMENT}: expected an environment with bin/python, got {path}")
    try:
        return find_interpreter(python, foreign_environment(environ, stage), NUMPY_ALONE)
    except InterpreterError as error:
        raise EnvironmentFault(f"{ENVIRONMENT}, {path}: {error.reason}; {error.fix}") from None


def _unpacked(archive: Path, folder: Path) -> Path:
    stat = archive.stat()
    name = hashlib.sha256(f"{archive.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:24]
    target = folder / name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder))
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(made, members=_bounded(tar), filter=_inside)
        os.rename(made, target)
    except OSError as error:
        if target.is_dir():  # another replica has unpacked it meanwhile
            return target
        raise EnvironmentFault(f"{ENVIRONMENT}, {archive}: it can't be unpacked: {error}") from None
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise EnvironmentFault(f"{ENVIRONMENT}, {archive}: expected an archive of conda-pack: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _bounded(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """The members of an archive. Raises `ValueError` if there are too many, or if they are too large together."""
    members: list[tarfile.TarInfo] = []
    size = 0
    for member in tar:
        members.append(member)
        size += member.size
        if size > MAX_UNPACKED_BYTES or len(members) > MAX_FILES:
            raise ValueError(f"expected at most {MAX_FILES} files of {MAX_UNPACKED_BYTES} bytes together, got more")
    return members


def _inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Refuse a member that would be outside of the folder. Links stay as they are if they end inside."""
    checked = tarfile.tar_filter(member, folder)
    if member.issym() or member.islnk():
        start = os.path.dirname(member.name) if member.issym() else ""
        end = os.path.normpath(os.path.join(start, member.linkname))
        if os.path.isabs(member.linkname) or end == ".." or end.startswith("../"):
            raise ValueError(f"the link {member.name} ends outside of the environment: {member.linkname}")
    elif not (member.isfile() or member.isdir()):
        raise ValueError(f"{member.name} is neither a file, a folder nor a link")
    return checked
