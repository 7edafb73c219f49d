"""The folder that Triton gets for a repository: links, and the bridge in place of each script."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.wire.host_program import bridge_script
from headwater_server.repository.environments import EnvironmentFault
from headwater_server.repository.model_config import RepositoryModel, models_of
from headwater_server.repository.prepared import prepare
from tests.app.repository.model_folders import EMPTY_SCRIPT, write_model

STAGE = "/stage"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def program_of(model: RepositoryModel) -> str:
    """The host program of a model."""
    return f"/programs/{model.name}.json"


def prepared(repository: Path) -> Path:
    """The folder for Triton."""
    target = repository.parent / "prepared"
    prepare(repository, target, target.with_name("scripts"), STAGE, program_of)
    return target


def test_each_version_has_the_bridge_in_place_of_its_script(repository: Path) -> None:
    folder = write_model(repository / "m", 'backend: "python"', "1", "3")
    target = prepared(repository)
    for version in ("1", "3"):
        script = folder / version / "model.py"
        assert list((target / "m" / version).iterdir()) == [target / "m" / version / "model.py"]
        assert (target / "m" / version / "model.py").read_text() == bridge_script(
            STAGE, "/programs/m.json", str(script)
        )
        assert script.read_text() == EMPTY_SCRIPT


def test_the_bridge_is_python_whatever_the_paths_are(repository: Path) -> None:
    name = 'it\'s "quoted" \\ and {braced}'
    write_model(repository / name, None, "1")
    text = (prepared(repository) / name / "1" / "model.py").read_text()
    compile(text, "model.py", "exec")
    assert repr(str(repository / name / "1" / "model.py")) in text


def test_other_files_of_a_model_are_links(repository: Path) -> None:
    folder = write_model(repository / "m", 'backend: "python"', "1")
    (folder / "labels.txt").write_text("cat\ndog\n")
    (folder / "configs").mkdir()
    (folder / "01").mkdir()
    target = prepared(repository) / "m"
    assert sorted(path.name for path in target.iterdir()) == ["01", "1", "config.pbtxt", "configs", "labels.txt"]
    for name in ("01", "config.pbtxt", "configs", "labels.txt"):
        assert (target / name).is_symlink()
        assert (target / name).samefile(folder / name)


def test_only_the_chosen_models_are_in_it(repository: Path) -> None:
    for name in ("a", "b", "c"):
        write_model(repository / name, 'backend: "python"', "1")
    target = repository.parent / "prepared"
    models = prepare(repository, target, target.with_name("scripts"), STAGE, program_of, ("c", "a"))
    assert [model.name for model in models] == sorted(path.name for path in target.iterdir()) == ["a", "c"]


def test_models_of_other_backends_are_links(repository: Path) -> None:
    write_model(repository / "graph", 'platform: "ensemble"', "1")
    write_model(repository / "engine", 'backend: "tensorrt"')
    target = prepared(repository)
    for name in ("graph", "engine"):
        assert (target / name).is_symlink()
        assert (target / name).samefile(repository / name)


@pytest.mark.parametrize(
    ("backend", "file", "kind"),
    [("onnxruntime", "model.onnx", "OnnxFile"), ("pytorch", "net.pt", "TorchScriptFile")],
)
def test_a_file_becomes_a_model_of_the_python_backend(repository: Path, backend: str, file: str, kind: str) -> None:
    config = f'backend: "{backend}" max_batch_size: 4 default_model_filename: "{file}"'
    folder = write_model(repository / "m", config, "1", script=file)
    target = prepared(repository)
    (model,) = models_of(target)
    assert (model.backend, model.file, model.config.max_batch_size) == ("python", "model.py", 4)
    script = target.with_name("scripts") / "m" / "1" / "model.py"
    assert (target / "m" / "1" / "model.py").read_text() == bridge_script(STAGE, "/programs/m.json", str(script))
    assert f"class TritonPythonModel({kind}):\n    path = {str(folder / '1' / file)!r}" in script.read_text()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("no configuration", "config.pbtxt: "),
        ('backend: "python" default_model_filename: "sub/model.py"', "expected the name of a file"),
        ('backend: "python" default_model_filename: "../../outside.py"', "expected the name of a file"),
    ],
)
def test_the_code_of_a_model_with_a_problem_never_runs_in_triton(repository: Path, config: str, expected: str) -> None:
    write_model(repository / "m", config, "1")
    target = prepared(repository)
    names: dict[str, type] = {}
    exec((target / "m" / "1" / "model.py").read_text(), names)
    with pytest.raises(RuntimeError, match=expected):
        names["TritonPythonModel"]().initialize({})
    assert sorted(path.name for path in (target / "m").iterdir()) == ["1", "config.pbtxt"]
    assert "default_model_filename" not in (target / "m" / "config.pbtxt").read_text()


def test_a_version_without_a_script_fails_to_load_and_says_why(repository: Path) -> None:
    folder = write_model(repository / "m", 'backend: "python"', "1")
    (folder / "2").mkdir()
    names: dict[str, type] = {}
    exec((prepared(repository) / "m" / "2" / "model.py").read_text(), names)
    with pytest.raises(RuntimeError, match=r"version 2 has no model\.py"):
        names["TritonPythonModel"]().initialize({})


def test_another_file_name_of_the_script_stays(repository: Path) -> None:
    write_model(repository / "m", 'backend: "python" default_model_filename: "other.py"', "1", script="other.py")
    (script,) = (prepared(repository) / "m" / "1").iterdir()
    assert script.name == "other.py"
    assert "BridgedModel" in script.read_text()


def test_the_environments_parameter_is_left_out_and_the_others_stay(repository: Path) -> None:
    config = """
    backend: "python"
    parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/environment" } }
    parameters { key: "other" value { string_value: "kept" } }
    """
    original = write_model(repository / "m", config, "1") / "config.pbtxt"
    (model,) = models_of(prepared(repository))
    assert {name: value.string_value for name, value in model.config.parameters.items()} == {"other": "kept"}
    assert model.config.backend == "python"
    assert original.read_text() == config


def test_a_model_whose_environment_is_unfit_fails_to_load_and_the_others_stay(repository: Path) -> None:
    write_model(repository / "m", 'backend: "python"', "1")
    write_model(repository / "other", 'backend: "python"', "1")

    def unfit(model: RepositoryModel) -> str:
        if model.name == "m":
            raise EnvironmentFault("it's unfit")
        return program_of(model)

    target = repository.parent / "prepared"
    models = prepare(repository, target, target.with_name("scripts"), STAGE, unfit)
    assert [model.name for model in models] == ["m", "other"]
    names: dict[str, type] = {}
    exec((target / "m" / "1" / "model.py").read_text(), names)
    with pytest.raises(RuntimeError, match="it's unfit"):
        names["TritonPythonModel"]().initialize({})
    assert "BridgedModel" in (target / "other" / "1" / "model.py").read_text()


def test_a_target_that_is_there_is_refused(repository: Path) -> None:
    prepared(repository)
    with pytest.raises(FileExistsError):
        prepared(repository)
