"""Runs a PyTriton script before replicas start, to find the models that it binds.

``python -m headwater.replica.bindings`` reads a `ScriptRequest` as JSON from standard input and prints a
`ScriptFinding`. It runs in a separate process, in which the script may do anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from headwater.errors import LoadError
from headwater.reference import find_path
from headwater.replica.probe import own_output
from headwater.runtime.pytriton_script import end_scripts, run_script
from headwater.runtime.pytriton_shared import shared_objects
from headwater.user_folders import put_on_path

__all__ = ["ScriptFinding", "ScriptRequest", "main"]


class ScriptRequest(msgspec.Struct, frozen=True):
    """The script to run."""

    path: str
    arguments: list[str] = []
    search: list[str] = []
    """Folders of the user's modules, in which a relative path is searched."""
    working_dir: str = "/"


class ScriptFinding(msgspec.Struct, frozen=True):
    """The models that the script binds, or the reason why it can't be served."""

    settings: dict[str, dict[str, Any]] = {}
    """The deployment's fields that the script sets, by model."""
    warnings: list[str] = []
    problem: dict[str, str] | None = None
    """The fields of a `headwater.errors.Problem`."""


def main() -> None:
    """Read a request from standard input and answer it."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ScriptRequest)
    put_on_path(request.search)
    os.chdir(request.working_dir)
    with own_output() as output:
        output.write(msgspec.json.encode(_find(request)))
    end_scripts()


def _find(request: ScriptRequest) -> ScriptFinding:
    title = f"model pytriton:{request.path}"
    try:
        path = find_path(title, request.path, request.search, "file")
        script = run_script(title, path, request.arguments)
    except LoadError as error:
        return ScriptFinding(problem=asdict(error.problem))
    from headwater.runtime.pytriton_model import settings_of  # after the path is set, which may contain PyTriton

    settings = {name: settings_of(binding) for name, binding in script.bindings.items()}
    shared = shared_objects({name: binding.functions for name, binding in script.bindings.items()})
    return ScriptFinding(
        settings, [*script.warnings, *(_warning(description, models) for description, models in shared)]
    )


def _warning(shared: str, models: Sequence[str]) -> str:
    return (
        f"{' and '.join(models)} share {shared}, but each model has a copy here, since each model runs in a separate "
        "process: no model sees the changes of another model (docs/from-pytriton.md#models-that-share-state)"
    )


if __name__ == "__main__":
    main()
