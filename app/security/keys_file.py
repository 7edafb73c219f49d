"""The file of keys: read by servers, changed by ``headwater keys``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from app.errors import ConfigError
from app.security.keys import Key, read_keys

__all__ = ["ENVIRONMENT_NAME", "change_file", "keys_are_wanted", "known_keys", "read_file"]

ENVIRONMENT_NAME = "HEADWATER_KEYS"
"""Its value is what a file of keys holds."""


def keys_are_wanted(path: Path | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a server has keys, if perhaps none yet; the arguments are those of `known_keys`."""
    return path is not None or ENVIRONMENT_NAME in environment


def known_keys(path: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[Key, ...]:
    """The keys of a server: those of its file and those of its environment.

    Args:
        path: of the file, if there is one.
        environment: may have `ENVIRONMENT_NAME`.

    Raises:
        ConfigError: they can't be read, or are wrong.
    """
    text = environment.get(ENVIRONMENT_NAME)
    content: list[object] = []
    sources = []
    for source, keys in (
        (f"environment variable {ENVIRONMENT_NAME}", None if text is None else _parsed(text, ENVIRONMENT_NAME)),
        (f"security.keys_file: {path}", None if path is None else read_file(path)),
    ):
        if keys is not None:
            content += msgspec.to_builtins(keys)
            sources.append(source)
    return read_keys({"keys": content}, " and ".join(sources))  # together, for names that are in both


def read_file(path: Path) -> tuple[Key, ...]:
    """What a file holds.

    Raises:
        ConfigError: it can't be read, others could have changed it, or it is wrong.
    """
    where = f"security.keys_file: {path}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read()
    except OSError as error:
        raise ConfigError(
            f"{where}: can't be read: {error.strerror}; `headwater keys add NAME --file {path}` makes it"
        ) from error
    if mode & 0o022:
        raise ConfigError(
            f"{where}: expected that nobody but its owner may write to it, got mode {mode:04o}: whoever can, can let "
            f"himself in; chmod 600 {path}"
        )
    try:
        return _parsed(raw.decode(), where)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: expected UTF-8 text: {error.reason} at byte {error.start}") from error


def change_file(path: Path, change: Callable[[Sequence[Key]], Sequence[Key]]) -> None:
    """Change a file of keys, or make it; a server that reads it meanwhile sees the old or the new one, whole.

    Args:
        path: of the file; it becomes JSON, readable by its owner only.
        change: gets the keys, and returns those that there shall be.

    Raises:
        ConfigError: it can't be read or written, or is wrong before or after the change.
    """
    try:
        with _alone(path.parent):
            before = read_file(path) if path.exists() else ()
            content = {"keys": msgspec.to_builtins(tuple(change(before)))}
            read_keys(content, str(path))
            _replace(path.resolve(), json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from error


def _parsed(text: str, source: str) -> tuple[Key, ...]:
    # JSON, as we write it, is YAML, too; but a thousand keys would take YAML's reader a second, in which nothing is
    # answered.
    with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return read_keys(msgspec.json.decode(text), source)
    try:
        # Every scalar stays the text that it is: YAML would make a date of `created`, and fail at an impossible one.
        content = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        # Not its text, which quotes the line.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}"
        raise ConfigError(f"{source}: expected JSON or YAML, got something else{place}") from None
    except RecursionError:
        raise ConfigError(f"{source}: expected JSON or YAML, got something nested too deep") from None
    return read_keys(content, source, is_text=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two commands at once must not undo each other. The file itself is replaced, so its folder is locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
