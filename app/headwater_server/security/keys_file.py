"""The file of API keys: servers read it, and the command ``headwater keys`` changes it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from headwater_server.errors import ConfigError
from headwater_server.security.keys import Key, read_keys
from headwater_server.security.regular_file import require_regular

__all__ = ["ENVIRONMENT_NAME", "change_file", "keys_are_wanted", "known_keys", "read_file"]

FIELD = "security.keys_file"
ENVIRONMENT_NAME = "HEADWATER_KEYS"
"""The environment variable that may hold keys, in the format of a file of keys."""


def keys_are_wanted(path: Path | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether API keys are configured, even if the file has no keys yet; takes the arguments of `known_keys`."""
    return path is not None or ENVIRONMENT_NAME in environment


def known_keys(path: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[Key, ...]:
    """The keys of a server, from its environment and its file.

    Args:
        path: the file; None: there is no file.
        environment: may have `ENVIRONMENT_NAME`.

    Raises:
        ConfigError: the keys can't be read, or are invalid; or a name or a key is in both sources.
    """
    text = environment.get(ENVIRONMENT_NAME)
    keys: list[Key] = []
    fields = []
    place = ""
    if text is not None:
        keys += _parsed(text, ENVIRONMENT_NAME)
        fields.append(f"environment variable {ENVIRONMENT_NAME}")
    if path is not None:
        keys += read_file(path)
        fields.append(FIELD)
        place = f"{path}: "
    # Check all keys together, to find names that occur in both sources.
    return read_keys({"keys": msgspec.to_builtins(keys)}, " and ".join(fields), place)


def read_file(path: Path) -> tuple[Key, ...]:
    """The keys in a file, which is JSON or YAML.

    Raises:
        ConfigError: the file can't be read, is no regular file, users other than its owner may write it, or it is
            invalid.
    """
    raw, mode = require_regular(FIELD, path, fix=f"`headwater keys add NAME --file {path}` creates it")
    if mode & 0o022:
        reason = f"expected a file that only its owner may write, got mode {mode:04o}"
        why = "anyone with write access could grant themselves a key"
        raise ConfigError(f"{path}: {reason}: {why}", field=FIELD, fix=f"chmod 600 {path}")
    try:
        return _parsed(raw.decode(), FIELD, f"{path}: ")
    except UnicodeDecodeError as error:
        reason = f"{path}: expected UTF-8 text: {error.reason} at byte {error.start}"
        raise ConfigError(reason, field=FIELD) from error


def change_file(path: Path, change: Callable[[Sequence[Key]], Sequence[Key]]) -> None:
    """Change or create a file of keys. A server that reads it meanwhile gets either the old or the new content.

    Args:
        path: the file; it becomes JSON, readable by its owner only.
        change: takes the present keys, and returns the new keys.

    Raises:
        ConfigError: the file can't be read or written, or is invalid before or after the change.
    """
    try:
        with _locked(path.parent):
            before = read_file(path) if path.exists() else ()
            content = {"keys": msgspec.to_builtins(tuple(change(before)))}
            read_keys(content, str(path))
            _replace(path.resolve(), json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from error


def _parsed(text: str, field: str, place: str = "") -> tuple[Key, ...]:
    # JSON, as `headwater keys` writes it, is YAML too, but reading a thousand keys as YAML would block for a second.
    with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return read_keys(msgspec.json.decode(text), field, place)
    try:
        # Every scalar stays text: YAML would turn `created` into a date, and fail at an impossible one.
        content = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        # The error's text is left out, because it quotes the line.
        position = getattr(error, "problem_mark", None)
        got = "something else" if position is None else f"something else at line {position.line + 1}"
    except RecursionError:
        got = "something nested too deeply"
    else:
        return read_keys(content, field, place, is_text=True)
    raise ConfigError(f"{place}expected JSON or YAML, got {got}", field=field)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevent concurrent commands from overwriting each other's changes. The folder is locked, because the file itself
    is replaced."""
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
