"""install.sh: what it makes, and what it says where it can't."""

from __future__ import annotations

import hashlib
import importlib.metadata
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
import importlib.metadata, json, sys
def main():
    import click, packaging
    print(json.dumps([sys.argv[1:], click.__file__, packaging.__file__]))
"""


def wheel(folder: Path, name: str, code: str, *, requires: str = "") -> dict[str, Any]:
    """Write a wheel of one module, of version 0.1, with the command of the same name. Returns its entry in the
    manifest."""
    about = f"{name}-0.1.dist-info"
    path = folder / f"{name}-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n{requires}")
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
        wheel(
            folder / "wheels", "headwater", COMMAND, requires="Requires-Dist: click>=7\nRequires-Dist: packaging==2\n"
        ),
    ]
    change(
        folder, headwater="0.1", python=PYTHON, machine=platform.machine(), glibc="2.5", libpython=None, wheels=wheels
    )
    change(folder, excluded={"packaging": importlib.metadata.version("packaging")}, pruned=[])
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


def test_the_environment_has_its_own_packages_first_and_the_machine_s_behind_them(
    folder: Path, run: Run, tmp_path: Path
) -> None:
    library = folder / f"libpython{PYTHON}.so.1.0"
    library.write_bytes(b"a library")
    digest = hashlib.sha256(b"a library").hexdigest()
    change(folder, libpython={"file": library.name, "size_bytes": 9, "sha256": digest})
    into = tmp_path / "made"
    ended = run(into)
    assert ended.returncode == 0, ended.stderr
    arguments, own, machine_s = json.loads(ended.stdout.splitlines()[-1])
    assert arguments == ["check", "--port", "0"]
    assert Path(own).is_relative_to(into)
    assert Path(machine_s).is_relative_to(sys.prefix)
    assert (into / "lib" / library.name).read_bytes() == b"a library"
    assert f"  packaging {importlib.metadata.version('packaging')}\n" in ended.stdout
    assert "Installed Headwater 0.1" in ended.stdout


def test_packages_of_the_machine_that_need_another_numpy_are_hidden_and_so_are_those_that_need_them(
    folder: Path, run: Run, tmp_path: Path
) -> None:
    machine = tmp_path / "machine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine], check=True)
    places = next((machine / "lib").glob("python*")) / "site-packages"
    requires = {"numpy": "", "scipy": "numpy>=9", "scikit-learn": "scipy", "users": "numpy>=9", "able": "numpy<9"}
    for name, required in requires.items():
        about = places / f"{name.replace('-', '_')}-9.0.dist-info"
        about.mkdir()
        extra = "Requires-Dist: scipy ; extra == 'more'\n"
        lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n{f'Requires-Dist: {required}' * bool(required)}"
        (about / "METADATA").write_text(f"{lines}\n{extra * (name == 'able')}")
        module = "sklearn" if name == "scikit-learn" else name
        (about / "RECORD").write_text(f"{module}.py,,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n")
        (places / f"{module}.py").write_text("")
    command = """
import importlib.util
def main():
    print([name for name in ("numpy", "scipy", "sklearn", "users", "able") if importlib.util.find_spec(name)])
"""
    wheels = [wheel(folder / "wheels", "numpy", ""), wheel(folder / "wheels", "headwater", command)]
    change(folder, wheels=wheels, excluded={"scipy": "9.0", "able": "9.0"}, pruned=["scikit-learn", "unknown"])
    ended = run(tmp_path / "made", python=str(machine / "bin" / "python"))
    assert ended.returncode == 0, ended.stderr
    assert "warning: scipy 9.0 has requirement numpy>=9, but you have numpy 0.1" in ended.stdout
    assert "warning: scikit-learn, scipy: hidden, since they need another numpy than PyTriton does" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "['numpy', 'users', 'able']"


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
    change(folder, machine="vax", glibc="9.9", excluded={"no-such": "1.0", "nor-this": "2.0"})
    (folder / "wheels" / "click-0.1-py3-none-any.whl").write_bytes(b"cut o")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").touch()
    ended = run(tmp_path / "made")
    assert ended.returncode == 1
    assert f"expected Linux vax, which these wheels are for, got Linux {platform.machine()}" in ended.stderr
    assert "expected glibc 9.9 or later, which PyTriton's wheel needs, got glibc 2." in ended.stderr
    assert f"expected a new folder, but {tmp_path / 'made'} is there" in ended.stderr
    assert "click-0.1-py3-none-any.whl is damaged: copy or unpack this folder again" in ended.stderr
    assert f"{sys.executable} lacks no-such, nor-this." in ended.stderr
    assert "go without: --without no-such,nor-this" in ended.stderr
    assert len(ended.stderr.splitlines()) == 5
    assert all(line.startswith("install.sh: ") for line in ended.stderr.splitlines())


def test_versions_that_are_not_the_lock_s_are_warned_of(folder: Path, run: Run, tmp_path: Path) -> None:
    change(folder, excluded={"packaging": "0.1", "no-such": "1.0"}, glibc="9.9")  # so that nothing is installed
    found = importlib.metadata.version("packaging")
    ended = run("--without", "no_such", tmp_path / "made")
    assert f"  packaging {found}: warning: Headwater is tested with 0.1\n" in ended.stdout
    assert "  no-such: none, gone without\n" in ended.stdout
    assert "lacks" not in ended.stderr


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
