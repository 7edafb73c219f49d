"""Checks that the machine and Headwater's Python can run PyTriton, and Triton with its stub, as a binder must.

``python -m headwater_server.binder.environment`` prints ``{"versions": {...}, "problems": [...]}`` as JSON, for
processes that don't import PyTriton. This module doesn't import PyTriton either: it reads package metadata, and asks
the dynamic loader which libraries PyTriton's stub would load.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from headwater.environment import installed_version, package_folder, run_command, run_python
from headwater.errors import EnvironmentUnfit, Problem

__all__ = ["library_path", "problems", "require", "versions", "without_other_libraries"]

OLDEST_PYTHON: Final = (3, 10)
NEWEST_PYTHON: Final = (3, 12)

PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
"""This Python's version, as PyTriton names its stubs."""
LIBPYTHON: Final = f"libpython{PYTHON}.so.1.0"
"""The library that PyTriton's stub for this Python loads."""
_LOADER_CACHE: Final = Path("/etc/ld.so.cache")


def library_path(environ: Mapping[str, str]) -> str:
    """The ``LD_LIBRARY_PATH`` under which Triton must run, given its environment.

    PyTriton's stub loads ``libpython3.x.so.1.0`` by name. The folders that may have this interpreter's library come
    before the present value, so that a system library of another patch version doesn't take precedence: ``LIBDIR``;
    ``lib`` of the base installation, in case Python was moved after it was built; and ``lib`` of this environment,
    where the installer that `make offline` builds puts it.
    """
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", f"{sys.prefix}/lib"]
    # An empty element would mean the current folder.
    entries = [entry for entry in [*folders, *environ.get("LD_LIBRARY_PATH", "").split(":")] if entry]
    return ":".join(dict.fromkeys(entries))


def without_other_libraries(fix: str) -> str:
    """The fix for a library that can't be loaded. Where environment variables name other libraries, it first suggests
    to start without these variables."""
    names = [name for name in ("LD_PRELOAD", "LD_LIBRARY_PATH") if os.environ.get(name)]
    return f"start headwater without {' and '.join(names)}; if that doesn't help, {fix}" if names else fix


def require() -> None:
    """Check, in a few milliseconds and without starting a process, that Triton can run here.

    Raises:
        EnvironmentUnfit: Triton can't run; the message has the first problem and its fix.
    """
    for problem in problems():
        raise EnvironmentUnfit(str(problem))


def problems(*, deep: bool = False, path: str | None = None) -> list[Problem]:
    """The problems that keep Triton from running here.

    Args:
        deep: also start PyTriton's stub, and check the version of the libpython that it would load.
        path: Triton's ``LD_LIBRARY_PATH``; by default `library_path` of this process's environment.
    """
    if path is None:
        path = library_path(os.environ)
    stub = _stub()
    if stub is None:
        last: Iterable[Problem] = [_stub_problem()]
    else:
        last = _deep_library_problems(stub, path) if deep else _library_problems(path)
    return [*_python_problems(), *_numpy_problems(), *last]


def versions() -> dict[str, str | None]:
    """Versions of the packages that Triton needs, and the path of the libpython that PyTriton's stub would load, by
    name; None where missing or unknown."""
    stub = _stub()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "numpy": installed_version("numpy"),
        "pytriton": installed_version("nvidia-pytriton"),
        "triton": _triton_version(),
        "libpython": None if stub is None else _libpython_of(stub, library_path(os.environ)),
    }


def _stub() -> Path | None:
    """PyTriton's stub for this version of Python; None if there is none."""
    folder = package_folder("pytriton")
    if folder is None:
        return None
    stub = folder / "tritonserver" / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    return stub if stub.exists() else None


def _python_problems() -> Iterable[Problem]:
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        yield Problem(
            "Python version",
            f"expected Python 3.10 to 3.12, got {platform.python_version()} ({sys.executable})",
            "install Headwater into a virtual environment with Python 3.10 to 3.12",
        )


def _numpy_problems() -> Iterable[Problem]:
    version = installed_version("numpy")
    if version is None or int(version.partition(".")[0]) >= 2:
        why = (
            "which is not installed"
            if version is None
            else f"got {version}: with numpy 2 PyTriton silently passes tensors without elements between its "
            "processes, and every request fails with 'expected N, got 0'"
        )
        yield Problem(
            "numpy version of Headwater's Python",
            f"expected numpy 1.x in {sys.prefix}, {why}",
            "install Headwater into a separate virtual environment, and set `python` of the deployment to the "
            f"interpreter that has your packages, with any version of numpy (python: {sys.executable})",
        )


def _stub_problem() -> Problem:
    version = installed_version("nvidia-pytriton")
    folder = package_folder("pytriton")
    if version is None or folder is None:
        return Problem(
            "PyTriton", "nvidia-pytriton is not installed", f"{sys.executable} -m pip install nvidia-pytriton"
        )
    there = sorted(
        (stub.parent.name for stub in folder.glob("tritonserver/python_backend_stubs/*/triton_python_backend_stub")),
        key=lambda name: [int(part) for part in re.findall(r"\d+", name)],
    )
    return Problem(
        "PyTriton's stub",
        f"nvidia-pytriton {version} has no stub for Python {PYTHON}, only for {', '.join(there) or 'no version'}",
        "install Headwater into a virtual environment of Python 3.10 to 3.12",
    )


def _library_problems(path: str) -> Iterable[Problem]:
    """Check, by looking at files only, that the stub will find a libpython."""
    if any(Path(entry, LIBPYTHON).exists() for entry in path.split(":")):
        return
    if _LOADER_CACHE.exists() and LIBPYTHON.encode() in _LOADER_CACHE.read_bytes():
        return
    yield _missing_libpython(path)


def _deep_library_problems(stub: Path, path: str) -> Iterable[Problem]:
    # A stub that can be loaded, started without arguments, complains about the missing arguments and ends.
    status, output = run_command([str(stub)], {"LD_LIBRARY_PATH": path})
    loaded = status == 1 and "arguments" in output
    if not loaded and LIBPYTHON in output and "cannot open shared object file" in output:
        yield _missing_libpython(path)
        return
    if not loaded:
        yield Problem(
            "PyTriton's stub",
            f"it can't be started: {output.strip().removeprefix(f'{stub}: ') or f'status {status}'}",
            without_other_libraries(
                f"reinstall it: {sys.executable} -m pip install --force-reinstall --no-deps nvidia-pytriton; if that "
                "doesn't help, the system's C and C++ libraries are too old for it"
            ),
        )
        return
    library = _libpython_of(stub, path)
    if library is None:
        return
    version = _version_of_libpython(library)
    if version != platform.python_version():
        yield Problem(
            "libpython version",
            f"this is Python {platform.python_version()}, but PyTriton's stub would load {library}, which is "
            f"{version or 'not a Python library'}; the stub's imports would then fail with misleading errors",
            f"use a Python built with --enable-shared (with pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install "
            f"{platform.python_version()}), or make the virtual environment with the interpreter of that library",
        )


def _missing_libpython(path: str) -> Problem:
    built = "" if sysconfig.get_config_var("Py_ENABLE_SHARED") else "; this Python was built without a shared library"
    return Problem(
        "libpython",
        f"PyTriton's stub needs {LIBPYTHON}, which is neither in {path.replace(':', ', ')} nor known to the "
        f"system's loader{built}",
        f"install it (on Debian and Ubuntu: apt-get install libpython{PYTHON}), or use a Python built with "
        "--enable-shared",
    )


def _libpython_of(stub: Path, path: str) -> str | None:
    """The file of libpython that the stub would load; the loader resolves it without running the stub. None if the
    loader finds none."""
    _, output = run_command([str(stub)], {"LD_LIBRARY_PATH": path, "LD_TRACE_LOADED_OBJECTS": "1"})
    match = re.search(rf"{re.escape(LIBPYTHON)} => (/.+) \(0x", output)
    return match.group(1) if match else None


def _version_of_libpython(library: str) -> str | None:
    return next(iter((run_python(_ASK_LIBPYTHON, library) or "").split()), None)


def _triton_version() -> str | None:
    folder = package_folder("pytriton")
    if folder is None:
        return None
    libraries = [folder.parent / "nvidia_pytriton.libs", folder / "tritonserver" / "external_libs"]
    for library in (file for place in libraries for file in place.glob("libtritonserver*.so")):
        # Triton needs no GPU to report its version, and would allocate memory on each GPU.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": str(library.parent)}
        output = run_python(_ASK_TRITON, str(library), changes=hidden)
        return output.strip() or None if output else None
    return None


# The binary neither contains its version as text nor has an option to print it; its C API returns the version in 0.1 s.
_ASK_TRITON: Final = """
import ctypes, json, os, sys, tempfile
library = ctypes.CDLL(sys.argv[1])
def call(name, *arguments):
    function = getattr(library, "TRITONSERVER_" + name)
    function.restype = ctypes.c_void_p
    if function(*arguments):
        os._exit(1)
options, server, message = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
text, size = ctypes.c_char_p(), ctypes.c_size_t()
call("ServerOptionsNew", ctypes.byref(options))
with tempfile.TemporaryDirectory() as repository:
    call("ServerOptionsSetModelRepositoryPath", options, repository.encode())
    call("ServerOptionsSetModelControlMode", options, ctypes.c_int(2))
    for name in ("LogInfo", "LogWarn", "LogError", "Metrics"):
        call("ServerOptionsSet" + name, options, ctypes.c_bool(False))
    call("ServerOptionsSetPinnedMemoryPoolByteSize", options, ctypes.c_uint64(0))
    call("ServerNew", ctypes.byref(server), options)
    call("ServerMetadata", server, ctypes.byref(message))
    call("MessageSerializeToJson", message, ctypes.byref(text), ctypes.byref(size))
    print(json.loads(ctypes.string_at(text, size.value))["version"], flush=True)
os._exit(0)  # skip the destructors of a server that was never stopped
"""

_ASK_LIBPYTHON: Final = """
import ctypes, sys
version = ctypes.CDLL(sys.argv[1]).Py_GetVersion
version.restype = ctypes.c_char_p
print(version().decode())
"""


def main() -> None:
    """Print versions and problems as JSON."""
    print("\n" + json.dumps({"versions": versions(), "problems": [asdict(problem) for problem in problems(deep=True)]}))


if __name__ == "__main__":
    main()
