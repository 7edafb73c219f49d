"""What Triton needs of Headwater's own Python: each failure is provoked for real, where this machine lets it be."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

import headwater
import headwater_server
from headwater_server.binder import environment
from headwater_server.binder.environment import library_path, problems, require, versions

PACKAGES = [Path(package.__file__ or "").parents[1] for package in (headwater, headwater_server)]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
STUBS = Path("pytriton", "tritonserver", "python_backend_stubs")


def site_packages() -> Path:
    spec = importlib.util.find_spec("pytriton")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def run(code: str, *first: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, with folders first on its path."""
    path = os.pathsep.join(map(str, (*first, *PACKAGES)))
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def report(*first: Path, options: tuple[str, ...] = ()) -> dict[str, Any]:
    ended = run("from headwater_server.binder.environment import main; main()", *first, options=options)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def fake_numpy(folder: Path) -> Path:
    """A folder in which the metadata of numpy 2 lies; the real numpy is imported all the same."""
    metadata = folder / "numpy-2.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")
    return folder


def fake_pytriton(folder: Path) -> Path:
    """A folder with a PyTriton that has a stub for one other version of Python only."""
    stub = folder / STUBS / "3.7" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.touch(mode=0o755)
    (folder / "pytriton" / "__init__.py").touch()
    return folder


def system_libpython() -> Path | None:
    """A libpython of this minor but another patch version, in the system's folder."""
    library = Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or "", f"libpython{PYTHON}.so.1.0")
    if not library.exists() or str(library.parent) == sysconfig.get_config_var("LIBDIR"):
        return None
    ask = (
        f"import ctypes; ask = ctypes.CDLL({str(library)!r}).Py_GetVersion; ask.restype = ctypes.c_char_p; print(ask())"
    )
    return None if f"b'{platform.python_version()} " in run(ask).stdout else library


def test_this_environment_is_in_order() -> None:
    assert problems() == []
    assert problems(deep=True) == []
    require()


def test_versions_are_those_that_run() -> None:
    import numpy as np

    found = versions()
    assert (found["python"] or "").startswith(platform.python_version())
    assert found["numpy"] == np.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["pytriton"] or "")
    assert re.fullmatch(r"2\.\d+\.\d+", found["triton"] or "")
    assert Path(found["libpython"] or "").name == f"libpython{PYTHON}.so.1.0"


def test_neither_torch_nor_pytriton_is_imported() -> None:
    ended = run(
        "import sys\nfrom headwater_server.binder.environment import problems, versions\n"
        "versions(), problems(deep=True)\n"
        "print({'torch', 'pytriton', 'tritonclient'} & sys.modules.keys() or 'none')"
    )
    assert ended.stdout == "none\n"


def test_require_is_quick() -> None:
    def seconds() -> float:
        started = time.thread_time()
        require()
        return time.thread_time() - started

    assert min(seconds() for _ in range(5)) < 0.2


def test_numpy_2_is_refused(tmp_path: Path) -> None:
    found = report(fake_numpy(tmp_path))
    assert found["versions"]["numpy"] == "2.1.0"
    (problem,) = found["problems"]
    assert problem["title"] == "numpy version of Headwater's Python"
    assert f"expected numpy 1.x in {sys.prefix}, got 2.1.0: with numpy 2 PyTriton" in problem["reason"]
    assert "a separate virtual environment" in problem["fix"]
    assert problem["fix"].endswith(f"(python: {sys.executable})")


def test_require_says_reason_and_mend(tmp_path: Path) -> None:
    ended = run("from headwater_server.binder.environment import require; require()", fake_numpy(tmp_path))
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("headwater.errors.EnvironmentUnfit: numpy version of Headwater's Python: expected numpy")
    assert last.endswith(f"(python: {sys.executable})")


def test_missing_pytriton(tmp_path: Path) -> None:
    # An interpreter without its site-packages, with only what `inference` itself imports.
    for entry in site_packages().iterdir():
        if entry.name.startswith("numpy"):
            (tmp_path / entry.name).symlink_to(entry)
    found = report(tmp_path, options=("-S",))
    assert found["versions"]["pytriton"] is None
    assert found["versions"]["triton"] is None
    (problem,) = found["problems"]
    assert problem["title"] == "PyTriton"
    assert problem["fix"].endswith("pip install nvidia-pytriton")


def test_no_stub_for_this_python(tmp_path: Path) -> None:
    (problem,) = report(fake_pytriton(tmp_path))["problems"]
    assert problem["title"] == "PyTriton's stub"
    assert f"has no stub for Python {PYTHON}, only for 3.7" in problem["reason"]


def test_a_stub_whose_libraries_are_missing(tmp_path: Path) -> None:
    # Its libraries are found relative to itself, so a copy of it alone can't be loaded.
    part = STUBS / PYTHON / "triton_python_backend_stub"
    (fake_pytriton(tmp_path) / part).parent.mkdir()
    shutil.copy(site_packages() / part, tmp_path / part)
    (problem,) = report(tmp_path)["problems"]
    assert problem["title"] == "PyTriton's stub"
    assert "error while loading shared libraries: libcudart" in problem["reason"]


@pytest.mark.parametrize("deep", [False, True])
def test_missing_libpython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: bool) -> None:
    # PyTriton has stubs for other versions too: one whose libpython is nowhere on this machine's path stands for ours.
    for version in ("3.8", "3.9", "3.10", "3.12", "3.13"):
        stub = site_packages() / STUBS / version / "triton_python_backend_stub"
        library = f"libpython{version}.so.1.0"
        if stub.exists() and run(f"import ctypes; ctypes.CDLL({library!r})").returncode:
            break
    else:
        pytest.skip("the system has a libpython of every version")
    monkeypatch.setattr(environment, "PYTHON", version)
    monkeypatch.setattr(environment, "LIBPYTHON", library)
    (problem,) = problems(deep=deep, path=str(tmp_path))
    assert problem.title == "libpython"
    assert f"needs {library}, which is neither in {tmp_path}" in problem.reason
    assert f"apt-get install libpython{version}" in problem.fix
    assert "--enable-shared" in problem.fix


def test_a_libpython_of_another_patch_version() -> None:
    library = system_libpython()
    if library is None:
        pytest.skip(f"the system has no libpython{PYTHON} of another patch version")
    (problem,) = problems(deep=True, path=str(library.parent))
    assert problem.title == "libpython version"
    assert f"this is Python {platform.python_version()}" in problem.reason
    assert str(library.name) in problem.reason
    assert "--enable-shared" in problem.fix


def test_library_path_puts_this_pythons_library_first() -> None:
    own = sysconfig.get_config_var("LIBDIR")
    entries = library_path({"LD_LIBRARY_PATH": "/opt/one:/opt/two"}).split(":")
    assert entries[0] == own
    assert {f"{sys.base_prefix}/lib", f"{sys.prefix}/lib"} <= set(entries)
    assert entries[-2:] == ["/opt/one", "/opt/two"]


def test_library_path_has_no_empty_and_no_repeated_entries() -> None:
    # An empty one would make the loader look into the current folder.
    once = library_path({})
    assert "" not in once.split(":")
    assert library_path({"LD_LIBRARY_PATH": f":{once}:"}) == once
