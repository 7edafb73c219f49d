"""What becomes of each field of a configuration, and each reason why a model can't be served."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from headwater.errors import Problem
from headwater_server.repository.config_fields import HONOURED, IGNORED, REFUSED, ignored_in, problems_of, step_problems
from headwater_server.repository.model_config import models_of
from tests.app.repository.model_folders import write_model

FIELDS = [field.name for field in ModelConfig.DESCRIPTOR.fields]
PYTHON = 'backend: "python"\n'


def problems(folder: Path) -> list[Problem]:
    """The problems of the only model of a repository."""
    (model,) = models_of(folder)
    return list(problems_of(model))


def only(folder: Path) -> tuple[str, str]:
    """The reason and the fix of the only problem."""
    (problem,) = problems(folder)
    assert problem.title == "model m"
    assert problem.fix
    return problem.reason, problem.fix


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_honoured_ignored_or_refused(field: str) -> None:
    assert [field in HONOURED, field in IGNORED, field in REFUSED].count(True) == 1


def test_there_are_no_other_fields() -> None:
    assert {*HONOURED, *IGNORED, *REFUSED} == set(FIELDS)
    assert len(HONOURED) == len(set(HONOURED))


@pytest.mark.parametrize(
    "config",
    [
        None,
        PYTHON,
        'name: "m"\nbackend: "python"',
        f"{PYTHON} dynamic_batching {{ }} instance_group [{{ count: 2, kind: KIND_CPU }}]",
        f"{PYTHON} sequence_batching {{ state [{{ input_name: 'i', output_name: 'o' }}] }}",
        'platform: "ensemble"',
    ],
    ids=["none", "python", "named", "batched", "state", "ensemble"],
)
def test_a_model_that_can_be_served_has_no_problem(tmp_path: Path, config: str | None) -> None:
    write_model(tmp_path / "m", config, "1")
    assert problems(tmp_path) == []


def test_a_configuration_that_can_not_be_read_is_the_only_problem(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "broken")
    reason, fix = only(tmp_path)
    assert reason.startswith("config.pbtxt: ")
    assert fix == "correct the file"


def test_a_model_without_a_backend(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "max_batch_size: 1")
    assert only(tmp_path) == (
        "it names no backend, and no version has a model.py or model.onnx or model.pt",
        "set backend in config.pbtxt, or add a version's folder with a model.py",
    )


@pytest.mark.parametrize(
    ("backend", "fix"),
    [
        ("vllm", "vllm:PATH"),
        ("tensorrt", "onnx:PATH"),
        ("tensorflow", "onnx:PATH"),
        ("dali", "write it as a model of the Python backend"),
    ],
)
def test_another_backend_names_what_serves_it(tmp_path: Path, backend: str, fix: str) -> None:
    write_model(tmp_path / "m", f'backend: "{backend}"', "1")
    reason, advice = only(tmp_path)
    assert reason == f"backend {backend}: expected python or onnxruntime or pytorch or ensemble"
    assert fix in advice


@pytest.mark.parametrize("name", ["grün", "a b", "a%b", "a#b"])
def test_a_name_that_no_path_can_have(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / name, PYTHON, "1")
    (problem,) = problems(tmp_path)
    assert problem.reason == f"name: expected ASCII letters, digits and _ . - + @ : , = ~, got {name!r}"


def test_a_name_that_is_not_the_folders(tmp_path: Path) -> None:
    write_model(tmp_path / "m", f'{PYTHON} name: "other"', "1")
    assert only(tmp_path) == ("name: expected m, as its folder, got other", "remove name")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ("model_operations { op_library_filename: 'x' }", "model_operations"),
        ("model_repository_agents { agents [{ name: 'checksum' }] }", "model_repository_agents"),
    ],
)
def test_a_field_that_is_refused(tmp_path: Path, config: str, field: str) -> None:
    write_model(tmp_path / "m", PYTHON + config, "1")
    reason, _ = only(tmp_path)
    assert reason.startswith(f"{field}: not supported: ")
    assert ";" not in reason


def test_a_rate_limiter(tmp_path: Path) -> None:
    write_model(tmp_path / "m", f"{PYTHON} instance_group [{{ rate_limiter {{ priority: 1 }} }}]", "1")
    reason, fix = only(tmp_path)
    assert "instance_group.rate_limiter: not supported" in reason
    assert "instance_group.count" in fix


def test_a_version_without_its_script(tmp_path: Path) -> None:
    (write_model(tmp_path / "m", PYTHON, "1") / "2").mkdir()
    assert only(tmp_path) == ("version 2 has no model.py", "add the file, or remove the folder")


def test_a_model_without_a_version(tmp_path: Path) -> None:
    write_model(tmp_path / "m", PYTHON)
    assert only(tmp_path) == ("it has no version", "make the folder 1, with model.py")


@pytest.mark.parametrize("value", ["relative/path", "/there/is/no/such/environment", ""])
def test_an_environment_that_is_not_there(tmp_path: Path, value: str) -> None:
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}'
    write_model(tmp_path / "m", PYTHON + parameter, "1")
    reason, _ = only(tmp_path)
    assert reason.startswith("parameters.EXECUTION_ENV_PATH: ")


def test_an_environment_in_the_models_folder(tmp_path: Path) -> None:
    parameter = (
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/environment" } }'
    )
    folder = write_model(tmp_path / "m", PYTHON + parameter, "1")
    assert "there is no" in only(tmp_path)[0]
    (folder / "environment").mkdir()
    assert problems(tmp_path) == []


def test_the_state_of_a_decoupled_model(tmp_path: Path) -> None:
    state = "sequence_batching { state [{ input_name: 'i', output_name: 'o' }] }"
    write_model(tmp_path / "m", f"{PYTHON} {state} model_transaction_policy {{ decoupled: true }}", "1")
    reason, fix = only(tmp_path)
    assert "sequence_batching.state" in reason
    assert "sequence" in fix


def test_all_problems_of_a_model_are_named(tmp_path: Path) -> None:
    config = 'backend: "dali" name: "other" model_operations { op_library_filename: "x" }'
    write_model(tmp_path / "m", config, "1")
    assert len(problems(tmp_path)) == 3


def test_fields_without_effect_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m", f"{PYTHON} optimization {{ graph {{ level: 1 }} }} runtime: 'x' max_batch_size: 1", "1")
    (model,) = models_of(tmp_path)
    assert set(ignored_in(model)) == {"optimization", "runtime"}
    assert problems(tmp_path) == []


def test_the_model_of_each_step_of_an_ensemble_must_be_there(tmp_path: Path) -> None:
    steps = "".join(f'step {{ model_name: "{name}" }}' for name in ("a", "b", "b", "c"))
    write_model(tmp_path / "e", f'platform: "ensemble"\nensemble_scheduling {{ {steps} }}', "1")
    write_model(tmp_path / "a", PYTHON, "1")
    found = list(step_problems(list(models_of(tmp_path))))
    assert [problem.title for problem in found] == ["model e", "model e"]
    assert [problem.reason[-3:] for problem in found] == ["'b'", "'c'"]
    assert found[0] == Problem(
        "model e",
        "ensemble_scheduling.step: expected models that this deployment serves, got 'b'",
        "add the model to options.models, or its folder",
    )
