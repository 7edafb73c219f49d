"""Runs modules of `headwater` under a deployment's Python and with its environment, as its replicas do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headwater.errors import Problem
from headwater.user_folders import decides_modules
from headwater_server.process.interpreter import find_interpreter, foreign_environment, stage_package

__all__ = ["PROCESS_TIMEOUT_S", "ModelSide", "last_line"]

PROCESS_TIMEOUT_S = 300.0
"""Timeout of a module that `ModelSide.run` runs. It may import the models, and torch can take minutes on a cold
disk."""


class ModelSide(contextlib.ExitStack):
    """A deployment's Python and environment. It is a context manager, since another Python needs a temporary folder on
    its path.

    Args:
        environment: variables added to this process's environment.
        python: another interpreter; None: Headwater's Python.

    Raises:
        InterpreterError: the interpreter can't run a replica.
    """

    def __init__(self, environment: Mapping[str, str], python: Path | None = None) -> None:
        super().__init__()
        variables = {**os.environ, **environment}
        if python is None:
            self.python = sys.executable
            if decides_modules(environment):
                find_interpreter(sys.executable, variables)
        else:
            folder = self.enter_context(tempfile.TemporaryDirectory(prefix="headwater-check-"))
            try:
                variables = foreign_environment(variables, stage_package(Path(folder, "python")))
                self.python = find_interpreter(python, variables)
            except BaseException:
                self.close()
                raise
        self._variables = variables

    def run(self, module: str, stdin: bytes = b"") -> tuple[int | None, list[bytes], str]:
        """Run a module with ``stdin``. Returns the exit status (None: it took more than `PROCESS_TIMEOUT_S`), the lines
        of stdout that begin as JSON objects do, and stderr. Other lines on stdout are ignored: the interpreter's
        ``sitecustomize`` may print them."""
        try:
            ended = subprocess.run(
                [self.python, "-m", module],
                cwd="/",  # a folder without modules that could shadow Headwater's
                env=self._variables,
                input=stdin,
                capture_output=True,
                timeout=PROCESS_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return None, _objects(error.stdout or b""), (error.stderr or b"").decode(errors="replace")
        return ended.returncode, _objects(ended.stdout), ended.stderr.decode(errors="replace")

    def report(self) -> tuple[dict[str, str | None], list[Problem]]:
        """The versions of the packages that models use under this Python, by name, and a problem if they can't be
        read."""
        return self._ask("headwater.environment")

    def triton_report(self) -> tuple[dict[str, str | None], list[Problem]]:
        """The versions of the packages that Triton needs, by name, and the problems that keep Triton from running. Call
        it only if ``python`` is Headwater's Python."""
        report, problems = self._ask("headwater_server.binder.environment")
        return report.get("versions", {}), problems or [Problem(**problem) for problem in report["problems"]]

    def _ask(self, module: str) -> tuple[dict[str, Any], list[Problem]]:
        status, output, errors = self.run(module)
        if output:
            return msgspec.json.decode(output[-1], type=dict[str, Any]), []
        reason = f"`python -m {module}` ended with status {status}: {last_line(errors)}"
        fix = f"install Headwater and its requirements into the environment of {self.python}"
        return {}, [Problem("environment", reason, fix)]


def _objects(output: bytes) -> list[bytes]:
    return [line for line in output.splitlines() if line.startswith(b"{")]


def last_line(text: str) -> str:
    """The last line that isn't blank; in a traceback, this is the exception. ``no message`` if all lines are blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
