"""What a script's run before the replicas finds, and that it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference.bindings import found_in

pytestmark = pytest.mark.heavy
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


def test_threads_that_the_script_ends_itself_do_not_hold_up_its_run_and_shared_objects_are_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "server.py").write_text(SCRIPT)
    finding = found_in(tmp_path / "server.py")
    assert list(finding["settings"]) == ["Train", "Predict"]
    (warning,) = finding["warnings"]
    assert warning.startswith("Train and Predict share Learner, but each model has a copy here")
