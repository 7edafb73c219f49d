"""Facts about a model's Python (versions of packages, GPUs), and the place where the user's code failed.

``python -m headwater.environment`` prints `versions` as JSON. It reads the packages' metadata without importing them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headwater.errors import DeclarationError, LoadError, Problem

__all__ = [
    "check_installed", "imported_versions", "install_command", "installed_version", "line_of", "package_folder",
    "problem_of", "run_command", "run_python", "versions",
]  # fmt: skip

PACKAGES: Final = ("numpy", "torch", "transformers", "onnxruntime")
PROCESS_TIMEOUT_S: Final = 30.0
"""Seconds that a process of `run_command` may take; initializing many GPUs takes seconds."""


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages in `PACKAGES`, the CUDA version of torch, the GPUs and the platform, by
    name; None where a package is missing or a fact is unknown."""
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        **{name: installed_version(name) for name in PACKAGES},
        "cuda": _torch_cuda(),
        "gpus": _gpus(),
        "platform": platform.platform(),
    }


def imported_versions() -> dict[str, str]:
    """Versions of Python and of the packages of `PACKAGES` that this process has imported, by name."""
    module_versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **{name: str(version) for name, version in module_versions.items() if version},
    }


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None if it is not installed."""
    import importlib.metadata  # takes 2 MB; a replica's host needs it for nothing else

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(extra: str, *distributions: str) -> str:
    """The command that installs distributions for this Python; if the server is installed here, as its extra."""
    wanted = " ".join(distributions)
    if installed_version("headwater-server") is not None:
        wanted = f"'headwater-server[{extra}]'"  # the extra pins the versions that the server works with
    return f"{sys.executable} -m pip install {wanted}"


def check_installed(title: str, extra: str, *packages: str) -> None:
    """Check that this Python has the packages that a model needs, without importing them.

    Args:
        title: begins the message of an error.
        extra: the server's extra that contains the packages.
        packages: names of top-level packages; their distributions must have the same names, with ``-`` for ``_``.

    Raises:
        LoadError: packages are missing; the message says how to install them.
    """
    missing = [name.replace("_", "-") for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"it needs {', '.join(missing)}, not installed for {sys.executable}"
        raise LoadError(Problem(title, reason, install_command(extra, *missing)))


def package_folder(package: str) -> Path | None:
    """The folder of a top-level package, found without importing it; None if there is no such package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _torch_cuda() -> str | None:
    folder = package_folder("torch")
    if folder is None or not (folder / "version.py").exists():
        return None
    facts = runpy.run_path(str(folder / "version.py"))
    if facts.get("cuda"):
        return str(facts["cuda"])
    return f"none (ROCm {facts['hip']})" if facts.get("hip") else "none (CPU build)"


def _gpus() -> str | None:
    """Names of the GPUs that the CUDA driver shows to this process's environment, joined by commas, or ``none``; None
    if they can't be found out."""
    output = run_python(_ASK_GPUS)
    return None if output is None else ", ".join(output.splitlines()) or "none"


# Runs in a separate process, because a process that has initialized CUDA can't fork safely.
_ASK_GPUS: Final = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit()
count, name, device = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    sys.exit()
for index in range(count.value):
    if not cuda.cuDeviceGet(ctypes.byref(device), index):
        cuda.cuDeviceGetName(name, 256, device)
        print(name.value.decode())
"""


def run_python(script: str, *arguments: str, changes: Mapping[str, str] | None = None) -> str | None:
    """The standard output of a script that this interpreter runs without site-packages; None if the script failed, or
    did not end in time. `changes` are variables of its environment."""
    status, output = run_command([sys.executable, "-I", "-S", "-c", script, *arguments], changes or {}, stderr=False)
    return output if status == 0 else None


def run_command(command: list[str], changes: Mapping[str, str], *, stderr: bool = True) -> tuple[int, str]:
    """Exit status and output of a short process; status 124: it did not end within `PROCESS_TIMEOUT_S`; 126: it could
    not be started.

    Args:
        command: the command line.
        changes: environment variables that are added or replaced.
        stderr: whether the output includes standard error.
    """
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **changes},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if stderr else subprocess.DEVNULL,
            timeout=PROCESS_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {PROCESS_TIMEOUT_S:g} s"
    except OSError as error:
        return 126, str(error.strerror)
    return ended.returncode, ended.stdout.decode(errors="replace")


def problem_of(error: BaseException, title: str, doing: str) -> Problem:
    """Describe an exception of the user's code as a problem: its class, message and line."""
    where = line_of(error)
    if isinstance(error, DeclarationError):
        return Problem(title, f"{error}{f' ({where})' if where else ''}", "correct the declaration")
    # A SyntaxError's message repeats the file name; its `msg` does not.
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
    at = f" at {where}" if where else ""
    return Problem(title, f"{doing} raised {raised}{at}", f"correct {where or 'the model'}")


def line_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame in the user's code, or else in any code except this module and the loader.
    For a `SyntaxError` the line that can't be parsed. Empty if there is no such line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    folder = Path(__file__).parent
    raised_by = (__file__, str(folder / "runtime" / "loader.py"))
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in raised_by and not frame.filename.startswith("<")
    ]
    # Headwater may be installed among the libraries, or elsewhere, as in an editable installation.
    users = [frame for frame in frames if not frame.filename.startswith((*libraries, f"{folder}{os.sep}"))]
    frame = next(reversed(users or frames), None)
    return f"{frame.filename}:{frame.lineno}" if frame else ""


def main() -> None:
    """Print the versions as JSON, on a new line: the interpreter's sitecustomize may have printed text before."""
    print("\n" + json.dumps(versions()))


if __name__ == "__main__":
    main()
