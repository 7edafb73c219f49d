"""``headwater check`` of repositories that are split into several deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.check_triton import look_at_repository, name_problems
from headwater_server.config.schema import Deployment
from tests.repositories import write_repository

PYTHON = 'backend: "python"'
ENSEMBLE = 'platform: "ensemble"\nensemble_scheduling { step { model_name: "a" } }'


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """A repository with the models a, b, and an ensemble of a."""
    write_repository(tmp_path, {"a": (PYTHON, "pass"), "b": (PYTHON, "pass"), "e": (ENSEMBLE, "")})
    return f"triton:{tmp_path}"


def reasons(repository: str, **options: Any) -> list[str]:
    """The problems of a deployment with these options."""
    deployment = Deployment.model_validate({"model": repository, "options": options})
    return [f"{problem.title}: {problem.reason}" for problem in look_at_repository("d", deployment, ()).problems]


def test_only_the_chosen_models_are_looked_at(repository: str) -> None:
    deployment = Deployment.model_validate({"model": repository, "options": {"models": ["a", "e"]}})
    look = look_at_repository("d", deployment, ())
    assert look.signature is not None
    assert look.signature.triton is not None
    assert look.signature.triton.models == ("a", "e")
    assert len(look.notes) == 2
    assert reasons(repository) == []


def test_a_name_that_the_repository_lacks_is_a_problem(repository: str) -> None:
    (reason,) = reasons(repository, models=["a", "c"])
    assert reason.startswith("deployment d: options.models: expected models of ")
    assert reason.endswith("which are a, b, e, got 'c'")
    assert reasons(repository, model_control="explicit", load_models=["a", "c"]) == [
        "deployment d: options.load_models: expected models of the repository, got 'c'"
    ]
    assert reasons(repository, model_control="explicit", load_models=["*"]) == []


def test_an_ensemble_without_its_steps_is_a_problem(repository: str) -> None:
    assert reasons(repository, models=["b", "e"]) == [
        "deployment d, model e: ensemble_scheduling.step: expected models that this deployment serves, got 'a'"
    ]


def test_a_name_belongs_to_one_deployment(repository: str) -> None:
    chosen = {"x": ["a", "e"], "y": ["b"], "z": ["a"], "b": ["e"]}
    deployments = {
        name: Deployment.model_validate({"model": repository, "options": {"models": models}})
        for name, models in chosen.items()
    }
    looks = {name: look_at_repository(name, deployment, ()) for name, deployment in deployments.items()}
    signatures = {name: look.signature for name, look in looks.items() if look.signature is not None}
    assert [f"{problem.title}: {problem.reason}" for problem in name_problems(deployments, signatures)] == [
        "deployment y: its model `b` has the name of the deployment `b`",
        "deployment z: its model `a` has the name of a model of the deployment `x`",
    ]
    del deployments["z"], deployments["b"]
    assert list(name_problems(deployments, signatures)) == []
