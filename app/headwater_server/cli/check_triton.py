"""``headwater check`` for a Triton model repository: its models, and why one can't be served, without a start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from headwater.errors import LoadError, Problem
from headwater.reference import find_folder
from headwater.signature import Signature, TritonSpec
from headwater_server.cli.look import Look
from headwater_server.config.schema import Deployment
from headwater_server.process.interpreter import InterpreterError, ask_interpreter

__all__ = ["look_at_repository", "name_problems"]


def look_at_repository(name: str, deployment: Deployment, path: tuple[str, ...]) -> Look:
    """Look at a deployment of a model repository. Relative paths are searched in the folders of ``path``."""
    # The modules take a tenth of a second to import.
    from headwater_server.repository.config_fields import ignored_in, problems_of, step_problems
    from headwater_server.repository.model_config import models_of

    title, options = f"deployment {name}", deployment.checked_options
    python: dict[str, Any] = {}
    if deployment.interpreter is not None:
        python = {"path": os.path.abspath(deployment.interpreter), "versions": {}}
        try:
            report = ask_interpreter(python["path"], {**os.environ, **deployment.environment}, _VERSIONS)
            python["versions"] = report["versions"]
        except InterpreterError as error:
            return Look(python, None, [Problem(title, f"the models' Python, {error.path}: {error.reason}", error.fix)])
        if "numpy" not in python["versions"]:
            fix = f"{python['path']} -m pip install numpy"
            return Look(python, None, [Problem(title, f"the models' Python, {python['path']}: numpy is missing", fix)])
    try:
        models = list(models_of(find_folder(deployment.model or "", path), options["models"]))
    except LoadError as error:
        problem = error.problem
        return Look(python, None, [Problem(title, f"{problem.title}: {problem.reason}", problem.fix)])
    of_models = [problem for model in models for problem in problems_of(model)]
    problems = [
        Problem(f"{title}, {problem.title}", problem.reason, problem.fix)
        for problem in (*of_models, *step_problems(models))
    ]
    for missing in sorted({*options["load_models"]} - {"*", *(model.name for model in models)}):
        reason = f"options.load_models: expected models of the repository, got {missing!r}"
        problems.append(Problem(title, reason, "correct the name, or add the model's folder"))
    if not models:
        problems.append(
            Problem(title, "the repository has no models", "name the folder that has a folder for each model")
        )
    width = max((len(model.name) for model in models), default=0)
    notes = []
    for model in models:
        versions = ", ".join(version.name for version in model.versions) or "none"
        ignored = ignored_in(model)
        without = f"; without effect: {', '.join(ignored)}" if ignored else ""
        batch = model.config.max_batch_size
        notes.append(
            f"model {model.name:<{width}}  {model.backend or '?'}, versions {versions}, "
            f"{f'at most {batch} rows' if batch else 'no batches'}{without}"
        )
    signature = Signature(name, (), (), triton=TritonSpec(tuple(model.name for model in models)))
    return Look(python, None if problems else signature, problems, tuple(notes))


def name_problems(deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]) -> Iterator[Problem]:
    """A problem for each model of a repository whose name something else has.

    Args:
        deployments: all deployments by name.
        signatures: what `look_at_repository` has of them.
    """
    taken = {name: f"the deployment `{name}`" for name in deployments}
    for name, deployment in deployments.items():
        taken |= dict.fromkeys(deployment.adapters, f"an adapter of the deployment `{name}`")
    for name in deployments:
        triton = signatures[name].triton if name in signatures else None
        for model in () if triton is None else triton.models:
            if model in taken:
                fix = "rename the folder or the deployment, or choose each deployment's models by options.models"
                yield Problem(f"deployment {name}", f"its model `{model}` has the name of {taken[model]}", fix)
            taken.setdefault(model, f"a model of the deployment `{name}`")


_VERSIONS = """
import sys
report = {"versions": {"python": ".".join(map(str, sys.version_info[:3]))}}
try:
    import numpy
    report["versions"]["numpy"] = numpy.__version__
except ImportError:
    pass
"""
