"""What a user's files and folders are called: no name but Headwater's own keeps a model from being served."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.running import serve

CONSOLE = str(Path(sys.executable).with_name("headwater"))
AS_USERS_DO = ("env", "-u", "PYTHONSAFEPATH", "sh", "-c", 'shift 3; exec "$0" "$@"', CONSOLE)
"""Runs the installed command instead of ``python -m headwater_server``."""
MODEL = """
from headwater import Model, Tensor


class Mine(Model):
    inputs = Tensor("x", "FP32", [1]),
    outputs = Tensor("y", "FP32", [1]),

    def __call__(self, x):
        return {"y": x * FACTOR}
"""
FILES = ("app", "inference", "serve", "models", "utils")
PACKAGES = ("app.serve", "inference.clean", "models.types", "utils.queue", "serve.app")
STANDARD = ("types", "queue")


def model(factor: int) -> str:
    return MODEL.replace("FACTOR", str(factor))


def headwater(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **environment}
    environ.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [CONSOLE, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "others"),
    [
        (FILES, {f"{name}.py": "raise RuntimeError('imported in place of the standard library')" for name in STANDARD}),
        (PACKAGES, {f"{name.partition('.')[0]}/__init__.py": "" for name in PACKAGES}),
        (PACKAGES, {f"{name}/README.md": "" for name in STANDARD}),
    ],
    ids=["files", "packages", "folders without __init__.py"],
)
def test_names_that_others_use_too_are_served(modules: tuple[str, ...], others: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, others)
    write(tmp_path, {f"{name.replace('.', '/')}.py": model(factor) for factor, name in enumerate(modules)})
    deployments = {name.replace(".", "-"): {"model": f"{name}:Mine"} for name in modules}
    with serve({"deployments": deployments}, cwd=tmp_path, prefix=AS_USERS_DO) as running:
        for factor, name in enumerate(deployments):
            answer = running.infer(name, [3], shape=[1, 1], name="x")
            assert answer.status_code == 200, answer.text
            assert answer.json()["outputs"][0]["data"] == [3 * factor]


def test_a_folder_on_the_python_path_with_a_package_app_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"app/__init__.py": "", "inference/__init__.py": "", "mine.py": model(2)})
    assert headwater("--version", cwd=tmp_path, PYTHONPATH=".").stdout.startswith("headwater ")
    checked = headwater("check", "mine:Mine", "--port", "0", cwd=tmp_path, PYTHONPATH=".")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_models_are_found_in_a_relative_folder_on_the_python_path(tmp_path: Path) -> None:
    write(tmp_path, {"src/mine.py": model(2)})
    checked = headwater("check", "mine:Mine", "--port", "0", cwd=tmp_path, PYTHONPATH="src")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", STANDARD)
def test_a_model_in_a_file_that_python_hides_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, {f"{name}.py": model(2)})
    checked = headwater("check", f"{name}:Mine", "--port", "0", cwd=tmp_path)
    assert checked.returncode == 1
    assert f"{name} is a module of Python's standard library" in checked.stdout
    assert "give the file another name" in checked.stdout


@pytest.mark.parametrize("file", ["headwater.py", "headwater/__init__.py"])
class TestHeadwatersOwnName:
    def test_is_refused_beside_a_model(self, file: str, tmp_path: Path) -> None:
        write(tmp_path, {file: "", "mine.py": model(2)})
        for command in ("check", "serve"):
            ended = headwater(command, "mine:Mine", "--port", "0", cwd=tmp_path)
            assert ended.returncode == 1
            said = ended.stdout + ended.stderr
            assert "expected no module of the name headwater" in said
            assert f"got {tmp_path / file}; rename that" in said

    def test_is_refused_on_a_deployments_python_path(self, file: str, tmp_path: Path) -> None:
        write(tmp_path, {f"other/{file}": "", "mine.py": model(2)})
        path = str(tmp_path / "other")
        (tmp_path / "serve.yaml").write_text(
            f"deployments:\n  mine: {{model: mine:Mine, environment: {{PYTHONPATH: {path}}}}}\n"
        )
        checked = headwater("check", "serve.yaml", cwd=tmp_path)
        assert checked.returncode == 1
        assert "deployments.mine.environment.PYTHONPATH: expected no module" in checked.stdout + checked.stderr

    def test_is_refused_on_the_python_path(self, file: str, tmp_path: Path) -> None:
        write(tmp_path, {file: ""})
        ended = headwater("--version", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert ended.returncode == 1
        assert ended.stderr.startswith("headwater: expected Headwater's package headwater ")
        assert str(tmp_path / file) in ended.stderr
        assert ended.stderr.endswith("rename that, or remove its folder from PYTHONPATH\n")


def test_another_version_of_headwater_on_the_python_path_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"headwater/__init__.py": "__version__ = '0.0.1'"})
    ended = headwater("--version", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    assert f"got 0.0.1 in {tmp_path}" in ended.stderr


@pytest.mark.parametrize("file", ["numpy/__init__.py", "msgspec.py"])
def test_a_module_that_headwater_imports_is_refused_on_the_python_path(file: str, tmp_path: Path) -> None:
    write(tmp_path, {file: "", "mine.py": model(2)})
    for command in ("check", "serve"):
        ended = headwater(command, "mine:Mine", "--port", "0", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert ended.returncode == 1
        name = file.partition("/")[0].removesuffix(".py")
        assert ended.stderr.startswith(
            f"headwater: PYTHONPATH: expected no {name}, since Headwater's Python already has"
        )
        assert f"got {tmp_path / file}; set PYTHONPATH in the `environment` of the deployments" in ended.stderr


def test_what_is_installed_for_headwater_may_be_on_the_python_path_too(tmp_path: Path) -> None:
    assert headwater("--version", cwd=tmp_path, PYTHONPATH=sysconfig.get_path("purelib")).returncode == 0


def test_a_folder_headwater_that_is_no_package_disturbs_nobody(tmp_path: Path) -> None:
    write(tmp_path, {"headwater/README.md": "a clone", "mine.py": model(2)})
    checked = headwater("check", "mine:Mine", "--port", "0", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
