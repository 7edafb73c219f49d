"""Files of torch and functions behind the server, as the guide shows them; and a TorchScript file."""

from __future__ import annotations

import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.pages import section
from tests.running import Running, serve

POINT = [5.1, 3.5, 1.4, 0.2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's files; each code block's first line names its own. Its commands are run there."""
    folder = tmp_path_factory.mktemp("guide")
    *files, console, alone = section("guide.md", "A file or a function instead of a class")
    assert [block.file for block in files] == ["export.py", "my_functions.py", "files.yaml"]
    for block in files:
        (folder / block.file).write_text(block.text)
    commands = [command.line for command in console.commands]
    assert commands == ["python export.py", "headwater check files.yaml", "headwater serve files.yaml"]
    _, _, *one_command = shlex.split(alone.commands[0].line)
    for arguments in (
        ["export.py"],
        ["-m", "headwater_server", "check", *one_command],
        ["-m", "headwater_server", "check", "files.yaml"],
    ):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "ready to serve" in done.stdout
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """What the guide serves, and the same classifier as TorchScript."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(dim=-1))
    net.load_state_dict(torch.export.load(folder / "classifier.pt2").state_dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jit: Any = torch.jit  # it has no types
        jit.save(jit.trace(net, torch.zeros(2, 4)), folder / "classifier.pt")
    config = yaml.safe_load((folder / "files.yaml").read_text())
    tensors = {
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [4]}],
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [3]}],
    }
    config["deployments"]["script"] = {"model": "torch:classifier.pt", "options": tensors}
    for deployment in config["deployments"].values():
        deployment.update(threads=1, batching={"max_batch_size": 4})
    with serve(config, cwd=folder) as running:
        yield running


def scores(running: Running, model: str) -> list[float]:
    response = running.infer(model, [POINT], shape=[1, 4], name="input")
    assert response.status_code == 200, response.text
    found: list[float] = response.json()["outputs"][0]["data"]
    return found


def test_files_answer_as_torch_does(running: Running, folder: Path) -> None:
    with torch.no_grad():
        expected = torch.export.load(folder / "classifier.pt2").module()(torch.tensor([POINT, POINT]))[0].tolist()
    metadata = running.get("/v2/models/classifier").json()
    assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
    assert [one["name"] for one in metadata["outputs"]] == ["scores"]
    for model in ("classifier", "script"):
        assert scores(running, model) == pytest.approx(expected, abs=1e-6)


def test_a_function_answers_by_its_arguments(running: Running) -> None:
    tensors = [{"name": name, "datatype": "FP32", "shape": [2, 1], "data": data} for name, data in
               (("a", [3, 5]), ("b", [4, 12]))]  # fmt: skip
    response = running.client.post(f"{running.url}/v2/models/hypotenuse/infer", json={"inputs": tensors})
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    assert (output["name"], output["data"]) == ("c", [5, 13])
