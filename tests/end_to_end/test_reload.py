"""``serve --reload``: what changes in files is served soon, without a failed request, and what is broken is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.running import Running, serve, wait_for

MODEL = """
from headwater import Model, Tensor

from factors import FACTOR


class Times(Model):
    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __call__(self, x):
        return {"y": x * FACTOR}
"""
X = {"name": "x", "datatype": "FP32", "shape": [1]}
ADDED = {
    "model": "plain:negative", "warmup_batch_sizes": [1],
    "options": {"inputs": [X], "outputs": [{**X, "name": "y"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's code: a model, a module that it imports, and a function."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "times.py").write_text(MODEL)
    (folder / "factors.py").write_text("FACTOR = 2\n")
    (folder / "plain.py").write_text("def negative(x):\n    return -x\n")
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """The model, on a server that reloads."""
    config = {"deployments": {"times": {"model": "times:Times", "warmup_batch_sizes": [1]}}}
    with serve(config, cwd=folder, arguments=("--reload",)) as running:
        yield running


def answer(running: Running, model: str = "times") -> Any:
    """What the model makes of 1; the text of an error."""
    response = running.infer(model, [1], shape=[1, 1])
    return response.json()["outputs"][0]["data"][0] if response.status_code == 200 else response.text


def change(running: Running, **deployments: Any) -> None:
    """Rewrite the configuration with these deployments, in one go."""
    path = running.folder.parent / "config.yaml"
    content = yaml.safe_load(path.read_text())
    content["deployments"] = deployments
    other = path.with_name("new.yaml")
    other.write_text(yaml.safe_dump(content))
    other.replace(path)


def test_an_edit_is_served_without_a_failed_request(running: Running, folder: Path) -> None:
    assert answer(running) == 2
    answers: list[Any] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(answer(running))

    client = threading.Thread(target=ask)
    client.start()
    try:
        (folder / "factors.py").write_text("FACTOR = 3\n")
        wait_for(lambda: answers and answers[-1] == 3, 60, "the new answer")
    finally:
        done.set()
        client.join()
    assert set(answers) == {2, 3}
    assert answers == sorted(answers)


def test_what_is_broken_is_said_and_the_old_serves_on(running: Running, folder: Path) -> None:
    (folder / "factors.py").write_text("FACTOR = (\n")
    wait_for(lambda: "times: reload failed: " in running.log.read_text(), 60, "the log to say why")
    assert "SyntaxError" in running.log.read_text()
    assert answer(running) == 3
    (folder / "factors.py").write_text("FACTOR = 4\n")
    wait_for(lambda: answer(running) == 4, 60, "the new answer")


def test_the_configuration_is_read_again(running: Running) -> None:
    times = {"model": "times:Times", "warmup_batch_sizes": [1]}
    change(running, times={**times, "no_such_field": 1})
    wait_for(lambda: "no_such_field" in running.log.read_text(), 60, "the log to say why")
    assert "keeping the previous configuration" in running.log.read_text()
    assert answer(running) == 4

    change(running, times=times, negative=ADDED)
    wait_for(lambda: answer(running, "negative") == -1, 60, "the added model")
    assert answer(running) == 4

    change(running, negative=ADDED)
    wait_for(lambda: "unknown" in str(answer(running)), 60, "the removed model to be gone")
    assert answer(running, "negative") == -1


def test_a_server_of_which_nothing_can_be_loaded_waits_for_the_code(running: Running, folder: Path) -> None:
    change(running, late={**ADDED, "model": "late:negative"})
    wait_for(lambda: "unknown" in str(answer(running, "negative")), 60, "the other model to be gone")
    assert running.index("late")["state"] == "FAILED"
    (folder / "late.py").write_text("def negative(x):\n    return -x\n")
    wait_for(lambda: answer(running, "late") == -1, 60, "the model")
