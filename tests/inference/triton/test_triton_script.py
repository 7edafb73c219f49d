"""A ``model.py`` of Triton's Python backend that runs in a deployment's own host process."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.errors import BadInput, BadOutput
from headwater.signature import REQUEST, Signature
from headwater.triton.backend_utils import TritonModelException
from headwater.triton.triton_script import TritonScript

HEAD = "import json\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"
SUMS = """
class TritonPythonModel:
    def initialize(self, args):
        self.calls = 0
        config = json.loads(args["model_config"])
        self.offset = float(config["parameters"]["offset"]["string_value"])
        assert pb_utils.get_model_dir() == args["model_repository"] + "/" + args["model_version"]

    def execute(self, requests):
        self.calls += 1
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            scale = json.loads(request.parameters()).get("scale", 1)
            if (x < 0).any():
                code = pb_utils.TritonError.NOT_FOUND if x.min() > -5 else pb_utils.TritonError.INTERNAL
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative", code)))
                continue
            place = np.full((len(x), 1), self.calls * 10 + len(requests), np.int32)
            total = (x + self.offset).sum(1, keepdims=True) * scale
            tensors = [pb_utils.Tensor("total", total.astype(np.float32)), pb_utils.Tensor("place", place)]
            answers.append(pb_utils.InferenceResponse(tensors))
        return answers
"""
CONFIG = {
    "name": "sums",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [
        {"name": "total", "data_type": "TYPE_FP32", "dims": [1]},
        {"name": "place", "data_type": "TYPE_INT32", "dims": [1]},
    ],
    "parameters": {"offset": {"string_value": "1"}},
    "dynamic_batching": {},
}


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = dict(sys.modules)
    yield
    sys.modules.clear()
    sys.modules.update(modules)


def script(folder: Path, source: str = SUMS, *, options: dict[str, Any] | None = None, **changes: Any) -> TritonScript:
    path = folder / "sums" / "1" / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + textwrap.dedent(source))
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    model: TritonScript = type("Sums", (TritonScript,), {"path": str(path), "config": config})(**(options or {}))
    model.load("cpu")
    return model


def ask(model: TritonScript, rows: list[list[float]], requests: list[str]) -> dict[str, Any]:
    outputs = model({REQUEST: requests}, x=np.array(rows, np.float32))
    return {name: array.tolist() for name, array in outputs.items()}


def test_requests_of_a_call_are_one_call_of_execute_with_their_parameters(tmp_path: Path) -> None:
    model = script(tmp_path)
    rows = ask(model, [[1, 2], [3, 4], [5, 6]], ["1 ", "1 ", '2 {"scale": 2}'])
    assert rows == {"total": [[5], [9], [26]], "place": [[12], [12], [12]]}


def test_without_dynamic_batching_execute_gets_one_request(tmp_path: Path) -> None:
    rows = ask(script(tmp_path, dynamic_batching=None), [[1, 2], [3, 4], [5, 6]], ["1 ", "1 ", "2 "])
    assert rows["place"] == [[11], [11], [21]]


@pytest.mark.parametrize(("value", "kind"), [(-1, BadInput), (-9, TritonModelException)])
def test_an_error_of_a_response_is_raised_with_the_status_of_its_code(tmp_path: Path, value: float, kind: type) -> None:
    with pytest.raises(kind, match="negative") as caught:
        ask(script(tmp_path), [[value, 2]], ["1 "])
    assert getattr(caught.value, "status", 404) == 404


def test_tensors_have_the_names_types_and_labels_of_the_configuration(tmp_path: Path) -> None:
    model = script(tmp_path, options={"rename": {"total": "sum"}})
    signature = Signature.of(model, name="sums", max_batch_size=4)
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [("x", "FP32", (2,))]
    assert [spec.name for spec in signature.outputs] == ["sum", "place"]
    assert ask(model, [[1, 2]], ["1 "])["sum"] == [[5]]


def test_a_whole_request_is_a_call_and_its_shapes_have_the_batch_axis(tmp_path: Path) -> None:
    model = script(tmp_path, options={"batch": "none"})
    assert [spec.shape for spec in Signature.of(model, name="sums", max_batch_size=4).inputs] == [(-1, 2)]
    assert model({REQUEST: "1 "}, x=np.ones((3, 2), np.float32))["total"].tolist() == [[4]] * 3
    with pytest.raises(BadInput, match="at most 4 rows in a request, got 5"):
        model({REQUEST: "1 "}, x=np.ones((5, 2), np.float32))


def test_reshaped_tensors(tmp_path: Path) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            x = requests[0].inputs()[0].as_numpy()
            assert x.shape == (1, 2, 2)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x.sum((1, 2)))])]
    """
    tensors: dict[str, Any] = {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4], "reshape": {"shape": [2, 2]}}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}],
    }
    assert ask(script(tmp_path, source, **tensors), [[1, 2, 3, 4]], ["1 "]) == {"y": [[10]]}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("[]", TritonModelException, "expected a list of 1 responses"),
        ("[None]", TritonModelException, "returned None for this request"),
        ("[pb_utils.InferenceResponse([])]", BadOutput, "no output 'total'"),
        ("[pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name='m').exec()]",
         TritonModelException, "there is no Triton to ask"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_named(tmp_path: Path, answer: str, kind: type[Exception], words: str) -> None:
    source = f"class TritonPythonModel:\n    def execute(self, requests):\n        return {answer}\n"
    with pytest.raises(kind, match=words):
        ask(script(tmp_path, source), [[1, 2]], ["1 "])


def test_fewer_rows_than_the_request_are_named(tmp_path: Path) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            total = pb_utils.Tensor("total", np.zeros((1, 1), np.float32))
            return [pb_utils.InferenceResponse([total, pb_utils.Tensor("place", np.zeros((1, 1), np.int32))])]
    """
    with pytest.raises(BadOutput, match=r"output 'total': expected 2 rows, got shape \[1, 1\]"):
        ask(script(tmp_path, source), [[1, 2], [3, 4]], ["1 ", "1 "])


def test_the_end_runs_finalize_and_the_log_names_the_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    source = """
    class TritonPythonModel:
        def finalize(self):
            pb_utils.Logger.log_warn("ended")
    """
    script(tmp_path, source).unload()
    assert capfd.readouterr().err == "WARNING model sums: ended\n"


def test_after_its_end_another_script_finds_its_own_helper(tmp_path: Path) -> None:
    source = """
    import helper

    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(helper.NAME))]
    """
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "sums" / "1").mkdir(parents=True)
        (folder / "sums" / "1" / "helper.py").write_text(f"NAME = {name!r}")
        model = script(folder, source)
        with pytest.raises(TritonModelException, match=name):
            ask(model, [[1, 2]], ["1 "])
        model.unload()
