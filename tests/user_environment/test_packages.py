"""A user's environment with the newest pandas, OpenCV, scikit-learn, SciPy, transformers and torch stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.running import serve

pytestmark = [pytest.mark.heavy, pytest.mark.user_environment]

SERVICES = Path(__file__).parent / "services"
TRAINING = str(SERVICES / "iris.py")
PACKAGES = {"pandas", "opencv-python-headless", "scikit-learn", "scipy", "transformers", "torch"}
MEASURES = [5.1, 3.5, 1.4, 0.2]


@pytest.fixture
def python() -> str:
    """The interpreter of a user's environment."""
    return str(Path(os.environ["HEADWATER_TEST_ENVIRONMENT"], "bin", "python"))


def said(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout


def test_a_model_uses_the_packages_of_an_environment_that_stays_the_same(python: str, tmp_path: Path) -> None:
    freeze = [python, "-m", "pip", "freeze"]
    before = said(freeze)
    assert {line.partition("==")[0] for line in before.splitlines()} >= PACKAGES
    assert "headwater" not in before
    said([python, TRAINING, str(tmp_path)])
    flowers = {"model": "flowers:Flowers", "options": {"folder": str(tmp_path)}, "warmup_batch_sizes": [1]}
    with serve({"deployments": {"flowers": flowers}}, cwd=SERVICES) as running:
        answer = running.infer("flowers", [MEASURES, MEASURES], shape=[2, 4])
        assert answer.status_code == 200, answer.text
        (environment,) = running.index("flowers")["environments"]
    expected = json.loads(said([python, TRAINING, str(tmp_path), *map(str, MEASURES)]))
    assert np.array(answer.json()["outputs"][0]["data"], np.float32).tolist() == [*expected, *expected]
    assert environment["versions"]["numpy"].startswith("2.")
    assert said(freeze) == before
