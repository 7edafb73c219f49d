"""Another Python for a deployment: whether it can serve is known before anything is started under it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from headwater import environment
from headwater_server.cli.check import check
from headwater_server.config.schema import Deployment
from headwater_server.process import interpreter
from headwater_server.process.interpreter import InterpreterError, find_interpreter, foreign_environment, stage_package
from tests.environments import make_environment
from tests.running import in_mount_namespace, wait_for

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
    assert str(caught.value) == f"the model's Python, {caught.value.path}: {caught.value.reason}; {caught.value.fix}"
    return caught.value


def answering(**changes: Any) -> str:
    """A script that answers as a Python does that has everything, but for the changes."""
    report = {
        "version": [3, 11, 9],
        "implementation": "cpython",
        "bits": 64,
        "missing": [],
        "broken": [],
        "versions": {},
    }
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


def test_a_program_of_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "python"
    header = bytearray(Path(sys.executable).read_bytes()[:64])
    header[18:20] = b"\xf3\0" if os.uname().machine != "riscv64" else b"\x3e\0"  # the machine: RISC-V, or x86-64
    path.write_bytes(header)
    path.chmod(0o755)
    error = refused(path)
    assert error.reason == "it can't be executed: Exec format error"
    assert error.fix == f"name a Python interpreter built for this machine ({os.uname().machine})"


def test_a_program_whose_loader_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/nowhere/python3\n")
    path.chmod(0o755)
    assert refused(path).reason == "it can't be executed: the loader that it names is not there"


def test_a_machine_that_lacks_descriptors_is_not_mistaken_for_a_wrong_program() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as next_one:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno() + 2, before[1]))
        try:
            error = refused(sys.executable)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert error.reason.startswith("it can't be executed: the machine lacks file descriptors (ulimit -n): OSError: ")
    assert (error.fix, error.is_permanent) == ("end what uses them, or allow more", False)


def test_a_program_that_is_killed(script: Script) -> None:
    error = refused(script("echo OSError: an earlier one >&2; kill -ILL $$"))
    assert error.reason == "it doesn't answer as Python does: it was killed: Illegal instruction"
    assert error.fix.endswith("/python -c 'import numpy, msgspec'")


def test_a_program_that_is_no_python(script: Script) -> None:
    assert refused(script("echo I am a shell; echo what is -c >&2")).reason == (
        "it doesn't answer as Python does: what is -c"
    )
    assert refused(script("true")).reason == "it doesn't answer as Python does"


@pytest.mark.parametrize("version", [[2, 7, 18], [3, 9, 18]])
def test_a_python_of_another_version(script: Script, version: list[int]) -> None:
    error = refused(script(answering(version=version)))
    assert error.reason == (
        f"expected CPython 3.10 or newer of 64 bits, got cpython {'.'.join(map(str, version))} of 64 bits"
    )


def test_another_implementation(script: Script) -> None:
    assert "got pypy 3.11.9" in refused(script(answering(implementation="pypy"))).reason


def test_a_python_of_32_bits(script: Script) -> None:
    assert refused(script(answering(bits=32))).reason.endswith("of 64 bits, got cpython 3.11.9 of 32 bits")


def test_what_is_not_installed_is_named_at_once(script: Script) -> None:
    path = script(answering(missing=["numpy", "msgspec"]))
    error = refused(path)
    assert error.reason == "numpy, msgspec are not installed there"
    assert error.fix == f"{path} -m pip install numpy msgspec, or name another `python` (own: Headwater's)"


@pytest.mark.parametrize(
    ("versions", "reason", "fix"),
    [
        ({"numpy": "1.21.6", "msgspec": "0.19.0"}, "expected numpy>=1.22, got numpy 1.21.6", "'numpy>=1.22'"),
        ({"numpy": "2.5.5", "msgspec": "0.9.1"}, "expected msgspec>=0.14, got msgspec 0.9.1", "'msgspec>=0.14'"),
    ],
)
def test_a_package_that_is_too_old_is_named(script: Script, versions: dict[str, str], reason: str, fix: str) -> None:
    path = script(answering(versions=versions))
    error = refused(path)
    assert (error.reason, error.fix) == (reason, f"{path} -m pip install {fix}")


@pytest.mark.parametrize("numpy", ["1.22.4", "2.0.0rc1", "3.0.0.dev0+g1", "unknown"])
def test_newer_packages_and_unknown_versions_can_serve(script: Script, numpy: str) -> None:
    path = script(answering(versions={"numpy": numpy, "msgspec": "0.14.2"}))
    assert find_interpreter(path, os.environ) == str(path)


BROKEN = """
try:
    raise ImportError('libblas.so.3: cannot open shared object file')
except ImportError as error:
    raise ImportError('''

IMPORTANT: a page of advice''')"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "error"),
    [
        (BROKEN, "ImportError: libblas.so.3: cannot open shared object file"),
        (f"{BROKEN} from error", "ImportError: libblas.so.3: cannot open shared object file"),
        ("", "has no attribute '__version__'"),
    ],
    ids=["a library is missing", "a library is missing, as numpy 2 says it", "another module of that name"],
)
def test_a_package_that_cannot_be_imported(tmp_path: Path, source: str, error: str) -> None:
    python = make_environment(tmp_path / "env", "msgspec")
    (folder,) = tmp_path.glob("env/lib/python3*/site-packages")
    (folder / "numpy.py").write_text(source)
    found = refused(python)
    assert found.reason.startswith(f"numpy can't be imported there from {folder}/numpy.py: ")
    assert found.reason.endswith(error)
    assert found.fix == f"{python} -m pip install --force-reinstall numpy"


@pytest.mark.parametrize("name", ["numpy", "msgspec"])
def test_a_package_on_the_python_path_that_cannot_be_imported(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise ImportError('built for another Python')")
    with pytest.raises(InterpreterError) as caught:
        find_interpreter(sys.executable, environ(tmp_path, PYTHONPATH=str(tmp_path)))
    assert caught.value.reason == (
        f"{name} can't be imported there from {tmp_path}/{name}.py: ImportError: built for another Python"
    )
    assert caught.value.fix == f"remove {tmp_path} from PYTHONPATH"


@pytest.mark.parametrize(
    ("source", "said"),
    [("print('hello', end='')", None), ("1 / 0", None), ("import sys; sys.exit('not today')", ".*not today")],
    ids=["prints", "raises", "ends"],
)
def test_a_sitecustomize(tmp_path: Path, source: str, said: str | None) -> None:
    (tmp_path / "sitecustomize.py").write_text(source)
    variables = environ(tmp_path, PYTHONPATH=str(tmp_path))
    if said is None:
        assert find_interpreter(sys.executable, variables) == sys.executable
    else:
        with pytest.raises(InterpreterError, match=f"it doesn't answer as Python does: {said}"):
            find_interpreter(sys.executable, variables)


def asked_on(disk: Path, options: str, python: Path) -> str:
    """What is said of a Python where a folder is mounted with options."""
    mount = f"mount --bind {disk} {disk} && mount -o remount,bind,{options} {disk}"
    code = f"""
import os
from headwater_server.process.interpreter import InterpreterError, find_interpreter
try:
    print(find_interpreter({str(python)!r}, os.environ))
except InterpreterError as error:
    print(error)
"""
    command = [*in_mount_namespace(mount), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.slow
def test_an_environment_on_a_read_only_disk(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", "numpy", "msgspec")
    assert asked_on(tmp_path / "env", "ro", python) == str(python)


def test_an_interpreter_on_a_disk_without_programs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    shutil.copy(sys.executable, python)
    assert asked_on(tmp_path, "noexec", python) == (
        f"the model's Python, {python}: its disk is mounted noexec; mount the disk without noexec, or name one on "
        "another disk"
    )


@pytest.mark.slow
def test_packages_on_a_disk_without_programs(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", "numpy")
    (folder,) = tmp_path.glob("env/lib/python3*/site-packages")
    shutil.copytree(Path(msgspec.__file__).parent, folder / "msgspec")
    said = asked_on(folder, "noexec", python)
    assert f"msgspec can't be imported there from {folder}/msgspec/__init__.py: ImportError: " in said
    assert said.endswith("; mount the disk without noexec, or make its environment on another disk")


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


def test_the_question_is_understood_by_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        """Has the question."""

    def ask(path: str, environ: Mapping[str, str], question: str) -> dict[str, Any]:
        raise Asked(question)

    monkeypatch.setattr(interpreter, "ask_interpreter", ask)
    with pytest.raises(Asked) as asked:
        find_interpreter(sys.executable, {})
    question = str(asked.value)
    # What an old one would not parse, or a new one not have, would hide that its version is the reason.
    assert not re.search(r"f\"|:=|match |lambda|async ", question)
    compile(question, "question", "exec")


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


@pytest.mark.slow
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
    path = script(answering(missing=["msgspec"]))
    report = checked(tmp_path, {"good": SCALE, "bad": {**SCALE, "python": str(path)}}, capsys)
    (problem,) = report["problems"]
    assert problem["title"] == "deployment bad"
    assert problem["reason"] == f"the model's Python, {path}: msgspec is not installed there"
    assert problem["fix"].startswith(f"{path} -m pip install msgspec, or")
    assert [one["ok"] for one in report["deployments"]] == [True, False]
