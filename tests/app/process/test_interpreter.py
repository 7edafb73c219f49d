"""Another Python for a deployment: whether it can serve is known before anything is started under it."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from headwater import environment
from headwater_server.cli.check import check
from headwater_server.config.schema import Deployment
from headwater_server.process import interpreter
from headwater_server.process.interpreter import (
    InterpreterError,
    find_interpreter,
    foreign_environment,
    stage_package,
)
from tests.running import wait_for

ROOT = Path(__file__).parents[3]

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Make an executable shell script."""

    def make(body: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """What a replica under another Python would get."""
    return foreign_environment({**os.environ, **more}, stage_package(tmp_path / "stage"))


def refused(path: str | Path) -> InterpreterError:
    with pytest.raises(InterpreterError) as caught:
        find_interpreter(path, os.environ)
    assert str(caught.value) == f"python {caught.value.path}: {caught.value.reason}; {caught.value.fix}"
    return caught.value


def answering(**changes: Any) -> str:
    """A script that answers as a Python does that has everything, but for the changes."""
    report = {"version": [3, 11, 9], "implementation": "cpython", "modules": ["numpy", "msgspec"]}
    answer = json.dumps({**report, **changes})
    return f"cat <<'END'\na greeting from sitecustomize\nheadwater-interpreter:{answer}\nEND"


def test_our_own_python_can_serve(tmp_path: Path) -> None:
    assert find_interpreter(sys.executable, environ(tmp_path)) == sys.executable  # not resolved: it is an environment's


@pytest.mark.parametrize("version", [[3, 10, 0], [3, 13, 0], [3, 99, 0]])
def test_any_python_from_3_10_on_can_serve(script: Script, version: list[int]) -> None:
    path = script(answering(version=version))
    assert find_interpreter(path, os.environ) == str(path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    error = refused(tmp_path / "bin" / "python")
    assert error.reason == "there is no such file"
    assert "a relative path starts where Headwater was started" in error.fix


def test_a_virtual_environment_rather_than_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    error = refused(tmp_path)
    assert (error.reason, error.fix) == ("expected an interpreter, got a folder", f"name {tmp_path}/bin/python")


def test_a_virtual_environment_whose_python_is_gone(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/nowhere/python3.11")
    error = refused(tmp_path / "python")
    assert error.reason == "it is a link to /nowhere/python3.11, which is not there"
    assert error.fix == "make its virtual environment again"


def test_a_file_that_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    error = refused(tmp_path / "python")
    assert error.reason == "it is not executable"
    assert f"chmod +x {tmp_path}/python" in error.fix


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_bytes(b"\0nothing")
    path.chmod(0o755)
    assert refused(path).reason == "it can't be executed: Exec format error"


def test_a_program_that_is_no_python(script: Script) -> None:
    assert refused(script("echo I am a shell; echo what is -c >&2")).reason == (
        "it doesn't answer as Python does: what is -c"
    )
    assert refused(script("true")).reason == "it doesn't answer as Python does"


@pytest.mark.parametrize("version", [[2, 7, 18], [3, 9, 18]])
def test_a_python_of_another_version(script: Script, version: list[int]) -> None:
    error = refused(script(answering(version=version)))
    assert error.reason == f"expected CPython 3.10 or newer, got cpython {'.'.join(map(str, version))}"


def test_another_implementation(script: Script) -> None:
    assert "got pypy 3.11.9" in refused(script(answering(implementation="pypy"))).reason


def test_what_is_not_installed_is_named_at_once(script: Script) -> None:
    path = script(answering(modules=[]))
    error = refused(path)
    assert error.reason == "numpy, msgspec are not installed there"
    assert error.fix == f"{path} -m pip install numpy msgspec, or name another `python` (own: Headwater's)"


def test_one_that_does_not_answer_is_ended_with_what_it_started(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "ASK_TIMEOUT_S", 0.5)
    began = time.monotonic()
    error = refused(script(f"sleep 61 & echo $! > {tmp_path}/pid; wait"))
    assert error.reason == "it did not answer within 0.5 s"
    assert time.monotonic() - began < 10
    pid = int((tmp_path / "pid").read_text())
    # The kernel ends what it was told to kill in its own time: on a busy machine after the call that told it.
    wait_for(lambda: has_ended(pid), what=f"the end of process {pid}")


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_the_question_is_understood_by_every_python() -> None:
    # What an old one would not parse, or a new one not have, would hide that its version is the reason.
    assert not re.search(r"f\"|:=|match |lambda|async ", interpreter._QUESTION)
    compile(interpreter._QUESTION, "question", "exec")


def test_what_is_meant_for_our_python_does_not_reach_the_other(tmp_path: Path) -> None:
    ours = sysconfig.get_path("purelib")
    path = f"{ours}:/models"
    found = environ(tmp_path, PYTHONHOME="/x", VIRTUAL_ENV="/y", PYTHONPATH=path, PYTHONSAFEPATH="1")
    assert not {"PYTHONHOME", "VIRTUAL_ENV"} & found.keys()
    assert found["PYTHONPATH"] == f"{tmp_path}/stage:/models"
    assert found["PYTHONSAFEPATH"] == "1"


def test_the_staged_folder_has_our_package_only(tmp_path: Path) -> None:
    folder = stage_package(tmp_path / "stage")
    assert os.listdir(folder) == ["headwater"]
    assert (folder / "headwater").samefile(Path(environment.__file__).parent)


def test_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Deployment.model_validate({"model": "a:B"}).python is None
    one = Deployment.model_validate({"model": "a:B", "python": "~/env/bin/python"})
    assert one.python == Path("/home/someone/env/bin/python")


def checked(tmp_path: Path, deployments: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"deployments": deployments}, sort_keys=False))
    check(path, as_json=True, flags={"server.port": 0})
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


SCALE = {"model": "headwater.zoo.scale:Scale"}


def test_check_shows_a_deployments_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(tmp_path, {"own": {**SCALE, "python": sys.executable}, "plain": SCALE}, capsys)
    assert report["problems"] == []
    own, plain = report["deployments"]
    assert own["ok"]
    assert own["python"]["path"] == sys.executable
    assert own["python"]["versions"]["numpy"].startswith("1.")
    assert own["python"]["versions"]["torch"]
    assert "python" not in plain
    check(tmp_path / "config.yaml", as_json=False, flags={"server.port": 0})
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"\n         python {sys.executable}: {version}, numpy 1." in capsys.readouterr().out


def test_check_names_the_deployment_whose_python_is_wrong(
    tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(answering(modules=["numpy"]))
    report = checked(tmp_path, {"good": SCALE, "bad": {**SCALE, "python": str(path)}}, capsys)
    (problem,) = report["problems"]
    assert problem["title"] == "deployment bad"
    assert problem["reason"] == f"python {path}: msgspec is not installed there"
    assert problem["fix"].startswith(f"{path} -m pip install msgspec, or")
    assert [one["ok"] for one in report["deployments"]] == [True, False]
