"""Files of torch as models: what is read from the file, how it is run, and what is refused by name."""

from __future__ import annotations

import asyncio
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any  # TorchScript reads these

import numpy as np
import pytest
import torch
from torch.export import Dim

from headwater.environment import install_command
from headwater.errors import BadOutput, LoadError
from headwater.model import Model
from headwater.runtime.compiled import compile_modules
from headwater.runtime.exported_model import ExportedModel
from headwater.runtime.loader import asks_compile, load_model
from headwater.runtime.runner import Runner
from headwater.runtime.step import Given
from headwater.runtime.torch_model import ScriptModel
from headwater.signature import Signature

pytestmark = pytest.mark.heavy
X = {"name": "x", "datatype": "FP32", "shape": [4]}
Y = {"name": "y", "datatype": "FP32", "shape": [4]}


class Net(torch.nn.Module):
    """One of everything: a weight, a buffer, several inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x) * mask + self.shift
        return {"scores": scores, "best": scores.argmax(-1)}


class Apply(torch.nn.Module):
    """Any function of tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def export(path: Path, module: torch.nn.Module, *arguments: torch.Tensor, shapes: Any = None) -> str:
    torch.export.save(torch.export.export(module.eval(), arguments, dynamic_shapes=shapes), path)
    return f"torch:{path}"


def applied(path: Path, function: Callable[..., Any], rows: int = 4, shapes: Any = None) -> str:
    return export(path, Apply(function), torch.ones(rows, 4), shapes=(shapes,) if shapes else None)


def script(path: Path, function: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(function), path)
    return f"torch:{path}"


def loaded(reference: str, **options: Any) -> Model:
    model = load_model(reference, options)
    model.load("cpu")
    return model


def failure(reference: str, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(reference, options)
    assert caught.value.problem.fix
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pt2"


def test_an_exported_programs_signature_is_the_files(file: Path) -> None:
    batch = Dim("batch")
    reference = export(file, Net(), torch.ones(4, 4), torch.ones(4, 3), shapes=({0: batch}, {0: batch}))
    model = load_model(reference, {})
    signature = Signature.of(model, name="net", max_batch_size=8)
    assert [(one.name, one.datatype, one.shape) for one in signature.inputs] == [
        ("x", "FP32", (4,)), ("mask", "FP32", (3,)),
    ]  # fmt: skip
    assert [(one.name, one.datatype, one.shape) for one in signature.outputs] == [
        ("scores", "FP32", (3,)), ("best", "INT64", (1,)),
    ]  # fmt: skip
    assert signature.description == "The exported program model.pt2."


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("bound", [None, 3])
def test_an_exported_program_answers_as_its_module(file: Path, rows: int, bound: int | None) -> None:
    net, batch = Net(), Dim("batch", max=bound)
    model = loaded(export(file, net, torch.ones(2, 4), torch.ones(2, 3), shapes=({0: batch}, {0: batch})))
    x, mask = torch.randn(rows, 4), torch.randn(rows, 3)
    with torch.no_grad():
        outputs, expected = model(x=x, mask=mask), net(x, mask)
    torch.testing.assert_close(outputs["scores"], expected["scores"])
    assert outputs["best"].tolist() == expected["best"].reshape(-1, 1).tolist()


def test_a_program_of_one_row_is_run_row_by_row(file: Path) -> None:
    net = Net()
    model = loaded(export(file, net, torch.ones(1, 4), torch.ones(1, 3)))
    x, mask = torch.randn(5, 4), torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(x=x, mask=mask)["scores"], net(x, mask)["scores"])


class Listens(torch.nn.Module):
    """Steps of time beside a state whose first dimension is 1, and a scalar."""

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, rate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heard = h + x.sum(0) * rate
        return heard, heard.mean(), x * 2


def test_a_sequence_beside_a_state_of_one_row_is_not_taken_for_a_batch(file: Path) -> None:
    arguments = torch.ones(4, 3), torch.zeros(1, 3), torch.tensor(1.0)
    reference = export(file, Listens(), *arguments, shapes=({0: Dim("seq")}, None, None))
    said = failure(reference)
    assert "input 'h', shape: expected a batch axis as first dimension, dynamic as that of input 'x', got 1" in said
    assert "set `options.batch: none`" in said


@pytest.mark.parametrize("kind", ["exported", "script"])
def test_without_a_batch_axis_a_file_is_served_as_it_is(tmp_path: Path, kind: str) -> None:
    arguments = torch.ones(4, 3), torch.zeros(1, 3), torch.tensor(1.0)
    if kind == "exported":
        reference = export(tmp_path / "m.pt2", Listens(), *arguments, shapes=({0: Dim("seq")}, None, None))
        model = loaded(reference, batch="none")
    else:
        inputs = {"x": [-1, 3], "h": [1, 3], "rate": [1]}
        outputs = {"output_0": [1, 3], "output_1": [1], "output_2": [-1, 3]}
        declared = [
            [{"name": name, "datatype": "FP32", "shape": shape} for name, shape in tensors.items()]
            for tensors in (inputs, outputs)
        ]
        reference = script(tmp_path / "m.pt", Listens())
        model = loaded(reference, batch="none", inputs=declared[0], outputs=declared[1])
    its = Signature.of(model, name="m", max_batch_size=8)
    assert [one.shape for one in its.inputs] == [(-1, 3), (1, 3), (1,)]
    assert [one.shape for one in its.outputs] == [(1, 3), (1,), (-1, 3)]
    assert its.bare_rows
    assert its.max_batch_size == 1
    x, h, rate = torch.randn(5, 3), torch.randn(1, 3), torch.tensor(0.5)
    found = model(x=x, h=h, rate=rate.reshape(1))
    for name, expected in zip(("output_0", "output_1", "output_2"), Listens()(x, h, rate), strict=True):
        torch.testing.assert_close(found[name].reshape(expected.shape), expected)


class Resampled(torch.nn.Module):
    """Arguments of all kinds that a request can set, and a list, which none can."""

    def forward(
        self, x: torch.Tensor, sr: int, gain: float = 1.0, mode: str = "up", loud: bool = False,
        limit: int | None = None, taps: list[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if limit is not None:
            x = x.clamp(max=limit)
        return (
            x * gain * sr * (2.0 if loud else 1.0) * (1.0 if mode == "up" else -1.0) * (1 if taps is None else taps[0])
        )


def test_arguments_that_are_no_tensors_are_parameters_where_the_options_give_a_value(tmp_path: Path) -> None:
    reference = script(tmp_path / "m.pt", Resampled())
    model = loaded(reference, inputs=[X], outputs=[Y], parameters={"sr": 16000, "gain": 2, "limit": 3})
    assert [(one.name, one.type, one.default, one.per) for one in model.parameters] == [
        ("sr", "int", 16000, "batch"), ("gain", "float", 2.0, "batch"), ("limit", "int", 3, "batch"),
    ]  # fmt: skip
    step = Runner(model, Signature.of(model, name="m", max_batch_size=2), "cpu").step
    sent = {"sr": 8000, "gain": 0.5, "limit": 1}
    made = asyncio.run(step.run(Given({"x": np.full((2, 4), 5, "f4")}, 2, sent)))
    assert made.arrays["y"].tolist() == [[4000] * 4] * 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "options.parameters: its forward needs the argument 'sr' (int), which is missing; give a value, such as "
             "`parameters: {sr: ...}`"),
        ({"sr": "high"}, "options.parameters: parameter 'sr': expected int, got 'high'; correct `options.parameters"),
        ({"sr": 1, "x": 2}, "no argument 'x' that is a number or text; its arguments of this kind are sr, gain, mode"),
        ({"sr": 1, "taps": [2]}, "options.parameters: its forward has no argument 'taps' that is a number or text"),
        ({"sr": 1, "rate": 2}, "options.parameters: its forward has no argument 'rate' that is a number or text"),
        ([16000], "options.parameters: expected values by the names of forward's arguments, got [16000]"),
    ],
)  # fmt: skip
def test_values_that_forward_does_not_take_are_named(tmp_path: Path, values: Any, words: str) -> None:
    reference = script(tmp_path / "m.pt", Resampled())
    assert words in failure(reference, inputs=[X], outputs=[Y], parameters=values)


def test_dimensions_that_vary_and_flat_inputs_are_declared_so(file: Path) -> None:
    shapes = {0: Dim("batch"), 1: Dim("length")}
    model = loaded(applied(file, lambda x: (x.sum(-1), [x * 2]), shapes=shapes))
    assert [tuple(one.shape) for one in model.inputs] == [(-1,)]
    assert [(one.name, tuple(one.shape)) for one in model.outputs] == [("output_0", (1,)), ("output_1_0", (-1,))]
    assert model(x=torch.ones(2, 3))["output_0"].tolist() == [[3], [3]]
    flat = loaded(export(file, Apply(lambda x: x + 1), torch.ones(3), shapes=(({0: Dim("batch")},))))
    assert flat(x=torch.ones(2, 1))["output"].tolist() == [[2], [2]]


def test_names_may_be_changed(file: Path) -> None:
    reference = applied(file, lambda x: x * 2, shapes={0: Dim("batch")})
    model = loaded(reference, rename={"output": "y", "x": "point"})
    assert model(point=torch.ones(1, 4))["y"].tolist() == [[2] * 4]
    assert "options.rename: the file has no 'z'; it has x, output" in failure(reference, rename={"z": "y"})


def test_constants_among_arguments_stay_and_among_results_are_left_out(file: Path) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: int, bias: Any = None) -> Any:
            return {"y": x * scale, "nothing": None}

    program = torch.export.export(Scaled(), (torch.ones(4, 2), 3), dynamic_shapes=({0: Dim("batch")}, None))
    torch.export.save(program, file)
    model = loaded(f"torch:{file}")
    assert [one.name for one in model.inputs] == ["x"]
    assert [one.name for one in model.outputs] == ["y"]
    assert model(x=torch.ones(1, 2))["y"].tolist() == [[3, 3]]


@pytest.mark.parametrize(
    ("function", "rows", "shapes", "words"),
    [
        (lambda x: x, 4, None, "input 'x', shape: expected a batch axis of any size, or 1, as first dimension, got 4"),
        (lambda x: x, 8, {0: Dim("batch", min=3)}, "input 'x', shape: expected a batch axis of any size, got at least"),
        (lambda x: x.mean(0), 4, {0: Dim("batch")}, "output 'output', shape: expected the batch axis as first"),
        (lambda x: x.mean(), 4, {0: Dim("batch")}, "output 'output', shape: expected the batch axis as first dim"),
        (lambda x: x @ x.T, 4, {0: Dim("batch")}, "expected the batch axis as first dimension only"),
        (lambda x: x.to(torch.complex64), 4, {0: Dim("batch")}, "output 'output', type: expected a tensor of"),
    ],
)
def test_what_cannot_be_served_is_named(
    file: Path, function: Callable[..., Any], rows: int, shapes: Any, words: str
) -> None:
    assert words in failure(applied(file, function, rows, shapes))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, as it imports its compiler
def test_an_exported_program_can_be_compiled(file: Path) -> None:
    reference = applied(file, lambda x: x * 2 + 1, shapes={0: Dim("batch")})
    options = {"compile": True}
    model = load_model(reference, options)
    assert asks_compile(type(model), options)
    model.load("cpu")
    compile_modules(model, Signature.of(model, name="m", max_batch_size=2), "cpu", [1, 2])
    assert model(x=torch.ones(2, 4))["output"].tolist() == [[3] * 4] * 2


class Counts(torch.nn.Module):
    """Answers with its input and what all calls before had."""

    if TYPE_CHECKING:  # torch reads a class's annotations
        sum: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum.add_(x.sum(0))
        return x + self.sum


def counting(tmp_path: Path, kind: str, **options: Any) -> Model:
    """A file that keeps state, opened."""
    if kind == "exported":
        reference = export(tmp_path / "m.pt2", Counts(), torch.ones(4, 4), shapes=({0: Dim("batch")},))
        return load_model(reference, {"rename": {"output": "y"}, **options})
    return load_model(script(tmp_path / "m.pt", Counts()), {"inputs": [X], "outputs": [Y], **options})


KINDS = pytest.mark.parametrize("kind", ["exported", "script"])


@KINDS
def test_a_file_whose_calls_change_a_buffer_is_refused_and_the_buffer_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(LoadError) as caught:
        counting(tmp_path, kind)
    assert "its call changes its own 'sum', so an answer would depend on other clients'" in str(caught.value)
    assert "set `options.stateful: true`" in caught.value.problem.fix


@KINDS
def test_state_that_is_meant_begins_with_the_files_and_is_never_computed_twice(tmp_path: Path, kind: str) -> None:
    model = counting(tmp_path, kind, stateful=True)
    assert not Signature.of(model, name="m", max_batch_size=1).idempotent
    assert isinstance(model, (ExportedModel, ScriptModel))
    model.load("cpu")
    with torch.no_grad():
        model(x=torch.ones(1, 4))
        model.end_warm_up()
        assert [model(x=torch.ones(1, 4))["y"].tolist() for _ in range(2)] == [[[2.0] * 4], [[3.0] * 4]]


@KINDS
def test_a_buffer_that_only_the_warm_up_shows_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in ("torch_model.script_writes", "exported_model.program_writes"):
        monkeypatch.setattr(f"headwater.runtime.{module}", lambda module: [])
    model = counting(tmp_path, kind)
    assert isinstance(model, (ExportedModel, ScriptModel))
    model.load("cpu")
    with torch.no_grad():
        model(x=torch.ones(1, 4))
        with pytest.raises(LoadError, match="its call changes its own 'sum'"):
            model.end_warm_up()


def test_an_option_that_is_no_bool(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"options\.stateful: expected true or false, got 'yes'"):
        counting(tmp_path, "script", stateful="yes")


def test_torchscript_is_called_by_argument(tmp_path: Path) -> None:
    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + y, x - y

    reference = script(tmp_path / "model.pt", Add())
    two = {"inputs": [Y, X], "outputs": [{**Y, "name": "sum"}, {**Y, "name": "difference"}]}
    outputs = loaded(reference, **two)(x=torch.full((2, 4), 3.0), y=torch.ones(2, 4))
    assert outputs["difference"].tolist() == [[2] * 4] * 2
    placed = {**two, "inputs": [{**Y, "name": "INPUT__1"}, {**X, "name": "INPUT__0"}]}
    outputs = loaded(reference, **placed)(INPUT__0=torch.full((2, 4), 3.0), INPUT__1=torch.ones(2, 4))
    assert outputs["difference"].tolist() == [[2] * 4] * 2
    with pytest.raises(BadOutput, match=r"as many outputs as options\.outputs declares, 1, got 2"):
        loaded(reference, **{**two, "outputs": [Y]})(x=torch.ones(1, 4), y=torch.ones(1, 4))
    assert "its forward has no argument 'z'; its arguments are x, y" in failure(
        reference, inputs=[{**X, "name": "z"}], outputs=[Y]
    )
    assert "the argument 'y' (Tensor), which is missing" in failure(reference, inputs=[X], outputs=[Y])
    assert "options.inputs is required, but missing" in failure(reference)
    assert "torch.compile doesn't take TorchScript" in failure(reference, **two, compile=True)


def test_other_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(Net().state_dict(), path)
    message = failure(f"torch:{path}")
    assert "torch.save wrote it: it has weights, or a pickled module" in message
    assert "torch.export.save" in message
    torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=False)
    assert "it is not a file of torch.export or TorchScript, or is incomplete" in failure(f"torch:{path}")
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("a/b", "")
    assert "got another zip archive" in failure(f"torch:{path}")
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("a/archive_format", "pt2")
        packed.writestr("a/data/aotinductor/model/x.so", "")
    assert "it is an AOTInductor package" in failure(f"torch:{path}")
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("a/archive_format", "pt2")
        packed.writestr("a/models/model.json", "{}")
    assert "can't read it: " in failure(f"torch:{path}")
    assert "there is no file" in failure("torch:elsewhere.pt2")


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = export(tmp_path / "net.pt2", torch.nn.Linear(4, 3), torch.ones(1, 4))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(LoadError) as caught:
        load_model(reference, {})
    assert caught.value.problem.reason == f"it needs torch, not installed for {sys.executable}"
    assert caught.value.problem.fix == install_command("torch", "torch")
