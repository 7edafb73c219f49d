"""Models under other versions of Python, with numpy 1.26 and the newest: the same answers as under Headwater's Python.

The interpreters are those installed beside the one that runs the tests; their packages come from the package index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton

from examples.training.export_digit_head import ONNX_FILE
from headwater.datatypes import DATATYPES
from tests.running import Running, leaves_nothing, wait_for

OLD_NUMPY = "numpy==1.26.4"
NEWEST = "numpy"
VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False], "UINT8": [0, 255], "UINT16": [0, 65_535], "UINT32": [0, 2**32 - 1], "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127], "INT16": [-(2**15), 2**15 - 1], "INT32": [-(2**31), 2**31 - 1], "INT64": [-(2**63), 2**63 - 1],
    "FP16": [65_504.0, 5.960464477539063e-08], "BF16": [1.5, -0.0], "FP32": [1.401298464324817e-45, 0.1],
    "FP64": [5e-324, 1.7976931348623157e308], "BYTES": [b"", b"gr\xfc\x00\xff"],
}  # fmt: skip


def interpreters() -> dict[str, Path]:
    """The CPythons that are installed beside this one and can run models, the newest of each version."""
    found: dict[tuple[int, ...], Path] = {}
    for path in Path(sys.base_prefix).resolve().parent.glob("*/bin/python3"):
        if match := re.fullmatch(r"(?:cpython-)?(3)\.(\d+)\.(\d+).*", path.parents[1].name):
            found[tuple(map(int, match.groups()))] = path
    newest = {version[:2]: path for version, path in sorted(found.items()) if version[1] >= 10}
    return {f"{major}.{minor}": path for (major, minor), path in newest.items()}


def wanted() -> dict[str, tuple[Path, str]]:
    """Interpreter and numpy, by a name for the deployment."""
    environments = {f"p{version.replace('.', '')}": (path, NEWEST) for version, path in interpreters().items()}
    oldest = next(iter(interpreters().items()), None)
    return environments if oldest is None else {**environments, "old-numpy": (oldest[1], OLD_NUMPY)}


WANTED = wanted()


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An environment for each Python, with numpy, msgspec and ONNX Runtime."""
    folder = tmp_path_factory.mktemp("pythons")

    def make(name: str) -> Path:
        path, numpy = WANTED[name]
        environment = folder / name
        subprocess.run([str(path), "-m", "venv", "--without-pip", str(environment)], check=True, timeout=300)
        python = environment / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
        command = [*pip, "--no-compile", "--only-binary=:all:", numpy, "msgspec", "onnxruntime"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"no packages for {path}: {done.stderr[-300:]}")
        return python

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(WANTED, pool.map(make, WANTED), strict=True))


@pytest.fixture(scope="module")
def running(pythons: dict[str, Path]) -> Iterator[Running]:
    """A server with a model under each Python, and pipelines and a stream of several."""
    if len(interpreters()) < 2:
        pytest.skip("no other Python is installed beside this one")
    first, *_, last = [str(python) for name, python in pythons.items() if name != "old-numpy"]
    mirror = {"model": "typed:Mirror", "warmup_batch_sizes": [1]}
    onnx_head = {"model": f"onnx:{ONNX_FILE}", "threads": 1, "warmup_batch_sizes": [1]}
    head = {"model": "light:Head", "options": {"output": "y"}, "inputs": {"features": "trunk.features"}}
    next_head = {"model": "light:Head", "options": {"output": "z"}, "inputs": {"features": "y.y"}}
    steps = {"trunk": {"model": "light:Trunk"}, "heads": {"y": head, "z": next_head}}
    graph = {"trunk": {"model": "light:Trunk", "python": first}, "heads": {"y": {**head, "python": last}}}
    versions = {"1": {"python": first}, "2": {"python": last}}
    config = {
        "deployments": {
            "own": {**mirror, "python": "own"},
            **{name: {**mirror, "python": str(python)} for name, python in pythons.items()},
            "onnx-own": {**onnx_head, "python": "own"},
            **{f"onnx-{name}": {**onnx_head, "python": str(python)} for name, python in pythons.items()},
            "fused": {"pipeline": steps, "python": last},
            "graph": {"pipeline": {**graph, "placement": "graph"}},
            "pieces": {"model": "light:Pieces", "options": {"count": 3, "interval_s": 0.01}, "python": last},
            **{f"counting-{python}": {"model": "custom:Counting", "python": path}
               for python, path in (("first", first), ("last", last))},
            "told": {"model": "custom:Told", "python": last, "options": {"headers": ["x-user"]}},
            "versions": {"model": "interpreter:Interpreter", "versions": versions, "traffic": {"1": 1, "2": 0}},
        },
        "server": {"allow_load": "any"},
    }  # fmt: skip
    with leaves_nothing(config) as running:
        yield running


def mirrored(running: Running, model: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """What `typed:Mirror` answers to one row of each datatype: bytes, or elements of BYTES."""
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(f"in_{name.lower()}", list(array.shape), name))
        inputs[-1].set_data_from_numpy(array)
    with triton.InferenceServerClient(running.url.removeprefix("http://")) as client:
        result = client.infer(model, inputs)
        found = {one["name"]: result.as_numpy(one["name"]) for one in result.get_response()["outputs"]}
    return {name: array.tolist() if array.dtype == object else array.tobytes() for name, array in found.items()}


def check_mirror(running: Running, model: str) -> None:
    """Compare a model's answers with those under our own Python: every datatype, no element, and large tensors."""
    dtypes = {name: ml_dtypes.bfloat16 if name == "BF16" else datatype.numpy for name, datatype in DATATYPES.items()}
    full = {name: np.array([values], dtypes[name]) for name, values in VALUES.items()}
    empty = {name: array[:, :0] for name, array in full.items()}
    large = {name: np.linspace(-9, 9, 150_000).astype(dtypes[name])[None] for name in ("INT32", "FP32")}
    for arrays in (full, empty, large):
        assert mirrored(running, model, arrays) == mirrored(running, "own", arrays)
    told = mirrored(running, model, full)
    assert told["out_fp64"] == full["FP64"].tobytes()
    assert told["out_bytes"] == full["BYTES"].tolist()


@pytest.mark.parametrize("name", WANTED)
def test_answers_are_those_under_our_own_python(running: Running, name: str) -> None:
    check_mirror(running, name)
    (environment,) = running.index(name)["environments"]
    assert environment["versions"]["numpy"].startswith("1." if name == "old-numpy" else "2.")


@pytest.mark.parametrize("name", WANTED)
def test_an_onnx_file_under_another_python(running: Running, name: str) -> None:
    features = np.linspace(-2, 2, 3 * 64).tolist()
    scores = []
    for model in (f"onnx-{name}", "onnx-own"):
        answer = running.infer(model, features, shape=[3, 64], name="features")
        assert answer.status_code == 200, answer.text
        scores.append(answer.json()["outputs"][0]["data"])
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fused", "graph"])
def test_a_pipeline_under_other_pythons(running: Running, name: str) -> None:
    answer = running.infer(name, [1.0, 2.0, 3.0, 4.0], shape=[1, 4])
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    assert outputs["y"] == [3.0, 5.0, 7.0, 9.0]
    assert outputs.get("z") == {"fused": [4.0, 6.0, 8.0, 10.0], "graph": None}[name]


def test_a_stream_under_another_python(running: Running) -> None:
    url = f"{running.url}/v2/models/pieces/generate_stream"
    with httpx.stream("POST", url, json={"x": [1.0, 2.0, 3.0, 4.0]}, timeout=20) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert [event["piece"] for event in events if "piece" in event] == [[1.0, 2.0, 3.0, 4.0]] * 3


@pytest.mark.parametrize("python", ["first", "last"])
def test_custom_metrics_under_another_python(running: Running, python: str) -> None:
    assert running.infer(f"counting-{python}", [1.0, 2.0, -1.0], shape=[3, 1]).status_code == 200
    text = running.get("/metrics").text
    assert f'headwater_model_rows_total{{deployment="counting-{python}",sign="plus"}} 2.0' in text
    assert re.search(f'headwater_model_last{{deployment="counting-{python}",replica="[^"]+"}} -1.0', text)


def test_a_model_takes_requests_under_another_python(running: Running) -> None:
    answer = running.infer("told", ["a"], shape=[1, 1], datatype="BYTES", name="text")
    record = json.loads(answer.json()["outputs"][0]["data"][0])
    assert record["id"] == answer.headers["x-request-id"]


def executable(running: Running, path: str) -> str:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
    answer = running.client.post(f"{running.url}/v2/models/{path}/infer", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["outputs"][0]["data"][0])


def test_each_version_of_a_deployment_runs_under_its_python(running: Running, pythons: dict[str, Path]) -> None:
    first, *_, last = [str(python) for name, python in pythons.items() if name != "old-numpy"]
    for version in ("1", "2"):  # the model is ready without a version that gets no share
        wait_for(partial(running.is_ready, f"versions/versions/{version}"), 60, f"version {version}")
    assert executable(running, "versions/versions/1") == first
    assert executable(running, "versions/versions/2") == last


def test_a_reload_moves_a_model_to_another_python(running: Running, pythons: dict[str, Path]) -> None:
    name = next(iter(pythons))
    for python in ("own", str(pythons[name])):
        changed = {"parameters": {"config": json.dumps({"python": python})}}
        answer = running.client.post(f"{running.url}/v2/repository/models/{name}/reload", json=changed)
        assert answer.status_code == 200, answer.text
        check_mirror(running, name)
