"""Runs modules of the model's side as a replica runs: under its Python, with its environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from app.process.interpreter import find_interpreter, foreign_environment, stage_package
from inference.environment import library_path
from inference.errors import Problem

__all__ = ["PROCESS_TIMEOUT_S", "ModelSide", "last_line"]

PROCESS_TIMEOUT_S = 300.0
"""For all imports of the models; a cold disk can take minutes over torch."""


class ModelSide:
    """What a deployment's replica is surrounded by. A context, since another Python needs a folder on its path.

    Args:
        environment: variables besides our own.
        python: another interpreter; default: the one that we run under.

    Raises:
        InterpreterError: that one can't run a replica.
    """

    def __init__(self, environment: Mapping[str, str], python: Path | None = None) -> None:
        variables = {**os.environ, **environment}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if python is None:
            self.python = sys.executable
            variables["LD_LIBRARY_PATH"] = library_path(variables)
            # Where Headwater is not installed but run from its sources, it must be told where they are.
            ours = Path(__file__).resolve().parents[2]
            if ours.name not in ("site-packages", "dist-packages"):
                variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), str(ours))))
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="headwater-check-")
            try:
                variables = foreign_environment(variables, stage_package(Path(self._folder.name, "python")))
                interpreter = find_interpreter(python, variables)
            except BaseException:
                self._folder.cleanup()
                raise
            self.python = interpreter.path
            variables["LD_LIBRARY_PATH"] = interpreter.library_path(variables)
        self._variables = variables

    def __enter__(self) -> ModelSide:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def run(self, module: str, stdin: bytes = b"") -> tuple[int | None, bytes, str]:
        """Run a module. Returns exit status (None: too slow), stdout and stderr."""
        try:
            ended = subprocess.run(
                [self.python, "-m", module],
                cwd="/",  # a folder without modules, so that nothing in the user's hides one of ours
                env=self._variables,
                input=stdin,
                capture_output=True,
                timeout=PROCESS_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return None, error.stdout or b"", (error.stderr or b"").decode(errors="replace")
        return ended.returncode, ended.stdout, ended.stderr.decode(errors="replace")

    def report(self) -> tuple[dict[str, str | None], list[Problem]]:
        """Versions of what matters, and what keeps a replica from running here."""
        status, output, errors = self.run("inference.environment")
        try:
            report = msgspec.json.decode(output)
            return report["versions"], [Problem(**problem) for problem in report["problems"]]
        except (msgspec.DecodeError, KeyError, TypeError):
            reason = f"`python -m inference.environment` ended with status {status}: {last_line(errors)}"
            return {}, [Problem("environment", reason, f"install Headwater and what it needs into {self.python}'s")]


def last_line(text: str) -> str:
    """The last line with anything on it: of a traceback, what was raised."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
