"""Models of Triton's onnxruntime and pytorch backends, as models of the Python backend."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.triton.backend_utils import (
    InferenceRequest,
    InferenceResponse,
    ModelConfig,
    Tensor,
    TritonModelException,
)
from headwater.triton.file_models import FileModel, OnnxFile, TorchScriptFile

pytestmark = pytest.mark.heavy


def loaded(kind: type[FileModel], path: Path, config: dict[str, Any]) -> FileModel:
    model = type("Loaded", (kind,), {"path": str(path)})()
    model.initialize({"model_config": json.dumps(config)})
    assert isinstance(model, FileModel)
    return model


def ask(model: FileModel, *requests: dict[str, Any]) -> list[InferenceResponse]:
    return model.execute(
        [
            InferenceRequest(
                inputs=[Tensor(name, np.asarray(array)) for name, array in request.items()],
                requested_output_names=["y"],
                model_name="m",
            )
            for request in requests
        ]
    )


def values(response: InferenceResponse) -> dict[str, Any]:
    error = response.error()
    assert error is None, error.message()
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


def io(name: str, datatype: str = "TYPE_FP32") -> dict[str, Any]:
    return {"name": name, "data_type": datatype, "dims": [2]}


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = x / z, rows of two."""
    import onnx
    from onnx import TensorProto, helper

    x, y, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 2]) for name in "xyz")
    graph = helper.make_graph([helper.make_node("Div", ["x", "z"], ["y"])], "g", [x, z], [y])
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


ONNX = {"max_batch_size": 8, "input": [io("x"), io("z")], "output": [io("y")]}


class TestOnnx:
    def test_requests_are_computed_together_and_divided(self, onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = loaded(OnnxFile, onnx_file, ONNX)
        sizes: list[int] = []
        compute = model.compute

        def counted(inputs: dict[str, Any]) -> dict[str, Any]:
            sizes.append(len(inputs["x"]))
            return compute(inputs)

        monkeypatch.setattr(model, "compute", counted)
        ones = np.ones((2, 2), np.float32)
        answers = ask(model, {"x": ones * 4, "z": ones * 2}, {"x": ones[:1] * 9, "z": ones[:1] * 3})
        assert [values(answer)["y"] for answer in answers] == [[[2, 2], [2, 2]], [[3, 3]]]
        assert sizes == [3]

    def test_a_wrong_request_fails_alone(self, onnx_file: Path) -> None:
        model = loaded(OnnxFile, onnx_file, ONNX)
        right = {"x": np.ones((1, 2), np.float32), "z": np.ones((1, 2), np.float32)}
        wrong = {"x": np.ones((1, 3), np.float32), "z": np.ones((1, 3), np.float32)}
        good, bad = ask(model, right, wrong)
        assert values(good) == {"y": [[1, 1]]}
        error = bad.error()
        assert error is not None
        assert "Got invalid dimensions" in error.message()

    def test_the_file_completes_a_configuration(self, onnx_file: Path) -> None:
        kind = type("Loaded", (OnnxFile,), {"path": str(onnx_file)})
        batched = kind.auto_complete_config(ModelConfig({"max_batch_size": 4})).as_dict()  # type: ignore[attr-defined]
        assert batched["input"] == [io("x"), io("z")]
        assert batched["output"] == [io("y")]
        whole = kind.auto_complete_config(ModelConfig({})).as_dict()  # type: ignore[attr-defined]
        assert whole["input"][0]["dims"] == [-1, 2]
        given = {"input": [io("x")], "output": [io("y")]}
        assert kind.auto_complete_config(ModelConfig(dict(given))).as_dict() == given  # type: ignore[attr-defined]

    def test_another_name_is_refused(self, onnx_file: Path) -> None:
        with pytest.raises(TritonModelException, match="output 'w': the file has only 'y'"):
            loaded(OnnxFile, onnx_file, {**ONNX, "output": [io("w")]})


@pytest.fixture(scope="module")
def script_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sum and the difference of two tensors."""
    import torch

    class Sums(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b, a - b

    path = tmp_path_factory.mktemp("script") / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # people's files are older
        jit: Any = torch.jit  # it has no types
        jit.save(jit.trace(Sums(), (torch.ones(2), torch.ones(2))), path)
    return path


class TestTorchScript:
    def test_inputs_have_names_or_places(self, script_file: Path) -> None:
        config = {"max_batch_size": 8, "input": [io("INPUT__1"), io("a")], "output": [io("Y__1"), io("Y__0")]}
        model = loaded(TorchScriptFile, script_file, config)
        rows = np.ones((1, 2), np.float32)
        answers = ask(model, {"INPUT__1": rows, "a": rows * 3}, {"a": rows, "INPUT__1": rows})
        assert [values(answer) for answer in answers] == [
            {"Y__1": [[2, 2]], "Y__0": [[4, 4]]},
            {"Y__1": [[0, 0]], "Y__0": [[2, 2]]},
        ]

    @pytest.mark.parametrize(("kind", "name"), [("input", "image"), ("output", "a")])
    def test_a_name_without_a_place_is_refused(self, script_file: Path, kind: str, name: str) -> None:
        config = {"input": [io("a")], "output": [io("Y__0")], kind: [io(name)]}
        with pytest.raises(TritonModelException, match=f"{kind} '{name}': expected a name that ends in __"):
            loaded(TorchScriptFile, script_file, config)

    def test_a_missing_result_is_an_error(self, script_file: Path) -> None:
        model = loaded(TorchScriptFile, script_file, {"input": [io("a"), io("b")], "output": [io("Y__2")]})
        (answer,) = ask(model, {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
        error = answer.error()
        assert error is not None
        assert "the module returned 2 tensors" in error.message()
