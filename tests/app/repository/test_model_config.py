"""Model repositories are read as Triton reads them; a configuration that can't be read is a problem of its model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import LoadError
from headwater_server.repository import model_config
from headwater_server.repository.model_config import RepositoryModel, models_of, write_config
from tests.app.repository.model_folders import write_model

CONFIG = 'backend: "python"\nmax_batch_size: 4\ninput [{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }]\n'


def only(repository: Path) -> RepositoryModel:
    """The only model of a repository."""
    (model,) = models_of(repository)
    return model


def test_each_folder_is_a_model_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "c-1.x"):
        write_model(tmp_path / name, CONFIG, "1")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "README.md").write_text("no model")
    models = list(models_of(tmp_path))
    assert [model.name for model in models] == ["a", "b", "c-1.x"]
    assert {(model.problem, model.backend, model.config.max_batch_size) for model in models} == {("", "python", 4)}


def test_models_are_chosen_by_name(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_model(tmp_path / name, CONFIG, "1")
    assert [model.name for model in models_of(tmp_path, ("c", "a"))] == ["a", "c"]
    with pytest.raises(LoadError) as caught:
        list(models_of(tmp_path, ("a", "d")))
    assert str(caught.value) == (
        f"options.models: expected models of {tmp_path}, which are a, b, c, got 'd'; correct the name, or add the "
        "model's folder"
    )


def test_a_link_to_a_folder_is_a_model(tmp_path: Path) -> None:
    elsewhere = write_model(tmp_path / "elsewhere", CONFIG, "1")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(elsewhere)
    model = only(tmp_path / "models")
    assert (model.name, [version.name for version in model.versions]) == ("linked", ["1"])


def test_a_repository_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(models_of(tmp_path / "absent"))


def test_versions_are_the_folders_with_a_number_in_its_order(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", None, "10", "2", "0")
    for name in ("01", "v2", "-1", "1.5", "²", "³", "1e3", ""):
        (folder / name).mkdir(exist_ok=True)
    (folder / "7").write_text("a file")
    assert [version.name for version in only(tmp_path).versions] == ["0", "2", "10"]


def test_a_model_without_a_configuration_has_no_problem(tmp_path: Path) -> None:
    write_model(tmp_path / "m", None, "1")
    model = only(tmp_path)
    assert (model.problem, model.backend, model.file) == ("", "python", "model.py")
    assert not model.config.ListFields()


@pytest.mark.parametrize(
    "config",
    [
        b"backend: ",
        b"unknown_field: 3",
        b"max_batch_size: \"four\"",
        b"max_batch_size: 99999999999",
        b"{" * 100_000,
        b"input { name: \"x\" dims: 1",
        b"\xff\xfe\0",
        b"\0" * 100,
        b"<xml/>",
    ],
    ids=["cut", "field", "type", "range", "deep", "open", "encoding", "zeros", "xml"],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_the_models_problem(tmp_path: Path, config: bytes) -> None:
    folder = write_model(tmp_path / "m", None, "1")
    (folder / "config.pbtxt").write_bytes(config)
    write_model(tmp_path / "fine", CONFIG, "1")
    fine, model = models_of(tmp_path)
    assert fine.problem == ""
    assert model.problem.startswith("config.pbtxt: ")
    assert not model.config.ListFields()


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "", "1")
    os.truncate(folder / "config.pbtxt", 1 << 40)
    assert only(tmp_path).problem == f"config.pbtxt: expected at most {4 << 20} bytes, got {1 << 40}"


def test_a_folder_in_place_of_the_file_is_the_models_problem(tmp_path: Path) -> None:
    (write_model(tmp_path / "m", None, "1") / "config.pbtxt").mkdir()
    assert "directory" in only(tmp_path).problem


@given(st.binary(max_size=200) | st.text(alphabet='abx:"{}[]<>#,\n 01', max_size=60).map(str.encode))
def test_no_file_ends_the_reading(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    repository = tmp_path_factory.mktemp("repository")
    (write_model(repository / "m") / "config.pbtxt").write_bytes(content)
    model = only(repository)
    assert bool(model.problem) <= (not model.config.ListFields())


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ('backend: "onnxruntime"', "onnxruntime"),
        ('platform: "onnxruntime_onnx"', "onnxruntime"),
        ('platform: "pytorch_libtorch"', "pytorch"),
        ('platform: "tensorrt_plan"', "tensorrt"),
        ('platform: "tensorflow_savedmodel"', "tensorflow"),
        ('platform: "ensemble"', "ensemble"),
        ("ensemble_scheduling { step [{ model_name: 'a', model_version: -1 }] }", "ensemble"),
        ('platform: "other"', "other"),
        ('backend: "python" platform: "ensemble"', "python"),
        ("max_batch_size: 1", ""),
    ],
)
def test_the_backend_is_what_triton_would_choose(tmp_path: Path, config: str, backend: str) -> None:
    write_model(tmp_path / "m", config)
    assert only(tmp_path).backend == backend


def test_another_file_name_of_the_script_is_honoured(tmp_path: Path) -> None:
    write_model(tmp_path / "m", 'default_model_filename: "other.py"', "1", script="other.py")
    model = only(tmp_path)
    assert (model.file, model.backend) == ("other.py", "python")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_model(tmp_path / "m", CONFIG)
    config: Any = only(tmp_path).config
    write_model(tmp_path / "copies" / "m")
    write_config(config, tmp_path / "copies" / "m" / model_config.CONFIG_FILE)
    assert only(tmp_path / "copies").config == config
