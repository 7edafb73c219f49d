"""What a script's run before the replicas finds, and that it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import threading
import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

class Learner(threading.Thread):
    def __init__(self):
        super().__init__()
        self.ends = threading.Event()
    def run(self):
        self.ends.wait()
    def train(self, requests):
        return requests
    def infer(self, requests):
        return requests

learner = Learner()
learner.start()
try:
    with Triton() as triton:
        for name, function in (("Train", learner.train), ("Predict", learner.infer)):
            x = [Tensor(name="x", dtype=np.float32, shape=(1,))]
            triton.bind(name, function, x, [Tensor(name="y", dtype=np.float32, shape=(1,))], config=ModelConfig())
        triton.serve()
finally:
    learner.ends.set()
"""


def _find(path: Path) -> dict[str, Any]:
    request = {"path": str(path), "working_dir": str(path.parent)}
    ended = subprocess.run(
        [sys.executable, "-m", "headwater.replica.bindings"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    finding: dict[str, Any] = json.loads(ended.stdout)
    return finding


def test_threads_that_the_script_ends_itself_do_not_hold_up_its_run_and_shared_objects_are_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "server.py").write_text(SCRIPT)
    finding = _find(tmp_path / "server.py")
    assert list(finding["settings"]) == ["Train", "Predict"]
    (warning,) = finding["warnings"]
    assert warning.startswith("Train and Predict share Learner, of which each has one of its own here")
