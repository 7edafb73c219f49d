"""The configuration: one YAML file, overridden by the environment, overridden by flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.errors import ConfigError

__all__ = ["Batching", "Config", "Deployment", "Server", "load_config", "read_config"]

ENVIRONMENT_PREFIX = "HEADWATER_"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")

PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Batching(_Section):
    """How the gateway coalesces rows of concurrent requests."""

    max_batch_size: PositiveInt = 32
    """Rows in one call of the model, at most."""
    max_queue_delay_ms: Annotated[float, Field(ge=0, le=60_000)] = 0
    """How long rows may wait for company although the replica is idle."""
    max_queue_size: PositiveInt = 1024
    """Rows that may wait; more are refused with 429."""
    max_in_flight: PositiveInt = 2
    """Calls that a replica may have at once: one computes, the others are on their way."""


class Deployment(_Section):
    """One served name."""

    model: str
    """``module:Class`` of an `inference.Model`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class's constructor."""
    batching: Batching = Field(default_factory=Batching)
    timeout_s: PositiveSeconds = 30
    """A request's deadline, queueing included; a request may ask for less."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:N`` or ``auto``: the first GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of torch and of its math libraries; default: as many as the machine has cores."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that the replica gets besides the supervisor's own."""
    tensor_store: Literal["auto", "on", "off"] = "auto"
    """Whether tensors go through PyTriton's shared-memory store: faster for large ones, slower for small ones."""
    warmup_batch_sizes: tuple[PositiveInt, ...] | None = None
    """Batch sizes to warm up; default: powers of two up to ``max_batch_size``. Empty: no warm-up."""
    load_timeout_s: PositiveSeconds = 600
    """How long a replica may take from its start to ready."""

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: str) -> str:
        if not _MODEL.match(value):
            raise ValueError("expected module:Class such as my_package.models:Scale")
        return value

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("expected auto, cpu, cuda or cuda:N")
        return value

    @field_validator("environment", mode="before")
    @classmethod
    def _stringify(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: str(item) if isinstance(item, (int, float)) else item for key, item in value.items()}
        return value


class Server(_Section):
    """The gateway and the supervisor."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """0 takes a free one."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes. Limits in this file are totals; each worker holds an equal share."""
    max_body_bytes: Annotated[int, Field(ge=1_000)] = 64 * 1024 * 1024
    """Of a request, and of what a compressed one unpacks to."""
    body_timeout_s: PositiveSeconds = 30
    """How long a request's body may take to arrive."""
    shutdown_timeout_s: PositiveSeconds = 30
    """How long requests in flight may take to finish after SIGTERM."""
    runtime_dir: Path | None = None
    """Where sockets, workspaces and temporary files go: in a folder of its own inside this one, which must allow
    execution. Default: the system's folder for temporary files."""
    access_log: bool = True


class Config(_Section):
    """The whole configuration."""

    server: Server = Field(default_factory=Server)
    deployments: Annotated[dict[str, Deployment], Field(min_length=1)]

    @field_validator("deployments")
    @classmethod
    def _check_names(cls, value: dict[str, Deployment]) -> dict[str, Deployment]:
        for name in value:
            if not _NAME.match(name):
                raise ValueError(
                    f"deployment name {name!r}: expected letters, digits, '_', '.' or '-', at most 100 characters"
                )
        return value


def load_config(path: Path, *, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any]) -> Config:
    """Read a YAML file and lay the environment and the flags over it.

    Raises:
        ConfigError: the file can't be read, or a field is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    return read_config(content, source=str(path), environment=environment, flags=flags)


def read_config(
    content: object,
    *,
    source: str,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any],
) -> Config:
    """Check a configuration that is already parsed, with the environment and the flags laid over it.

    Args:
        content: what the YAML file held.
        source: named in messages.
        environment: variables such as ``HEADWATER_SERVER__PORT=9000``: the path of a field in capitals or as it is,
            its parts joined by two underscores; values are parsed as YAML. Default: the process's own.
        flags: dotted path to value, such as ``{"server.port": 9000}``.

    Raises:
        ConfigError: a field is wrong; the message names it, what was expected and what came.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected a mapping with `deployments`, got {type(content).__name__}")
    merged: dict[str, Any] = _copy(content)
    overrides: dict[tuple[str, ...], str] = {}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            path = name[len(ENVIRONMENT_PREFIX) :].split("__")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"environment variable {name}: not valid YAML: {text!r}") from error
            overrides[_set(merged, path, value, where=f"environment variable {name}")] = f"environment variable {name}"
    for dotted, value in flags.items():
        overrides[_set(merged, dotted.split("."), value, where=f"flag {dotted}")] = f"flag {dotted}"
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        lines = [_describe(detail, overrides) for detail in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from None


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _set(tree: dict[str, Any], path: list[str], value: object, *, where: str) -> tuple[str, ...]:
    """Set a nested field; a part matches an existing key, or a field's lower-case name, whatever its case.

    Returns the field's path as it is in the tree.
    """
    matched = []
    for part in path[:-1]:
        part = _match(tree, part)
        matched.append(part)
        branch = tree.setdefault(part, {})
        if branch is None:
            branch = tree[part] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"{where}: `{part}` is no section")
        tree = branch
    last = _match(tree, path[-1])
    tree[last] = value
    return (*matched, last)


def _match(tree: Mapping[str, Any], part: str) -> str:
    return next((key for key in tree if isinstance(key, str) and key.lower() == part.lower()), part.lower())


def _describe(detail: Any, overrides: Mapping[tuple[str, ...], str]) -> str:
    location = tuple(str(part) for part in detail["loc"])
    where = ".".join(location) or "configuration"
    for path, source in overrides.items():
        # What came from outside the file, or stands beside what did and is missing because of it.
        if path[: len(location)] == location or path[: len(location) - 1] == location[:-1] != ():
            return f"{_text(detail, where)} ({source} is laid over it)"
    return _text(detail, where)


def _text(detail: Any, where: str) -> str:
    if detail["type"] == "extra_forbidden":
        return f"`{where}`: unknown field"
    if detail["type"] == "missing":
        return f"`{where}`: required, but missing"
    message = str(detail["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    got = repr(detail["input"])
    return f"`{where}`: {message}, got {got if len(got) <= 80 else got[:77] + '...'}"
