"""What a PyTriton script binds, found as Headwater finds it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["found_in"]


def found_in(script: Path, **variables: str) -> dict[str, Any]:
    """What is found of a script.

    Args:
        script: its file.
        variables: of the process's environment, in addition.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "headwater.replica.bindings"],
        input=json.dumps({"path": str(script), "working_dir": str(script.parent)}),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    finding: dict[str, Any] = json.loads(ended.stdout)
    return finding
