"""ONNX files as models: what is read from the file, how it is run, and what is refused by name."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from examples.training.export_digit_head import ONNX_FILE
from headwater.errors import BadInput, BadOutput, LoadError, ReplicaError
from headwater.model import Model, Tensor
from headwater.runtime.loader import load_model
from headwater.runtime.onnx_model import CPU, CUDA, OnnxModel, open_model
from headwater.runtime.runner import Runner
from headwater.runtime.step import Given, Step
from headwater.signature import Signature, StateSpec, TensorSpec
from headwater.wire.arrays import Array, as_objects
from headwater.wire.report import Status
from tests.pipelines import Request

pytestmark = pytest.mark.heavy
FLOAT = TensorProto.FLOAT

Port = tuple[str, int, Sequence[int | str | None] | None]
"""Name, element type, shape."""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an ONNX file, and return its path."""

    def write_file(
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        *,
        initializers: Mapping[str, Array] | None = None,
        opsets: Sequence[onnx.OperatorSetIdProto] = (),
        **model: Any,
    ) -> Path:
        graph = helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(*port) for port in inputs],
            [helper.make_tensor_value_info(*port) for port in outputs],
            [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()],
        )
        opset = [helper.make_opsetid("", 17), *opsets]
        path = tmp_path / "model.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8, **model), path)
        return path

    return write_file


@pytest.fixture
def identity(write: Write) -> Write:
    """Write a file whose output ``y`` is its input ``x``."""

    def write_identity(element: int, shape: Sequence[int | str | None] | None, name: str = "x") -> Path:
        return write([helper.make_node("Identity", [name], ["y"])], [(name, element, shape)], [("y", element, shape)])

    return write_identity


def loaded(path: Path, **options: Any) -> OnnxModel:
    model = open_model(str(path), options)
    model.load("cpu")
    return model


def refusal(path: object, /, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        open_model(str(path), options)
    assert isinstance(caught.value, ReplicaError)
    assert caught.value.problem.title == f"model onnx:{path}"
    assert caught.value.problem.fix
    return str(caught.value)


def signature(model: Model) -> Signature:
    return Signature.of(model, name="onnx", max_batch_size=8)


# What is declared


def test_its_signature_is_the_files(write: Write) -> None:
    nodes = [
        helper.make_node("Cast", ["ids"], ["sums"], to=FLOAT),
        helper.make_node("ReduceSum", ["sums"], ["total"], keepdims=0, noop_with_empty_axes=1),
        helper.make_node("Add", ["total", "offset"], ["y"]),
    ]
    inputs: list[Port] = [("ids", TensorProto.INT64, ["batch", "length", 3]), ("offset", FLOAT, [-1, "length", 3])]
    path = write(nodes, inputs, [("y", FLOAT, ["batch", None, 3])], doc_string="Adds.\n\nMore of it.")
    told = signature(open_model(str(path), {}))
    assert told.inputs == tuple(
        TensorSpec(name, datatype, (-1, 3), dimensions=("length", ""))
        for name, datatype in (("ids", "INT64"), ("offset", "FP32"))
    )
    assert told.outputs == (TensorSpec("y", "FP32", (-1, 3), dimensions=("length", "")),)
    assert told.description == "Adds."


@pytest.mark.parametrize(
    ("producer", "description"),
    [("pytorch", "The ONNX file model.onnx, made by pytorch."), ("", "The ONNX file model.onnx.")],
)
def test_without_a_text_of_its_own_it_says_who_made_it(write: Write, producer: str, description: str) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    path = write([node], [("x", FLOAT, ["n", 2])], [("y", FLOAT, ["n", 2])], producer_name=producer)
    assert signature(open_model(str(path), {})).description == description


@pytest.mark.parametrize(
    ("element", "datatype", "values"),
    [
        (TensorProto.BOOL, "BOOL", np.array([[True, False]])),
        (TensorProto.UINT8, "UINT8", np.array([[0, 255]], np.uint8)),
        (TensorProto.UINT16, "UINT16", np.array([[0, 65535]], np.uint16)),
        (TensorProto.UINT32, "UINT32", np.array([[0, 2**32 - 1]], np.uint32)),
        (TensorProto.UINT64, "UINT64", np.array([[0, 2**64 - 1]], np.uint64)),
        (TensorProto.INT8, "INT8", np.array([[-128, 127]], np.int8)),
        (TensorProto.INT16, "INT16", np.array([[-(2**15), 1]], np.int16)),
        (TensorProto.INT32, "INT32", np.array([[-(2**31), 1]], np.int32)),
        (TensorProto.INT64, "INT64", np.array([[-(2**63), 1]], np.int64)),
        (TensorProto.FLOAT16, "FP16", np.array([[0.5, -np.inf]], np.float16)),
        (TensorProto.FLOAT, "FP32", np.array([[0.1, np.inf]], np.float32)),
        (TensorProto.DOUBLE, "FP64", np.array([[0.1, -0.0]], np.float64)),
        (TensorProto.STRING, "BYTES", np.array([["a\0b é".encode(), b""]], object)),
    ],
)
def test_every_datatype_that_both_have(identity: Write, element: int, datatype: str, values: Array) -> None:
    model = loaded(identity(element, ["n", 2]))
    assert model.inputs[0].datatype == model.outputs[0].datatype == datatype
    answer = model(x=values)["y"]
    assert answer.dtype == values.dtype
    assert answer.tolist() == values.tolist()


def test_names_that_the_protocol_lacks_are_replaced(write: Write) -> None:
    nodes = [helper.make_node("Add", ["input:0", "/a//b"], ["2nd"])]
    inputs: list[Port] = [("input:0", FLOAT, ["n", 2]), ("/a//b", FLOAT, ["n", 2])]
    model = loaded(write(nodes, inputs, [("2nd", FLOAT, ["n", 2])]))
    assert [tensor.name for tensor in model.inputs] == ["input_0", "_a_b"]
    ones = np.ones((1, 2), np.float32)
    assert model(**{"input_0": ones, "_a_b": ones})["_2nd"].tolist() == [[2, 2]]


def test_names_that_python_uses_itself(identity: Write) -> None:
    ones = np.ones((1, 2), np.float32)
    assert loaded(identity(FLOAT, ["n", 2], name="self"))(**{"self": ones})["y"].tolist() == [[1, 1]]


def test_tensors_are_renamed(identity: Write) -> None:
    model = loaded(identity(FLOAT, ["n", 2], name="input:0"), rename={"input:0": "image", "y": "same"})
    ones = np.ones((1, 2), np.float32)
    assert model.inputs[0].name == "image"
    assert model(image=ones)["same"].tolist() == [[1, 1]]


# How it is run


def test_a_batch_is_one_call_and_rows_are_scalars_in_the_file(write: Write) -> None:
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"])]
    model = loaded(write(nodes, [("x", FLOAT, ["n"])], [("y", FLOAT, ["n"])]))
    assert signature(model).inputs == (TensorSpec("x", "FP32", (1,)),)
    assert signature(model).outputs == (TensorSpec("y", "FP32", (1,)),)
    assert model(x=np.array([[2], [3]], np.float32))["y"].tolist() == [[4], [9]]


def test_a_file_for_one_row_is_run_once_a_row(write: Write) -> None:
    # Were it run once for all, the file itself would refuse the shape.
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
        helper.make_node("ReduceMax", ["x"], ["top"], axes=[1], keepdims=0),
    ]
    initializers = {"shape": np.array([1, 3, 2])}
    outputs: list[Port] = [("y", FLOAT, [1, 3, 2]), ("top", FLOAT, [1])]
    model = loaded(write(nodes, [("x", FLOAT, [1, 6])], outputs, initializers=initializers))
    assert signature(model).outputs == (TensorSpec("y", "FP32", (3, 2)), TensorSpec("top", "FP32", (1,)))
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    answer = model(x=rows)
    assert answer["y"].tolist() == rows.reshape(4, 3, 2).tolist()
    assert answer["top"].tolist() == [[5], [11], [17], [23]]


def test_rows_that_differ_in_shape_say_so(write: Write) -> None:
    nodes = [
        helper.make_node("Squeeze", ["flags", "axis"], ["mask"]),
        helper.make_node("Compress", ["x", "mask"], ["y"], axis=1),
    ]
    inputs: list[Port] = [("x", FLOAT, [1, 3]), ("flags", TensorProto.BOOL, [1, 3])]
    path = write(nodes, inputs, [("y", FLOAT, [1, "kept"])], initializers={"axis": np.array([0])})
    ones = np.ones((2, 3), np.float32)
    with pytest.raises(BadOutput, match=r"output 'y': expected rows of one shape, got \[1\] and \[3\]; set `batching"):
        loaded(path)(x=ones, flags=np.array([[True] * 3, [False, True, False]]))


def test_a_run_of_one_row_that_gives_none_says_so(write: Write) -> None:
    inputs: list[Port] = [("x", FLOAT, [1, 2]), ("keep", TensorProto.BOOL, [1])]
    path = write([helper.make_node("Compress", ["x", "keep"], ["y"], axis=0)], inputs, [("y", FLOAT, ["kept", 2])])
    with pytest.raises(BadOutput, match=r"output 'y': expected 1 row from a run of 1 row, got shape \[0, 2\]"):
        loaded(path)(x=np.ones((2, 2), np.float32), keep=np.array([[True], [False]]))


def test_text_that_is_not_utf_8(identity: Write) -> None:
    model = loaded(identity(TensorProto.STRING, ["n", 2]))
    good, bad = [b"a", "é".encode()], [b"a", b"b\xff"]
    with pytest.raises(BadInput, match=r"^input 'x', row 1: expected UTF-8, got byte 0xff at position 1$"):
        model(x=np.array([good, bad], object))
    with pytest.raises(BadInput, match=r"^input 'x': expected UTF-8"):
        model(x=np.array([bad], object))


@pytest.mark.parametrize("shape", [["n"], [1]])
def test_text_of_one_dimension(identity: Write, shape: Sequence[int | str]) -> None:
    model = loaded(identity(TensorProto.STRING, shape))
    assert model(x=np.array([[b"a"], [b"b"]], object))["y"].tolist() == [[b"a"], [b"b"]]


def test_a_row_that_is_wrong_fails_alone(identity: Write) -> None:
    model = loaded(identity(TensorProto.STRING, ["n"]))
    runner = Runner(model, signature(model), "cpu")
    rows = np.array([[b"a"], [b"\xff"], [b"c"]], object)
    (answer,) = asyncio.run(runner.handle([Request({"x": rows})]))
    assert answer["y"].tolist() == [[b"a"], [b""], [b"c"]]


def test_what_the_environment_says_of_threads(identity: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[onnxruntime.InferenceSession] = []

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            sessions.append(self)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    model = open_model(str(identity(FLOAT, ["n", 2])), {})
    for text, threads in (("3", 3), ("2,1", 2), ("many", 0), ("", 0)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        model.load("cpu")
        options = sessions[-1].get_session_options()
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (threads, 1)
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    model.unload()


def test_a_gpu_that_this_onnx_runtime_has_no_code_for(identity: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    model = open_model(str(identity(FLOAT, ["n", 2])), {})
    with pytest.raises(ReplicaError, match=r"device 'cuda:0' needs .* is a build without it; install onnxruntime-gpu"):
        model.load("cuda:0")


def test_on_a_gpu_a_new_shape_is_not_measured_with_every_algorithm(
    identity: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Session:
        def __init__(self, *args: Any, providers: Any) -> None:
            asked.append(providers)

        def get_providers(self) -> list[str]:
            return [CUDA]

    model = open_model(str(identity(FLOAT, ["n", 2])), {})
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    model.load("cuda:1")
    assert asked == [[(CUDA, {"device_id": 1, "cudnn_conv_algo_search": "HEURISTIC"}), CPU]]


# What is refused


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([4, 2], "input 'x', shape: expected a batch axis of any size, or 1, as first dimension, got 4"),
        ([], "input 'x', shape: expected the batch axis as first dimension, got none: it is a scalar"),
        (None, "input 'x', shape: expected the batch axis as first dimension, got none"),
        (["n", 0], "input 'x': tensor 'x', shape: expected positive dimensions"),
    ],
)
def test_a_shape_without_a_batch_axis(identity: Write, shape: Sequence[int | str] | None, expected: str) -> None:
    assert expected in refusal(identity(FLOAT, shape))


def test_an_output_without_a_batch_axis(write: Write) -> None:
    path = write(
        [helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0)], [("x", FLOAT, ["n", 2])], [("sum", FLOAT, [])]
    )
    assert "output 'sum', shape: expected the batch axis" in refusal(path)


@pytest.fixture
def detector(write: Write) -> Path:
    """A file as a vendor's voice detector: steps of time beside a state whose first dimension is 1, and a scalar."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "time"], ["heard"]),
        helper.make_node("Mul", ["heard", "rate"], ["scaled"]),
        helper.make_node("Add", ["h", "scaled"], ["next_h"]),
        helper.make_node("ReduceMean", ["next_h"], ["score"], keepdims=0),
    ]
    return write(
        nodes,
        [("x", FLOAT, ["seq", 3]), ("h", FLOAT, [1, 1, 3]), ("rate", FLOAT, [])],
        [("next_h", FLOAT, [1, 1, 3]), ("score", FLOAT, [])],
        initializers={"time": np.array([0])},
    )


@pytest.mark.parametrize(
    ("x", "h", "y", "named"),
    [
        (["seq", 3], [1, 3], ["seq", 3], "input 'h', shape: expected a batch axis as first dimension, dynamic"),
        ([1, 3], ["seq", 3], ["seq", 3], "input 'x', shape: expected a batch axis as first dimension, dynamic"),
        (["seq", 3], ["seq", 3], [1, 3], "output 'y', shape: expected a batch axis as first dimension, dynamic"),
    ],
)
def test_a_sequence_beside_a_state_of_one_row_is_not_taken_for_a_batch(
    write: Write, x: Sequence[int | str], h: Sequence[int | str], y: Sequence[int | str], named: str
) -> None:
    path = write([helper.make_node("Add", ["x", "h"], ["y"])], [("x", FLOAT, x), ("h", FLOAT, h)], [("y", FLOAT, y)])
    said = refusal(path)
    assert named in said
    assert "set `options.batch: none`" in said


def test_without_a_batch_axis_a_file_is_served_as_it_is(detector: Path) -> None:
    model = loaded(detector, batch="none")
    its = signature(model)
    assert [(one.name, one.shape) for one in its.inputs] == [("x", (-1, 3)), ("h", (1, 1, 3)), ("rate", (1,))]
    assert [(one.name, one.shape) for one in its.outputs] == [("next_h", (1, 1, 3)), ("score", (1,))]
    assert its.bare_rows
    assert its.max_batch_size == 1
    random = np.random.default_rng(1)
    vendors = onnxruntime.InferenceSession(str(detector))
    for steps in (1, 5):
        x, h = random.normal(size=(steps, 3)).astype("f4"), random.normal(size=(1, 1, 3)).astype("f4")
        rate = np.array(0.5, "f4")
        expected = vendors.run(["next_h", "score"], {"x": x, "h": h, "rate": rate})
        found = model(x=x, h=h, rate=rate.reshape(1))
        np.testing.assert_array_equal(found["next_h"], expected[0])
        np.testing.assert_array_equal(found["score"], expected[1])


def test_an_output_is_the_state_of_the_next_request(detector: Path) -> None:
    its = signature(loaded(detector, batch="none", states={"h": "next_h"}, example={"x": [[1, 2, 3]]}))
    assert its.states == (StateSpec("h", "next_h", "FP32", (1, 1, 3), 0),)
    assert [spec.name for spec in its.public.inputs] == ["x", "rate"]
    assert [spec.name for spec in its.public.outputs] == ["score"]
    assert its.example_row() == {"x": [[1, 2, 3]], "h": [[[0, 0, 0]]], "rate": [0]}


def test_a_dimension_of_a_state_that_one_side_fixes_is_fixed(write: Write) -> None:
    add = helper.make_node("Add", ["h", "x"], ["y"])
    path = write([add], [("x", FLOAT, ["n", 4]), ("h", FLOAT, ["n", "k"])], [("y", FLOAT, ["n", 4])])
    assert signature(loaded(path, states={"h": "y"})).states == (StateSpec("h", "y", "FP32", (4,), 0),)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (["h"], "options.states: expected outputs by the names of inputs, got"),
        ({"g": "next_h"}, "options.states: there is no input 'g'; the inputs are x, h, rate"),
        ({"h": "nexth"}, "options.states: there is no output 'nexth'.*did you mean `next_h`"),
        ({"x": "next_h"}, r"options.states: output 'next_h': expected the shape of input 'x', \[-1, 3\], got"),
        (
            {"rate": "next_h"},
            r"options.states: output 'next_h': expected the shape of input 'rate', \[1\], got \[1, 1, 3\]",
        ),
    ],
)
def test_states_that_the_file_does_not_have(detector: Path, states: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        loaded(detector, batch="none", states=states)


def test_a_shape_that_the_file_declares_wrongly_is_corrected(write: Write) -> None:
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    path = write(
        [reshape], [("x", FLOAT, ["n", 4])], [("y", FLOAT, [1, "n"])], initializers={"shape": np.array([-1, 2, 2])}
    )
    call = Given({"x": np.zeros((1, 3, 4), "f4")}, 1)
    made = asyncio.run(step_of(loaded(path, batch="none")).run(call))
    assert "expected FP32 [1, 1], got FP32 [1, 3, 2, 2]" in made.failures[0].message
    model = loaded(path, batch="none", shapes={"y": ["rows", 2, 2]})
    assert model.outputs == (Tensor("y", "FP32", [-1, 2, 2], dimensions=["rows", "", ""]),)
    assert asyncio.run(step_of(model).run(call)).arrays["y"].shape == (1, 3, 2, 2)


def step_of(model: OnnxModel) -> Step:
    """The step that calls a model in a replica."""
    return Runner(model, signature(model), "cpu").step


def test_dimensions_have_the_files_names(write: Write) -> None:
    path = write(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", FLOAT, ["batch", 3, "height", None])], [("y", FLOAT, ["batch", 3, "height + 1", None])],
    )  # fmt: skip
    model = loaded(path, sizes={"height": 8})
    assert [tensor.dimensions for tensor in (*model.inputs, *model.outputs)] == [("", "height", ""), ()]
    assert np.shape(signature(model).example_row()["x"]) == (3, 8, 1)


def test_text_without_a_batch_axis(identity: Write) -> None:
    model = loaded(identity(TensorProto.STRING, []), batch="none")
    assert model(x=as_objects(np.array(["a"]), "x"))["y"].tolist() == b"a"


def test_rows_of_a_pipelines_batch_are_runs_of_their_own(detector: Path) -> None:
    model = loaded(detector, batch="none")
    step = step_of(model)
    x, h, rate = np.ones((2, 4, 3), "f4"), np.zeros((2, 1, 1, 3), "f4"), np.array([[1], [2]], "f4")
    made = asyncio.run(step.run(Given({"x": x, "h": h, "rate": rate}, 2)))
    assert made.arrays["score"].tolist() == [[4], [8]]
    assert made.calls == 2


def test_a_fixed_batch_says_how_to_export_without(identity: Write) -> None:
    assert "dynamic_axes" in refusal(identity(FLOAT, [4, 2]))
    assert loaded(identity(FLOAT, [4, 2]), batch="none").inputs[0].shape == (4, 2)


def test_all_faults_of_a_file_are_named_and_none_is_an_export_that_can_not_help(write: Write) -> None:
    path = write(
        [helper.make_node("Add", ["x", "state"], ["sum"]), helper.make_node("Mul", ["sum", "rate"], ["y"])],
        [("x", FLOAT, ["batch", 3]), ("state", FLOAT, [2, "batch", 3]), ("rate", FLOAT, [])],
        [("y", FLOAT, [2, "batch", 3])],
    )
    said = refusal(path)
    assert (
        "input 'state', shape: expected a batch axis of any size, or 1, as first dimension, got 2; input 'rate'" in said
    )
    assert "output 'y', shape: expected a batch axis of any size, or 1, as first dimension, got 2" in said
    assert said.count("set `options.batch: none`") == 2  # for dimensions and for a scalar
    assert "export" not in said


def test_an_element_type_that_has_no_numpy_array(identity: Write) -> None:
    message = refusal(identity(TensorProto.BFLOAT16, ["n", 2]))
    assert "input 'x', type: expected a tensor of bool, int8" in message
    assert "got tensor(bfloat16)" in message


def test_an_output_that_is_no_tensor(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 2])],
        [helper.make_tensor_sequence_value_info("y", FLOAT, None)],
    )
    path = tmp_path / "sequence.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    assert "output 'y', type: expected a tensor of bool, int8" in refusal(path)


def test_a_file_without_inputs(write: Write) -> None:
    node = helper.make_node("Identity", ["w"], ["y"])
    path = write([node], [], [("y", FLOAT, [1, 2])], initializers={"w": np.ones((1, 2), np.float32)})
    assert "it has no inputs, expected at least one" in refusal(path)


def test_names_that_clash(write: Write) -> None:
    inputs: list[Port] = [("x:0", FLOAT, ["n", 2]), ("x/0", FLOAT, ["n", 2])]
    path = write([helper.make_node("Add", ["x:0", "x/0"], ["y"])], inputs, [("y", FLOAT, ["n", 2])])
    message = refusal(path)
    assert "inputs 'x:0' and 'x/0' would both be named 'x_0'" in message
    assert "`rename: {'x/0': ...}`" in message
    assert "would both be named 'b'" in refusal(path, rename={"x:0": "b", "x/0": "b"})
    assert [tensor.name for tensor in open_model(str(path), {"rename": {"x/0": "b"}}).inputs] == ["x_0", "b"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rename": {"z": "a"}}, "options.rename: the file has no 'z'; it has x, y"),
        ({"rename": {"x": "a b"}}, "input 'x': tensor name: expected letters, digits, '_', '.' or '-', got 'a b'"),
        ({"rename": {"x": 3}}, "got 3"),
        ({"rename": ["x"]}, "options.rename: expected a mapping of name in the file to name in requests, got ['x']"),
        ({"renames": {}}, "unknown option 'renames'; its options are rename"),
        ({"path": "other"}, "unknown option 'path'"),
    ],
)
def test_options_that_are_wrong(identity: Write, options: dict[str, Any], expected: str) -> None:
    assert expected in refusal(identity(FLOAT, ["n", 2]), **options)


def test_a_reserved_name(identity: Write) -> None:
    message = refusal(identity(FLOAT, ["n", 2], name="headwater_report"))
    assert "input 'headwater_report': tensor 'headwater_report': the name is reserved" in message
    assert "`rename: {'headwater_report': ...}`" in message


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>\n", ONNX_FILE.read_bytes()[:1000]])
def test_a_file_that_is_no_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    assert "it is not an ONNX file, or is incomplete" in refusal(path)


def test_a_folder(tmp_path: Path) -> None:
    assert f"expected a file, got the folder {tmp_path}" in refusal(tmp_path)


def test_external_data_that_is_missing(write: Write) -> None:
    initializers = {"w": np.ones((64, 64), np.float32)}
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = write([node], [("x", FLOAT, ["n", 64])], [("y", FLOAT, ["n", 64])], initializers=initializers)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert loaded(path)(x=np.ones((1, 64), np.float32))["y"][0, 0] == 64
    (path.parent / "weights.bin").unlink()
    message = refusal(path)
    assert "its external data can't be read" in message
    assert "weights.bin" in message
    assert "put the data file beside the ONNX file" in message


def test_an_opset_that_onnx_runtime_does_not_know_yet(identity: Write) -> None:
    path = identity(FLOAT, ["n", 2])
    model = onnx.load(path)
    model.opset_import[0].version = 99
    onnx.save(model, path)
    assert re.search(r"can't run it: ONNX Runtime .*opset", refusal(path))


def test_an_operator_that_onnx_runtime_lacks(write: Write) -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"])
    message = refusal(write([node], [("x", FLOAT, ["n", 2])], [("y", FLOAT, ["n", 2])]))
    assert f"ONNX Runtime {onnxruntime.__version__} can't run it" in message
    assert "Frobnicate" in message
    assert "[ONNXRuntimeError]" not in message


# Where it is looked for


def test_a_relative_path_starts_in_the_working_folder_or_in_those_of_the_search(
    identity: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, other = tmp_path / "working", tmp_path / "other"
    for folder in (working, other):
        (folder / "models").mkdir(parents=True)
    identity(FLOAT, ["n", 2]).rename(other / "models" / "x.onnx")
    monkeypatch.chdir(working)
    model = load_model("onnx:models/x.onnx", {}, [str(working), str(other)])
    assert isinstance(model, OnnxModel)
    assert model.inputs[0].shape == (2,)

    identity(FLOAT, ["n", 3]).rename(working / "models" / "x.onnx")  # the working folder comes first
    assert load_model("onnx:models/x.onnx", {}, [str(other)]).inputs[0].shape == (3,)


def test_a_path_that_is_not_found_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError) as caught:
        load_model("onnx:models/x.onnx", {}, [str(tmp_path), "/elsewhere"])
    assert f"there is no file {tmp_path}/models/x.onnx or /elsewhere/models/x.onnx;" in str(caught.value)
    assert "there is no file /absolute/x.onnx;" in refusal("/absolute/x.onnx")


def test_load_model_takes_classes_too() -> None:
    from headwater.zoo.scale import Scale

    assert isinstance(load_model("headwater.zoo.scale:Scale", {}), Scale)


def test_it_needs_no_torch_and_the_rest_no_onnxruntime() -> None:
    code = (
        "import sys\n"
        "import inference, headwater.runtime.loader, headwater.replica.probe, headwater.replica\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "from headwater.runtime.loader import load_model\n"
        f"model = load_model({f'onnx:{ONNX_FILE}'!r}, {{}})\n"
        "model.load('cpu')\n"
        "assert not {'torch', 'onnx'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The shipped digit head


@pytest.fixture(scope="module")
def features() -> Array:
    normal: Array = np.random.default_rng(0).normal(size=(33, 64)).astype(np.float32)
    return np.abs(normal)


def test_the_digit_head_has_the_signature_of_the_class() -> None:
    from headwater.zoo.digits import Digit

    head, cls = signature(loaded(ONNX_FILE)), signature(Digit())
    assert (head.inputs, head.outputs) == (cls.inputs, cls.outputs)
    assert head.description.startswith("Tells which digit it is")


def test_the_digit_head_agrees_with_torch(features: Array) -> None:
    import torch

    from headwater.zoo.digits import Digit

    reference = Digit()
    reference.load("cpu")
    expected = reference(features=torch.from_numpy(features))
    answer = loaded(ONNX_FILE)(features=features)
    assert np.abs(answer["logits"] - expected["logits"].numpy()).max() < 1e-5
    assert answer["digit"].tolist() == expected["digit"].tolist()


def test_a_row_of_the_digit_head_does_not_depend_on_its_neighbours(features: Array) -> None:
    model = loaded(ONNX_FILE)
    together = model(features=features)
    alone = [model(features=row[None]) for row in features]
    np.testing.assert_allclose(together["logits"], np.concatenate([one["logits"] for one in alone]), atol=1e-5)
    assert together["digit"].tolist() == [one["digit"][0].tolist() for one in alone]


def test_memory_that_does_not_suffice_is_told_from_other_failures(write: Write) -> None:
    """Each row of x takes as many values as it says; 2^50 never fit."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "all"], ["sum"], keepdims=0),
        helper.make_node("Reshape", ["sum", "one"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["taken"]),
        helper.make_node("ReduceSum", ["taken"], ["nothing"], keepdims=0),
        helper.make_node("Cast", ["x"], ["floats"], to=FLOAT),
        helper.make_node("Add", ["floats", "nothing"], ["y"]),
    ]
    initializers = {"all": np.array([0, 1], np.int64), "one": np.array([1], np.int64)}
    path = write(nodes, [("x", TensorProto.INT64, ["n", 1])], [("y", FLOAT, ["n", 1])], initializers=initializers)
    model = loaded(path)
    broken: list[str] = []
    runner = Runner(model, Signature.of(model, name="m", max_batch_size=8), "cpu", on_broken=broken.append)
    given = Given({"x": np.array([[3], [1 << 50]], np.int64)}, 2)
    made = asyncio.run(runner.step.run(given))
    assert (made.good, made.arrays["y"].tolist(), broken) == ([0], [[3]], [])
    assert made.failures[1].status is Status.OUT_OF_MEMORY
    assert "Failed to allocate memory for requested buffer" in made.failures[1].message


def test_a_custom_operator_is_named(write: Write) -> None:
    path = write(
        [helper.make_node("Acme", ["x"], ["y"], domain="com.acme")], [("x", FLOAT, ["n"])], [("y", FLOAT, ["n"])],
        opsets=[helper.make_opsetid("com.acme", 1)],
    )  # fmt: skip
    assert "it has the custom operator com.acme:Acme, which ONNX Runtime" in refusal(path)
