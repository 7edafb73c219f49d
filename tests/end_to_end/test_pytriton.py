"""PyTriton scripts, served unmodified: they answer as on PyTriton itself; and what docs/from-pytriton.md says."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.client.warnings import NotSupportedTimeoutWarning

from tests.bare_pytriton import Bare, serve_bare
from tests.pages import section
from tests.running import SERVICES, Running, serve, wait_for

SCRIPTS = SERVICES / "scripts"
EXAMPLES = {
    "Linear": "linear.py",
    "AddAndSub": "add_sub.py",
    "AddSubOptional": "add_sub_optional.py",
    "Identity": "identity.py",
    "ImageLabels": "image_labels.py",
    "TextLabel": "text_labels.py:TextLabel",
    "TextScores": "text_labels.py:TextScores",
    "Multiply2": "multiple_models.py:Multiply2",
    "Multiply4": "multiple_models.py:Multiply4",
    "Diffusion_1_5": "diffusion.py",
    "Video": "video.py",
    "Dialogue-small": "dialogue.py",
    "facebook_opt_125m": "engine.py",
    "Train": "online_learning.py:Train",
    "Predict": "online_learning.py:Predict",
    "Requests": "kinds.py:Requests",
    "Faulty": "kinds.py:Faulty",
    "Unbatched": "kinds.py:Unbatched",
}
"""The models of PyTriton's published examples, written anew, and of `kinds.py`; each with its script."""

Tensor = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """All scripts on Headwater, and two pipelines of their models."""
    deployments: dict[str, Any] = {name: {"model": f"pytriton:{script}"} for name, script in EXAMPLES.items()}
    deployments["Linear"]["python"] = "own"  # versions of torch differ in their messages
    twice = {"trunk": {"model": "pytriton:multiple_models.py:Multiply2"}}
    last = {"inputs": {"multiplicand": "trunk.product"}}
    deployments["fused"] = {
        "pipeline": {**twice, "heads": {"last": {"model": "pytriton:multiple_models.py:Multiply4", **last}}}
    }
    heads = {"last": {"deployment": "Multiply4", **last}}
    deployments["graph"] = {
        "pipeline": {"placement": "graph", "trunk": {"deployment": "Multiply2"}, "heads": heads}
    }  # fmt: skip
    with serve({"deployments": deployments}, cwd=SCRIPTS) as running:
        yield running


@pytest.fixture(scope="module")
def bare(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    """The scripts on PyTriton; it starts after Headwater, for two cores."""
    scripts = dict.fromkeys(SCRIPTS / script.partition(":")[0] for script in EXAMPLES.values())
    with serve_bare(list(scripts), EXAMPLES, tmp_path_factory.mktemp("bare") / "log") as bare:
        yield bare


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> Tensor:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _x(*values: float) -> Tensor:
    return _tensor("x", "FP32", [len(values), 1], list(values))


def _ask(url: str, model: str, *inputs: Tensor, **parameters: Any) -> httpx.Response:
    body = {"inputs": list(inputs), **({"parameters": parameters} if parameters else {})}
    return httpx.post(f"{url}/v2/models/{model}/infer", json=body, timeout=60)


def _outputs(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {one["name"]: (one["datatype"], one["shape"], one["data"]) for one in answer.json()["outputs"]}


MATRIX = _tensor("matrix", "FP32", [3, 2], [1, 2, 3, 4, 5, 6])
NESTED = _tensor("matrix", "FP32", [3, 2], [[1, 2], [3, 4], [5, 6]])
SCALE = _tensor("scale", "FP32", [1], [2])


def _numbers(*shape: int, dtype: str = "f4") -> NDArray[Any]:
    return np.random.default_rng(3).uniform(0, 200, shape).astype(dtype)


def _texts(*rows: Any) -> NDArray[Any]:
    """One text a row, or several."""
    lists = [row if isinstance(row, list) else [row] for row in rows]
    return np.char.encode(np.array(lists), "utf-8").astype(object)


@functools.lru_cache(maxsize=1)
def _cases() -> dict[str, tuple[str, Arrays]]:
    a, b = _numbers(2, 3), _numbers(2, 3)[::-1]
    one, shift = np.full((2, 1), 2, "f4"), np.array([[7], [8]], "f4")
    return {
        "linear": ("Linear", {"INPUT_1": _numbers(2, 20)}),
        "add_sub": ("AddAndSub", {"INPUT_1": a, "INPUT_2": b}),
        "optional, none": ("AddSubOptional", {"a": a, "b": b}),
        "optional, filled": ("AddSubOptional", {"a": a, "b": b, "shift": shift}),
        "optional, all": ("AddSubOptional", {"a": a, "b": b, "shift": shift, "weight": one}),
        "identity": ("Identity", {"INPUT_1": _numbers(2, 3, dtype="f8"), "INPUT_2": _texts("ab", "öc")}),
        "image labels": ("ImageLabels", {"image": _numbers(5, 3, 8, 8, dtype="f2") / 200}),
        "text label": ("TextLabel", {"sequence": _texts("a train and a song", "soup with salt", "eine über")}),
        "text scores": (
            "TextScores",
            {"sequence": _texts("soup", "a song"), "labels": _texts(["music", "cooking"], ["travel", "music"])},
        ),
        "two models, one": ("Multiply2", {"multiplicand": a}),
        "two models, other": ("Multiply4", {"multiplicand": a}),
        "diffusion": (
            "Diffusion_1_5",
            {"prompt": _texts("a", "b", "ü"), "img_size": np.array([[64], [16], [64]], np.int64)},
        ),
        "video": ("Video", {"video": _numbers(2, 96, dtype="u1")}),
        "online learning": ("Predict", {"values": _numbers(3, 4) / 200}),
    }


@pytest.mark.parametrize("name", list(_cases()))
def test_examples_answer_pytritons_client_as_on_pytriton(running: Running, bare: Bare, name: str) -> None:
    model, inputs = _cases()[name]
    answers = []
    for url in (running.url, bare.url):
        with ModelClient(url, model) as client:
            answers.append(client.infer_batch(**inputs))
    ours, theirs = answers
    assert set(ours) == set(theirs)
    for output, expected in theirs.items():
        assert (ours[output].dtype, ours[output].shape) == (expected.dtype, expected.shape)
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(ours[output], expected, rtol=1e-6)
        else:
            np.testing.assert_array_equal(ours[output], expected)


@pytest.mark.parametrize(
    ("model", "inputs", "parameters"),
    [
        ("Requests", [_x(1, 2)], {}),
        ("Requests", [_x(1, 2)], {"factor": 3}),
        ("Requests", [_x(1, 2)], {"factor": "3"}),
        ("Requests", [_x(1, 2)], {"unknown": True}),
        ("Faulty", [_x(1, 2)], {}),
        ("Unbatched", [MATRIX, SCALE], {}),
        ("Unbatched", [NESTED, SCALE], {}),
        ("TextLabel", [_tensor("sequence", "BYTES", [1, 1], ["a song"])], {}),
    ],
)
def test_answers_to_json_are_pytritons(
    running: Running, bare: Bare, model: str, inputs: list[Tensor], parameters: dict[str, Any]
) -> None:
    assert _outputs(_ask(running.url, model, *inputs, **parameters)) == _outputs(
        _ask(bare.url, model, *inputs, **parameters)
    )


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        *(("Faulty", [_x(value)]) for value in (-1, -2, -3, -4)),
        ("Linear", [_tensor("INPUT_1", "FP32", [1, 2], [1, 2])]),
        ("TextLabel", [_tensor("sequence", "BYTES", [1, 1], [""])]),
        ("AddAndSub", [_tensor("INPUT_1", "FP32", [1, 2], [1, 2]), _tensor("INPUT_2", "FP32", [1, 3], [1, 2, 3])]),
    ],
)
def test_errors_are_pytritons_without_the_traceback(
    running: Running, bare: Bare, model: str, inputs: list[Tensor]
) -> None:
    ours, theirs = _ask(running.url, model, *inputs), _ask(bare.url, model, *inputs)
    assert ours.status_code == theirs.status_code == 500
    message = ours.json()["error"]
    assert "Traceback" not in message
    kind, _, text = message.partition(": ")
    assert f"{kind}: {text.strip()}" in theirs.json()["error"]


@pytest.mark.parametrize(
    ("model", "inputs", "status"),
    [
        ("AddAndSub", [_tensor("INPUT_1", "FP32", [1, 2], [1, 2])], 400),
        ("AddAndSub", [_tensor("INPUT_1", "FP32", [1, 1], [1]), _tensor("b", "FP32", [1, 1], [1])], 400),
        ("Train", [_tensor("values", "FP32", [1, 3], [1, 2, 3]), _tensor("target", "INT64", [1, 1], [1])], 400),
        ("Train", [_tensor("values", "INT32", [1, 4], [1] * 4), _tensor("target", "INT64", [1, 1], [1])], 400),
        ("Missing", [_x(1)], 404),
    ],
)
def test_what_a_script_never_sees_is_refused_with_pytritons_status(
    running: Running, bare: Bare, model: str, inputs: list[Tensor], status: int
) -> None:
    ours, theirs = _ask(running.url, model, *inputs), _ask(bare.url, model, *inputs)
    assert (ours.status_code, theirs.status_code) == (status, status), (ours.text, theirs.text)


def test_a_model_that_streams_does_not_answer_whole(running: Running, bare: Bare) -> None:
    asked = "Dialogue-small", _tensor("new_inputs", "BYTES", [1, 1], ["a"])
    assert (_ask(running.url, *asked).status_code, _ask(bare.url, *asked).status_code) == (400, 501)


def test_an_error_reaches_pytritons_client(running: Running, bare: Bare) -> None:
    for url in (running.url, bare.url):
        with (
            ModelClient(url, "TextLabel") as client,
            pytest.raises(PyTritonClientInferenceServerError, match="ValueError: a text without words can't be"),
        ):
            client.infer_batch(sequence=_texts(""))


def _events(url: str, model: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{url}/v2/models/{model}/generate_stream", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [json.loads(event) for event in re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)]


def _responses(bare: Bare, model: str, ask: Callable[[Any], Iterator[Any]]) -> list[Arrays]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotSupportedTimeoutWarning)  # of its own default
        with DecoupledModelClient(bare.grpc_url, model) as client:
            return list(ask(client))


@pytest.mark.parametrize("fields", [{"new_inputs": "one two three"}, {"new_inputs": " c", "chat_history": "a b"}])
def test_a_stream_is_what_pytritons_decoupled_client_gets(running: Running, bare: Bare, fields: dict[str, str]) -> None:
    batch = {name: _texts(text) for name, text in fields.items()}
    theirs = _responses(bare, "Dialogue-small", lambda client: client.infer_batch(**batch))
    words = [one["response"][0, 0].decode() for one in theirs]
    *events, end = _events(running.url, "Dialogue-small", fields)
    assert [event["response"] for event in events] == words
    assert len(words) == 3
    assert end["final"] is True


def test_an_error_within_a_stream_is_pytritons(running: Running, bare: Bare) -> None:
    said, error, _ = _events(running.url, "Dialogue-small", {"new_inputs": "stop now"})
    assert said["response"] == "now"
    assert (error["status"], error["error"]) == (500, "model `Dialogue-small`: RuntimeError: told to stop")
    ask = {"new_inputs": _texts("stop now")}
    with pytest.raises(PyTritonClientInferenceServerError, match="RuntimeError: told to stop"):
        _responses(bare, "Dialogue-small", lambda client: client.infer_batch(**ask))


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "hi"}, {"prompt": "hü", "stream": True, "n": 2}, {"prompt": "hi", "max_tokens": 2, "temperature": 0.5}],
)
def test_an_engines_answers_are_pytritons(running: Running, bare: Bare, fields: dict[str, Any]) -> None:
    types = {"stream": np.bool_, "n": np.int32, "max_tokens": np.int32, "temperature": np.float32}
    sample = {
        name: np.array([value], types[name]) if name in types else np.array([str(value).encode()], object)
        for name, value in fields.items()
    }
    theirs = _responses(bare, "facebook_opt_125m", lambda client: client.infer_sample(**sample))
    texts = [[text.decode() for text in one["text"].ravel()] for one in theirs]
    *events, _ = _events(running.url, "facebook_opt_125m", fields)
    ours = [event["text"] if isinstance(event["text"], list) else [event["text"]] for event in events]
    assert ours == texts
    assert len(ours) == (3 if "stream" in fields else 1)


def test_what_models_share_on_pytriton_they_have_apart_here_and_the_log_says_so(running: Running, bare: Bare) -> None:
    values, target = _numbers(8, 4) / 200, np.arange(8).reshape(8, 1) % 2

    def predicted(url: str) -> NDArray[Any]:
        with ModelClient(url, "Predict") as client:
            predictions: NDArray[Any] = client.infer_batch(values=values)["predictions"]
            return predictions

    def has_learned(url: str) -> bool:
        with ModelClient(url, "Train") as client:
            return bool(client.infer_batch(values=values, target=target)["last_loss"].all())

    before = predicted(running.url)
    for url in (running.url, bare.url):
        wait_for(lambda url=url: has_learned(url), what="a loss")  # type: ignore[misc]
    assert not np.allclose(predicted(bare.url), before)
    np.testing.assert_array_equal(predicted(running.url), before)
    assert running.log.read_text().count("online_learning.py: Train and Predict share OnlineLearning, but each") == 1


@pytest.mark.parametrize("pipeline", ["fused", "graph"])
def test_a_scripts_models_are_steps_of_pipelines(running: Running, pipeline: str) -> None:
    tensor = _tensor("multiplicand", "FP32", [2, 2], [1, 2, 3, 4])
    assert _outputs(_ask(running.url, pipeline, tensor))["product"][2] == [8, 16, 24, 32]
    sizes = {"fused": 8, "graph": 32}  # a graph's steps have sizes of their own
    assert running.get(f"/v2/models/{pipeline}/config").json()["max_batch_size"] == sizes[pipeline]


def test_requests_that_share_a_call_stay_apart(running: Running) -> None:
    """They wait 0.2 s for one another, as the script says."""
    sizes = [1, 2, 3, 1]
    with ThreadPoolExecutor(len(sizes)) as pool:
        answers = list(pool.map(lambda size: _ask(running.url, "Requests", _x(*[size] * size), factor=size), sizes))
    for size, answer in zip(sizes, answers, strict=True):
        outputs = _outputs(answer)
        assert outputs["y"][2] == [size * size if size > 1 else 1] * size
        assert outputs["rows"][2] == [size] * size
    stats = running.get("/v2/models/Requests/stats").json()["model_stats"][0]
    assert any(batch["batch_size"] > max(sizes) for batch in stats["batch_stats"])


def test_the_deployments_are_set_as_the_script_says(running: Running) -> None:
    def config(model: str) -> dict[str, Any]:
        answer: dict[str, Any] = running.get(f"/v2/models/{model}/config").json()
        return answer

    assert config("Requests")["max_batch_size"] == 16
    assert config("Requests")["dynamic_batching"]["max_queue_delay_microseconds"] == 200_000
    assert config("ImageLabels")["instance_group"][0]["count"] == 2
    assert config("ImageLabels")["max_batch_size"] == 32
    assert config("Dialogue-small")["max_batch_size"] == 4  # PyTriton's default
    assert config("AddAndSub")["parameters"] == {}


def test_pytritons_client_sends_a_sample(running: Running, bare: Bare) -> None:
    for url in (running.url, bare.url):
        with ModelClient(url, "Unbatched") as client:
            sample = client.infer_sample(matrix=np.array([[1, 2], [3, 4]], "f4"), scale=np.array([2], "f4"))
        assert sample["sums"].tolist() == [6, 14]


def test_a_parameter_that_is_no_scalar_is_refused(running: Running) -> None:
    answer = _ask(running.url, "Requests", _x(1), factor=[1])
    assert answer.status_code == 400
    assert "parameters.factor: expected a text, a number" in answer.json()["error"]


def test_what_has_no_effect_is_said_once(running: Running) -> None:
    assert running.log.read_text().count("kinds.py: TritonConfig: log_verbose=0 has no effect") == 1


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    script, serving, asking = section("from-pytriton.md", "From PyTriton")
    (config,) = section("from-pytriton.md", "In a configuration")
    model, checking = section("from-pytriton.md", "As a `Model` class")
    for block in (script, config, model):
        (tmp_path / block.file).write_text(block.text)
    ((_, served, _),) = serving.commands
    ((_, asked, printed),) = asking.commands
    ((_, checked, _),) = checking.commands
    assert served.startswith("headwater serve ")
    assert checked.startswith("headwater check ")

    for what in (checked.split()[-1], "serve.yaml"):
        command = [sys.executable, "-m", "headwater_server", "check", what, "--port", "0"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "ready to serve" in ended.stdout
    assert yaml.safe_load(config.text)["deployments"]["add-sub"]["batching"]["max_batch_size"] == 64

    with serve({}, what=served.split()[-1], cwd=tmp_path) as running:
        curl = [part.replace("http://127.0.0.1:8000", running.url) for part in shlex.split(asked.replace("\\\n", ""))]
        assert subprocess.run(curl, capture_output=True, text=True, check=True).stdout.strip() == printed
