"""What the cases of every client use. It runs in their environments: standard library only."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["GRPC", "KEY", "KEYED_GRPC", "OBEDIENT", "TOKENIZER", "URL", "command", "raised", "run", "script"]

_Error = TypeVar("_Error", bound=Exception)

URL = os.environ["HEADWATER_URL"]
TOKENIZER = os.environ["HEADWATER_TOKENIZER"]
"""The folder of tiny-lm."""
GRPC = os.environ["HEADWATER_GRPC"]
"""The server's address for gRPC."""
KEYED_GRPC, KEY = os.environ["HEADWATER_KEYED_GRPC"], os.environ["HEADWATER_KEY"]
"""The address of a server that requires keys, and a key of it, which may ask for inference."""

OBEDIENT = "obedient"
"""A model that reasons and calls tools, and answers by the prompt's `script`."""


def script(*steps: str | list[tuple[str, dict[str, Any]]]) -> str:
    """The text that a prompt must have for these answers of `OBEDIENT`, in order. No client escapes its characters.

    Args:
        steps: an answer's text, in which ``{result}`` stands for the last message of a tool or the user; or its calls:
            the name and arguments of each.
    """
    return f"script.{base64.urlsafe_b64encode(json.dumps(steps).encode()).decode().rstrip('=')}.end"


def run(*cases: Callable[[], object]) -> None:
    """Run cases, each of which passes unless it raises."""
    for case in cases:
        error = None
        try:
            case()
        except Exception:
            error = traceback.format_exc(limit=-4)
        print(json.dumps({"case": case.__name__, "error": error}), flush=True)


def raised(kind: type[_Error], ask: Callable[..., object], **arguments: Any) -> _Error:
    """The error that a call must raise."""
    try:
        ask(**arguments)
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def command(name: str, *arguments: str, folder: str) -> str:
    """Run a command of this environment in a folder; returns what it printed."""
    environment = {**os.environ, "COLUMNS": "200", "HOME": folder}
    ended = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, f"{name} ended with {ended.returncode}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    return ended.stdout
