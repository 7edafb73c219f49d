"""Configurations with PyTriton scripts, whose fields are the script's where the configuration doesn't set them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from app.config.schema import Config, Deployment, is_model_reference, load_what, read_config, read_yaml
from app.errors import ConfigError
from app.process.interpreter import InterpreterError
from app.process.model_side import PROCESS_TIMEOUT_S, ModelSide, last_line
from inference.errors import Problem
from inference.reference import kind_and_path, script_and_name

__all__ = ["Loaded", "load_with_scripts"]

KIND = "pytriton"


class Loaded(NamedTuple):
    """What a command names."""

    config: Config
    user_paths: tuple[str, ...]
    warnings: list[str]
    """What the scripts ask for in vain."""


def load_with_scripts(what: str, *, flags: Mapping[str, Any]) -> Loaded:
    """Read what a command names, as `app.config.schema.load_what` does, and run the PyTriton scripts in it.

    ``pytriton:SCRIPT`` alone becomes a deployment for each model that the script binds.

    Raises:
        ConfigError: a field is invalid, or the only script can't be served.
    """
    here = os.getcwd()
    kind, path = kind_and_path(what) if is_model_reference(what) else ("", "")
    if kind != KIND:
        config, paths = load_what(what, flags=flags)
        if not any(_is_script(one) for one in config.deployments.values()):
            return Loaded(config, paths, [])
        content = {"deployments": {}} if is_model_reference(what) else read_yaml(Path(what))
        return _laid(config, content, what, paths, flags, {})
    alone = {"deployments": {KIND: {"model": what}}}
    deployment = read_config(alone, source=what, environment={}, flags={}).deployments[KIND]
    script, name = script_and_name(path)
    finding = _run(deployment, (here,))
    if isinstance(finding, Problem):
        raise ConfigError(f"{finding.title}: {finding.reason}; {finding.fix}")
    names = [name] if name else list(finding["settings"])
    content = {"deployments": {one: {"model": f"{KIND}:{script}:{one}"} for one in names}}
    config = read_config(content, source=what, flags=flags)
    return _laid(config, content, what, (here,), flags, {_key(deployment): finding})


def _laid(
    config: Config,
    content: dict[str, Any],
    source: str,
    paths: tuple[str, ...],
    flags: Mapping[str, Any],
    found: dict[object, dict[str, Any] | Problem],
) -> Loaded:
    """The configuration, laid over what its scripts set. A script that fails sets nothing: its replicas say why."""
    sections = dict(content["deployments"])
    warnings: dict[str, None] = {}
    for name, deployment in config.deployments.items():
        if not _is_script(deployment):
            continue
        key = _key(deployment)
        if key not in found:
            found[key] = _run(deployment, paths)
        finding = found[key]
        if isinstance(finding, Problem):
            continue
        warnings.update(dict.fromkeys(f"{_script_of(deployment)[0]}: {text}" for text in finding["warnings"]))
        bound = _script_of(deployment)[1] or next(iter(finding["settings"]))
        settings = finding["settings"].get(bound, {})
        section = sections.get(name) or {}
        batching = {**settings.get("batching", {}), **(section.get("batching") or {})}
        sections[name] = {**settings, **section, "batching": batching}
    return Loaded(read_config({**content, "deployments": sections}, source=source, flags=flags), paths, list(warnings))


def _script_of(deployment: Deployment) -> tuple[str, str]:
    """A deployment's script, and the name of its model there."""
    return script_and_name(kind_and_path(deployment.model or "")[1])


def _is_script(deployment: Deployment) -> bool:
    return kind_and_path(deployment.model or "")[0] == KIND


def _key(deployment: Deployment) -> object:
    """Equal for deployments that run the same script in the same way."""
    arguments = str(deployment.options.get("arguments"))
    return _script_of(deployment)[0], arguments, deployment.python, frozenset(deployment.environment.items())


def _run(deployment: Deployment, paths: Sequence[str]) -> dict[str, Any] | Problem:
    """The fields of an `inference.replica.bindings.ScriptFinding`, or why there are none."""
    script = _script_of(deployment)[0]
    title = f"model {KIND}:{script}"
    request = {
        "path": script,
        "arguments": deployment.options.get("arguments", []),
        "search": list(paths),
        "working_dir": paths[0],
    }
    try:
        with ModelSide(deployment.environment, deployment.python) as side:
            status, output, errors = side.run("inference.replica.bindings", msgspec.json.encode(request))
    except InterpreterError as error:
        return Problem(title, error.reason, error.fix)
    if status != 0:
        how = f"took more than {PROCESS_TIMEOUT_S:g} s" if status is None else f"ended the process with status {status}"
        said = f": {last_line(errors)}" if errors.strip() else ""
        return Problem(title, f"running it up to serve() {how}{said}", "load in the script only what it serves")
    finding: dict[str, Any] = msgspec.json.decode(output)
    return finding if finding["problem"] is None else Problem(**finding["problem"])
