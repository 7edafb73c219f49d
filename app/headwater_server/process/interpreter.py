"""Another Python for a deployment's replicas: inspects it, checks that it can serve, and builds its environment.

A short program that any Python from 2.7 on can run reports the version and packages of that Python. Headwater need not
be installed there: a folder with a link to this installation's `headwater` is put on its path.

Imports only the standard library and Headwater's errors, so that `headwater_server.process.launcher` stays fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import headwater
from headwater.errors import shortage_of
from headwater_server.errors import StartError

__all__ = [
    "CONFUSING",
    "NUMPY_ALONE",
    "InterpreterError",
    "ask_interpreter",
    "find_interpreter",
    "foreign_environment",
    "stage_package",
]  # fmt: skip

OLDEST_PYTHON: Final = (3, 10)
"""Oldest version of a model's Python; for Headwater's Python see `headwater_server.binder.environment`."""
ASK_TIMEOUT_S: Final = 30.0
"""Timeout of the short program. The first start of a Python can take seconds on a cold disk."""
NEEDED: Final = {"numpy": (1, 22), "msgspec": (0, 14)}
"""Packages that a replica imports (each has a module of the same name), with the oldest versions that work."""
NUMPY_ALONE: Final = {"numpy": NEEDED["numpy"]}
"""What the ``model.py`` of a Triton model repository needs."""
TRY: Final = f"-c 'import {', '.join(NEEDED)}'"
"""Arguments with which an operator runs an interpreter, to see why it can't run a model."""
CONFUSING: Final = ("PYTHONHOME", "VIRTUAL_ENV")
"""Environment variables that refer to the Python that runs Headwater."""
NOEXEC_FIX: Final = "mount the disk without noexec, or"

_MARK: Final = "headwater-interpreter:"


class InterpreterError(StartError):
    """A deployment's Python can't run its replicas."""

    def __init__(self, path: str, reason: str, fix: str, *, is_permanent: bool = True) -> None:
        super().__init__(f"the model's Python, {path}: {reason}; {fix}")
        self.path = path
        self.reason = reason
        self.fix = fix
        self.is_permanent = is_permanent
        """Whether another attempt would fail in the same way."""


def stage_package(folder: Path) -> Path:
    """Create a folder that has only a link to this installation's `headwater`; return it, for `foreign_environment`.

    Raises:
        OSError: the folder exists already, or can't be created.
    """
    folder.mkdir()
    (folder / "headwater").symlink_to(Path(headwater.__file__).resolve().parent)
    return folder


def foreign_environment(environ: Mapping[str, str], stage: Path) -> dict[str, str]:
    """An environment for another Python: without variables meant for Headwater's Python, and with ``stage`` (see
    `stage_package`) first in PYTHONPATH, from which the folders of this Python's packages are removed."""
    environment = {name: value for name, value in environ.items() if name not in CONFUSING}
    ours = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in ours]
    environment["PYTHONPATH"] = os.pathsep.join([str(stage), *entries])
    return environment


def find_interpreter(
    path: str | Path, environ: Mapping[str, str], needed: Mapping[str, tuple[int, int]] = NEEDED
) -> str:
    """Inspect a Python, and check that it can run a model.

    Results are not cached: a missing package may be installed between two starts without changing the interpreter.

    A relative path is relative to the working folder. For ``environ`` see `foreign_environment`; ``needed`` has the
    packages that the Python must have, with the oldest versions that work.

    Returns:
        The interpreter's absolute path. Links are not resolved: in a virtual environment, the interpreter is a link.

    Raises:
        InterpreterError: the interpreter is missing, is not a 64-bit CPython 3.10 or newer, doesn't answer, or a
            package that every model needs is missing, too old, or can't be imported.
    """
    absolute = os.path.abspath(path)
    report = ask_interpreter(absolute, environ, _QUESTION % [*needed])
    version = tuple(report["version"])
    if report["implementation"] != "cpython" or version[:2] < OLDEST_PYTHON or report["bits"] != 64:
        got = f"{report['implementation']} {'.'.join(map(str, version))} of {report['bits']} bits"
        reason = f"expected CPython 3.10 or newer of 64 bits, got {got}"
        raise InterpreterError(absolute, reason, "name one of these")
    if missing := report["missing"]:
        verb = "is" if len(missing) == 1 else "are"
        reason = f"{', '.join(missing)} {verb} not installed there"
        install = f"{absolute} -m pip install {' '.join(missing)}"
        raise InterpreterError(absolute, reason, f"{install}, or name another `python` (own: Headwater's)")
    for name, oldest in needed.items():
        match = re.match(r"(\d+)\.(\d+)", report["versions"].get(name, ""))
        if match is not None and (int(match[1]), int(match[2])) < oldest:
            wanted = f"{name}>={oldest[0]}.{oldest[1]}"
            reason = f"expected {wanted}, got {name} {report['versions'][name]}"
            raise InterpreterError(absolute, reason, f"{absolute} -m pip install '{wanted}'")
    for module, place, error in report["broken"]:
        reason = f"{module} can't be imported there from {place}: {error}"
        raise InterpreterError(absolute, reason, _repair(absolute, module, place, environ), is_permanent=False)
    return absolute


def _repair(python: str, module: str, place: str, environ: Mapping[str, str]) -> str:
    """How to fix the import of a module that a Python finds at ``place``, but can't import."""
    if _is_noexec(place):
        return f"{NOEXEC_FIX} make its environment on another disk"
    for entry in environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry and place.startswith(os.path.abspath(entry) + os.sep):
            return f"remove {entry} from PYTHONPATH"
    return f"{python} -m pip install --force-reinstall {module}"


def _is_noexec(path: str) -> bool:
    with contextlib.suppress(OSError):  # ``path`` may not be a file
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    return False


def _check_file(path: str) -> None:
    name_one = "name a Python interpreter, such as the bin/python of a virtual environment"
    if os.path.isdir(path):
        inside = os.path.join(path, "bin", "python")
        fix = f"name {inside}" if os.path.exists(inside) else name_one
        raise InterpreterError(path, "expected an interpreter, got a folder", fix)
    if os.path.exists(path):
        if not os.access(path, os.X_OK, effective_ids=True):  # execve checks capabilities, too
            if _is_noexec(path):
                raise InterpreterError(path, "its disk is mounted noexec", f"{NOEXEC_FIX} name one on another disk")
            raise InterpreterError(path, "it is not executable", f"{name_one}, or allow it: chmod +x {path}")
    elif os.path.islink(path):
        reason = f"it is a link to {os.readlink(path)}, which is not there"
        raise InterpreterError(path, reason, "make its virtual environment again")
    else:
        fix = f"{name_one}; PATH is not searched, and a relative path starts where Headwater was started"
        raise InterpreterError(path, "there is no such file", fix)


asked: Final[set[int]] = set()
"""Ids of the processes that `ask_interpreter` waits for."""


def ask_interpreter(path: str, environ: Mapping[str, str], question: str) -> dict[str, Any]:
    """Run a short program under a Python, and return its report.

    Args:
        path: absolute path of the interpreter.
        environ: the interpreter's environment.
        question: the program; it assigns a dictionary to ``report``.

    Raises:
        InterpreterError: the interpreter is missing or doesn't answer; caused by the system's error, if there is one.
    """
    _check_file(path)
    try:
        process = subprocess.Popen(
            [path, "-c", question + _ANSWER],
            cwd="/",  # a folder without modules that could shadow the standard library
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that the interpreter's children are killed with it
        )
    except OSError as error:
        why, fix = error.strerror, f"name a Python interpreter built for this machine ({os.uname().machine})"
        if isinstance(error, FileNotFoundError):  # `_check_file` has just found the file
            why = "the loader that it names is not there"
        elif (shortage := shortage_of(error)) is not None:
            why, fix = str(shortage), "end what uses them, or allow more"
        raise InterpreterError(path, f"it can't be executed: {why}", fix, is_permanent=False) from error
    asked.add(process.pid)
    try:
        output, errors = process.communicate(timeout=ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        reason = f"it did not answer within {ASK_TIMEOUT_S:g} s"
        raise InterpreterError(path, reason, f"try it: {path} {TRY}", is_permanent=False) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        asked.discard(process.pid)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    for line in output.decode(errors="replace").splitlines():  # the site module of that Python may print, too
        if line.startswith(_MARK):
            report: dict[str, Any] = json.loads(line[len(_MARK) :])
            return report
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if "Error: " in line] or lines  # Python may print the place of the error after it
    if process.returncode < 0:
        lines.append(f"it was killed: {signal.strsignal(-process.returncode)}")
    reason = "it doesn't answer as Python does" + (f": {lines[-1][:300]}" if lines else "")
    fix = f"name a Python interpreter that works; try it: {path} {TRY}"
    if "PYTHONHOME" in environ:
        fix = f"remove PYTHONHOME from its environment, or {fix}"
    raise InterpreterError(path, reason, fix, is_permanent=False)


_QUESTION: Final = """
import platform, struct, sys
report = {"version": list(sys.version_info[:3]), "implementation": platform.python_implementation().lower()}
report.update(bits=struct.calcsize("P") * 8, missing=[], broken=[], versions={})
if sys.version_info >= (3, 10):
    import importlib.util
    for name in %r:
        spec = importlib.util.find_spec(name)
        if spec is None:
            report["missing"].append(name)
            continue
        try:
            # Another module of that name, or the rest of a package, has no version.
            report["versions"][name] = __import__(name).__version__
        except Exception as error:
            while error.__cause__ or error.__context__:  # numpy's own message is a page long
                error = error.__cause__ or error.__context__
            text = type(error).__name__ + ": " + str(error).strip().partition("\\n")[0][:300]
            report["broken"].append([name, spec.origin or list(spec.submodule_search_locations)[0], text])
"""
_ANSWER: Final = f"""
import json, sys
sys.stdout.write("\\n{_MARK}" + json.dumps(report) + "\\n")
"""
