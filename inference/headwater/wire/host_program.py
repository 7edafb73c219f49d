"""How the hosts of a Triton model repository's ``model.py`` files are started, for the bridge in Triton's stub.

Like `headwater.wire.bridge`, it imports only the standard library.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

__all__ = ["HostProgram", "bridge_script", "file_script"]


class HostProgram(NamedTuple):
    """How the hosts of a replica are started."""

    python: str
    """Path of the interpreter."""
    stage: str
    """A folder with the package ``headwater``."""
    environment: dict[str, str]
    """The environment's variables."""
    working_folder: str
    output: str
    """Path of a file or pipe that gets what models print."""
    instances: str
    """A folder in which each instance that is loaded has a file, named by its stub's process id."""
    metrics: str
    """Path of a unix socket at which models declare and count metrics."""
    states: str
    """A folder with the states of sequences, of all replicas of the deployment."""
    server: str
    """The server's folder, with the files of `headwater.wire.open_requests`."""
    max_compute_s: float | None = None
    """Limit of a call of ``execute`` in seconds; None: no limit."""
    strict_outputs: bool = False
    """Whether an output that contradicts the configuration is an error."""

    @classmethod
    def read(cls, path: str) -> HostProgram:
        """Read the file that `write` wrote."""
        with open(path, encoding="utf-8") as file:
            return cls(**json.load(file))

    def write(self, path: str) -> None:
        """Write a file for `read`, which only this user can read: an environment may have secrets."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(self._asdict(), file)


def bridge_script(stage: str, program: str, script: str) -> str:
    """The ``model.py`` for Triton in place of a user's.

    Args:
        stage: a folder with the package ``headwater``.
        program: path of a file that `HostProgram.write` wrote.
        script: path of the user's ``model.py``.
    """
    return f"""\
import sys

sys.path.insert(0, {stage!r})

from headwater.triton.stub_bridge import BridgedModel
from headwater.wire.host_program import HostProgram


class TritonPythonModel(BridgedModel):
    program = HostProgram.read({program!r})
    script = {script!r}
"""


def file_script(backend: str, path: str) -> str:
    """The ``model.py`` of a file, for the model's host.

    Args:
        backend: ``onnxruntime`` or ``pytorch``.
        path: the file.
    """
    name = {"onnxruntime": "OnnxFile", "pytorch": "TorchScriptFile"}[backend]
    return f"""\\
from headwater.triton.file_models import {name}


class TritonPythonModel({name}):
    path = {path!r}
"""
