"""Prepares a model repository for the Triton of a replica: a folder of links to the repository's files.

Only what must differ is written: in place of each ``model.py`` stands the bridge to the model's host
(`headwater.triton.stub_bridge`), and a configuration lacks what concerns the model's Python. A model of the onnxruntime
or pytorch backend becomes a model of the Python backend, with a ``model.py`` that runs the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from headwater.wire.host_program import bridge_script, file_script
from headwater_server.repository.environments import EnvironmentFault
from headwater_server.repository.model_config import (
    CONFIG_FILE,
    ENVIRONMENT,
    FILES,
    SCRIPT,
    RepositoryModel,
    models_of,
    write_config,
)

__all__ = ["ProgramOf", "prepare"]

PYTHON: Final = "python"
_REFUSAL: Final = """\
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError({message!r})
"""
"""The ``model.py`` of a version that can't be loaded: without a file, Triton would wait for its stub forever."""

ProgramOf = Callable[[RepositoryModel], str]
"""Returns the path of a model's host program, see `bridge_script`; raises `EnvironmentFault`."""


def prepare(
    repository: Path,
    target: Path,
    scripts: Path,
    stage: str,
    program_of: ProgramOf,
    names: Collection[str] = (),
) -> list[RepositoryModel]:
    """Make the folder for Triton. Returns the models in it.

    Args:
        repository: the model repository.
        target: the folder to make.
        scripts: the folder to make for scripts that run files.
        stage: see `bridge_script`.
        program_of: finds the host program of a model.
        names: the models that Triton sees; empty: all.

    Raises:
        OSError: the repository can't be read, or the folder not written.
        LoadError: see `models_of`.
    """
    target.mkdir()
    models = list(models_of(repository, names))
    for model in models:
        if model.problem:
            _refuse_model(model, target / model.name)
        elif model.backend in FILES:
            _prepare_model(model, target / model.name, scripts / model.name, stage, program_of)
        else:
            (target / model.name).symlink_to(model.folder)
    return models


def _refuse_model(model: RepositoryModel, target: Path) -> None:
    """Have Triton fail to load a model with a `RepositoryModel.problem`: its code must not run in Triton's stub."""
    target.mkdir()
    for version in model.versions:
        (target / version.name).mkdir()
        text = _REFUSAL.format(message=model.problem)
        (target / version.name / SCRIPT).write_text(text, encoding="utf-8")
    if model.config.ListFields():
        config = type(model.config)()
        config.CopyFrom(model.config)
        config.ClearField("default_model_filename")
        write_config(config, target / CONFIG_FILE)
    else:
        (target / CONFIG_FILE).symlink_to(model.folder / CONFIG_FILE)


def _prepare_model(model: RepositoryModel, target: Path, scripts: Path, stage: str, program_of: ProgramOf) -> None:
    target.mkdir()
    program, fault = "", ""
    try:
        program = program_of(model)
    except EnvironmentFault as error:
        fault = str(error)
    is_file = model.backend != PYTHON
    is_changed = is_file or ENVIRONMENT in model.config.parameters
    versions = set(model.versions)
    for path in model.folder.iterdir():
        if path in versions:
            file = path / model.file
            why = fault or ("" if file.exists() else f"version {path.name} has no {model.file}")
            script = file
            if is_file and not why:
                script = scripts / path.name / SCRIPT
                script.parent.mkdir(parents=True)
                script.write_text(file_script(model.backend, str(file)), encoding="utf-8")
            text = _REFUSAL.format(message=why) if why else bridge_script(stage, program, str(script))
            (target / path.name).mkdir()
            (target / path.name / (SCRIPT if is_file else model.file)).write_text(text, encoding="utf-8")
        elif path.name != CONFIG_FILE or not is_changed:
            (target / path.name).symlink_to(path)
    if is_changed:
        config = type(model.config)()
        config.CopyFrom(model.config)
        config.parameters.pop(ENVIRONMENT, None)
        if is_file:
            config.backend = PYTHON
            config.ClearField("platform")
            config.ClearField("default_model_filename")
        write_config(config, target / CONFIG_FILE)
