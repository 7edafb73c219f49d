"""``headwater check`` for a model that vLLM computes: the environment, the folder and the options, without a start."""

from __future__ import annotations

import os
from typing import Any

from headwater.errors import LoadError, Problem
from headwater.reference import find_folder
from headwater.signature import VllmSpec, text_signature
from headwater_server.cli.look import Look
from headwater_server.config.schema import Deployment
from headwater_server.process.adapter_folders import find_adapters, lora_rank
from headwater_server.process.interpreter import InterpreterError
from headwater_server.process.vllm_program import device_problem, find_vllm, folder_problem, gives_embeddings

__all__ = ["look_at_vllm"]


def look_at_vllm(name: str, deployment: Deployment, path: tuple[str, ...]) -> Look:
    """Look at a deployment that vLLM computes. Relative paths are searched in the folders of ``path``."""
    title = f"deployment {name}"
    python: dict[str, Any] = {"path": os.path.abspath(str(deployment.python)), "versions": {}}
    try:
        environ = {**os.environ, **deployment.environment}
        install = find_vllm(str(deployment.python), environ)
        python["versions"] = {"vllm": install.version}
        folder = find_folder(deployment.model or "", path)
        options = deployment.checked_options
        lora_rank(options, find_adapters(deployment.adapters, path))
        problems = (device_problem(device, environ, options, install) for device in deployment.placements)
        problem = next(filter(None, problems), None) or folder_problem(folder, options, install)
    except InterpreterError as error:
        hint = "" if os.path.exists(error.path) else "; `make vllm-env` creates this environment in .venv-vllm"
        reason = f"the model's Python, {error.path}: {error.reason}"
        return Look(python, None, [Problem(title, reason, f"{error.fix}{hint}")])
    except LoadError as error:
        problem = error.problem
    if problem is not None:
        return Look(python, None, [Problem(title, f"{problem.title}: {problem.reason}", problem.fix)])
    length = -1 if gives_embeddings(folder, options) else 0  # their length is known only after a start
    return Look(python, text_signature(name, folder, vllm=VllmSpec(0, 0, 0, install.version, embedding_length=length)))
