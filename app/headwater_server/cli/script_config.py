"""Configurations with PyTriton scripts. A script's settings become the fields that the configuration doesn't set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import Problem
from headwater.reference import kind_and_path, script_and_name
from headwater.user_folders import module_named_headwater
from headwater_server.cli.default_python import DefaultPython, default_python
from headwater_server.config.content import config_content
from headwater_server.config.reader import is_model_reference, load_what, read_config
from headwater_server.config.schema import Config, Deployment
from headwater_server.config.sections import OWN_PYTHON
from headwater_server.errors import ConfigError
from headwater_server.supervisor.script_settings import KIND, Scripts, scripts_of

__all__ = ["LoadedConfig", "load_with_scripts"]


class LoadedConfig(NamedTuple):
    """The configuration that a command names, with its folders, warnings and Python."""

    config: Config
    user_paths: tuple[str, ...]
    """Folders of the user's modules; the first is the working folder."""
    warnings: list[str]
    """Warnings about the scripts, for example about settings that Headwater ignores."""
    python: DefaultPython


def load_with_scripts(source: str, *, flags: Mapping[str, Any], python: str | None = None) -> LoadedConfig:
    """Read the configuration or model that a command names, as `headwater_server.config.reader.load_what` does, and run
    its PyTriton scripts, each in a separate process.

    ``pytriton:SCRIPT`` alone becomes a deployment for each model that the script binds.

    Args:
        source: a YAML file or a model.
        flags: fields that override the file, by dotted path.
        python: the value of ``--python``; see `default_python`.

    Raises:
        ConfigError: a field is invalid, the script that ``source`` names can't be served, or a user's module is named
            ``headwater``.
    """
    kind, path = kind_and_path(source) if is_model_reference(source) else ("", "")
    if kind == KIND:
        paths: tuple[str, ...] = (os.getcwd(),)
        of_python = {name: value for name, value in flags.items() if name == "python"}  # other flags name models
        alone = read_config({"deployments": {KIND: {"model": source}}}, source=source, environment={}, flags=of_python)
        config, chosen = _with_python(alone, python, paths)
        scripts = Scripts(paths)
        content = _content(scripts, config.deployments[KIND], path)
        config = read_config({**content, "python": config.python}, source=source, flags=flags)
    else:
        config, paths = load_what(source, flags=flags)
        config, chosen = _with_python(config, python, paths)
        scripts = Scripts(paths)
    _refuse_own_name(config, paths)
    deployments = {name: deployment for name, deployment in config.deployments.items() if any(scripts_of(deployment))}
    if deployments:
        scripts.run(deployments.values())
        whole = config_content(config)
        whole["deployments"] |= {name: scripts.laid_under(deployment) for name, deployment in deployments.items()}
        config = read_config(whole, source=source, environment={}, flags={})
    return LoadedConfig(config, paths, scripts.warnings(), chosen)


def _with_python(config: Config, option: str | None, paths: tuple[str, ...]) -> tuple[Config, DefaultPython]:
    """Give the default Python to the deployments that name no Python. Returns the changed configuration and that
    default."""
    chosen = default_python(config, option, Path(paths[-1]), os.environ)
    if chosen.path in (OWN_PYTHON, config.python):
        return config, chosen
    content = config_content(config) | {"python": str(chosen.path)}
    return read_config(content, source=chosen.why, environment={}, flags={}), chosen


def _refuse_own_name(config: Config, paths: tuple[str, ...]) -> None:
    """Check that no module of the user's is named ``headwater``, as the package that models import.

    Raises:
        ConfigError: a module is named ``headwater``.
    """
    places = {"folders of models": list(paths)} | {
        f"deployments.{name}.environment.PYTHONPATH": deployment.environment["PYTHONPATH"].split(os.pathsep)
        for name, deployment in config.deployments.items()
        if "PYTHONPATH" in deployment.environment
    }
    for field, folders in places.items():
        if file := module_named_headwater(folders):
            raise ConfigError(
                f"{field}: expected no module of the name headwater, which is the package that models import, "
                f"got {file}; rename that"
            )


def _content(scripts: Scripts, alone: Deployment, path: str) -> dict[str, Any]:
    """The content of a configuration with all models of a script, or with only the model that ``path`` names.

    Raises:
        ConfigError: the script can't be run, or can't be served.
    """
    script, name = script_and_name(path)
    finding = scripts.finding(alone)
    if isinstance(finding, Problem):
        raise ConfigError(f"{finding.title}: {finding.reason}; {finding.fix}")
    names = [name] if name else list(finding["settings"])
    return {"deployments": {model_name: {"model": f"{KIND}:{script}:{model_name}"} for model_name in names}}
