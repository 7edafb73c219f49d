"""install.sh: what it makes, and what it says where it can't."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

OFFLINE = Path(__file__).parents[3] / "deploy" / "offline"
PYTHON = "{}.{}".format(*sys.version_info)
COMMAND = """
import json, sys
def main():
    import click
    print(json.dumps([sys.argv[1:], click.__file__, [path for path in sys.path if "site-packages" in path]]))
"""


def wheel(folder: Path, name: str, code: str) -> dict[str, Any]:
    """Write a wheel of one module, of version 0.1, with the command of the same name. Returns its entry in the
    manifest."""
    about = f"{name}-0.1.dist-info"
    path = folder / f"{name}-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"name": name, "version": "0.1", "file": path.name, "size_bytes": path.stat().st_size, "sha256": digest}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An offline folder of two small wheels: a command, and a package of which this Python has another version."""
    folder = tmp_path / "folder"
    (folder / "wheels").mkdir(parents=True)
    for script in ("install.sh", "install.py"):
        shutil.copy(OFFLINE / script, folder)
    wheels = [
        wheel(folder / "wheels", "click", ""),
        wheel(folder / "wheels", "headwater", COMMAND),
    ]
    change(
        folder, headwater="0.1", python=PYTHON, machine=platform.machine(), glibc="2.5", libpython=None, wheels=wheels
    )
    return folder


def change(folder: Path, **values: Any) -> None:
    """Set fields of a folder's manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**manifest, **values}, indent=2) + "\n")


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(folder: Path) -> Run:
    """Runs its install.sh with this Python, without a network as far as pip knows."""

    def run(*arguments: str | Path, python: str | None = sys.executable) -> subprocess.CompletedProcess[str]:
        named = [] if python is None else ["--python", python]
        return subprocess.run(
            [folder / "install.sh", *named, *arguments],
            env={**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_FIND_LINKS": "", "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_the_environment_has_the_folder_s_packages_and_none_of_the_machine_s(
    folder: Path, run: Run, tmp_path: Path
) -> None:
    library = folder / f"libpython{PYTHON}.so.1.0"
    library.write_bytes(b"a library")
    digest = hashlib.sha256(b"a library").hexdigest()
    change(folder, libpython={"file": library.name, "size_bytes": 9, "sha256": digest})
    into = tmp_path / "made"
    ended = run(into)
    assert ended.returncode == 0, ended.stderr
    arguments, own, places = json.loads(ended.stdout.splitlines()[-1])
    assert arguments == ["check", "--port", "0"]
    assert Path(own).is_relative_to(into)
    assert all(Path(place).is_relative_to(into) for place in places)
    assert (into / "lib" / library.name).read_bytes() == b"a library"
    assert "Installed Headwater 0.1" in ended.stdout


def test_another_python_is_refused(folder: Path, run: Run, tmp_path: Path) -> None:
    change(folder, python="3.9")
    ended = run(tmp_path / "made")
    assert ended.returncode == 1
    assert f"expected Python 3.9, which these wheels are for, got {PYTHON} ({sys.executable})" in ended.stderr
    assert f"make offline PYTHON_VERSION={PYTHON}" in ended.stderr


def test_what_is_no_python_is_refused(run: Run, tmp_path: Path) -> None:
    ended = run(tmp_path / "made", python="/nowhere/python")
    assert ended.returncode == 1
    assert "--python: expected a Python interpreter, got /nowhere/python" in ended.stderr


def test_all_that_is_wrong_with_the_machine_is_said_at_once(folder: Path, run: Run, tmp_path: Path) -> None:
    change(folder, machine="vax", glibc="9.9")
    (folder / "wheels" / "click-0.1-py3-none-any.whl").write_bytes(b"cut o")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").touch()
    ended = run(tmp_path / "made")
    assert ended.returncode == 1
    assert f"expected Linux vax, which these wheels are for, got Linux {platform.machine()}" in ended.stderr
    assert "expected glibc 9.9 or later, which PyTriton's wheel needs, got glibc 2." in ended.stderr
    assert f"expected a new folder, but {tmp_path / 'made'} is there" in ended.stderr
    assert "click-0.1-py3-none-any.whl is damaged: copy or unpack this folder again" in ended.stderr
    assert len(ended.stderr.splitlines()) == 4
    assert all(line.startswith("install.sh: ") for line in ended.stderr.splitlines())


def test_a_python_without_venv_is_refused(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "python"
    hide = "import runpy, sys; sys.modules['venv'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"
    own = sys.executable
    script.write_text(f"""#!/bin/sh\n[ "$1" = -c ] && exec {own} "$@"\nexec {own} -c "{hide}" "$@"\n""")
    script.chmod(0o755)
    ended = run(tmp_path / "made", python=str(script))
    assert ended.returncode == 1
    assert "expected a Python with the modules venv, and ensurepip or pip" in ended.stderr
    assert "apt-get install python3-venv" in ended.stderr


def test_an_installation_that_fails_leaves_nothing(folder: Path, run: Run, tmp_path: Path) -> None:
    broken = folder / "wheels" / "click-0.1-py3-none-any.whl"
    broken.write_bytes(b"no wheel")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["wheels"][0]["sha256"] = hashlib.sha256(b"no wheel").hexdigest()
    change(folder, wheels=manifest["wheels"])
    ended = run(tmp_path / "made")
    assert ended.returncode == 1
    assert "failed with status" in ended.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("arguments", [["--python"], ["--wihtout", "a"]])
def test_arguments_are_checked(run: Run, arguments: list[str]) -> None:
    ended = run(*arguments, python=None)
    assert ended.returncode == 1
    assert f"{arguments[0]}" in ended.stderr
