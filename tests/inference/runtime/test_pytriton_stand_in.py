"""The stand-in for PyTriton does what PyTriton does, and what it lacks is refused by name."""

# mypy: disable-error-code="attr-defined, union-attr, untyped-decorator"

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import pytriton
import wrapt
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.runtime import pytriton_stand_in
from headwater.runtime.pytriton_stand_in import pytriton as stand_in
from tests.inference.bindings import found_in

pytestmark = pytest.mark.heavy
PACKAGES = (stand_in, pytriton)
FOLDER = Path(pytriton_stand_in.__file__).parent
MODULES = (
    "decorators", "exceptions", "model_config", "model_config.common", "model_config.model_config",
    "model_config.tensor", "model_config.triton_model_config", "proxy.types", "triton",
)  # fmt: skip

Function = Callable[..., Any]
Stack = Callable[[Any, Function], Function]
BIAS = np.array([7], np.float32)
STACKS: dict[str, Stack] = {
    "sample": lambda d, f: d.sample(f),
    "batch": lambda d, f: d.batch(f),
    "keys": lambda d, f: d.group_by_keys(d.batch(f)),
    "fill": lambda d, f: d.fill_optionals(bias=BIAS)(d.batch(f)),
    "fill, keys": lambda d, f: d.fill_optionals(bias=BIAS)(d.group_by_keys(d.batch(f))),
    "fill sample": lambda d, f: d.fill_optionals(bias=BIAS)(d.sample(f)),
    "fill unknown": lambda d, f: d.fill_optionals(other=BIAS, bias=BIAS)(d.batch(f)),
    "fill no array": lambda d, f: d.fill_optionals(bias=[7.0])(d.batch(f)),
    "fill dtype": lambda d, f: d.fill_optionals(bias=BIAS.astype(np.int64))(d.batch(f)),
    "fill shape": lambda d, f: d.fill_optionals(bias=np.zeros((1, 2), np.float32))(d.batch(f)),
    "fill size": lambda d, f: d.fill_optionals(bias=np.zeros(2, np.float32))(d.batch(f)),
    "values": lambda d, f: d.batch(d.group_by_values("k")(f)),
    "values, texts": lambda d, f: d.batch(d.group_by_values("text", "k")(f)),
    "values, padded": lambda d, f: d.batch(d.group_by_values("k", pad_fn=d.ConstantPadder(-1))(f)),
    "values misplaced": lambda d, f: d.group_by_values("k")(d.batch(f)),
    "values, first": lambda d, f: d.batch(d.group_by_values("k")(d.first_value("k")(f))),
    "first": lambda d, f: d.batch(d.first_value("k", "bias")(f)),
    "first text": lambda d, f: d.batch(d.first_value("text")(f)),
    "first, any": lambda d, f: d.batch(d.first_value("k", "x", strict=False)(f)),
    "first, arrays": lambda d, f: d.batch(d.first_value("k", squeeze_single_values=False, strict=False)(f)),
    "first of requests": lambda d, f: d.first_value("k", "bias")(f),
    "first reserved": lambda d, f: d.first_value("__triton_context__")(f),
    "padded": lambda d, f: d.batch(d.pad_batch(f)),
    "context": lambda d, f: d.triton_context(d.batch(f)),
    "context alone": lambda d, f: d.triton_context(f),
}


def plain(value: Any) -> Any:
    """A value in a form that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, np.generic):
        return type(value).__name__, value.item()
    if inspect.isgenerator(value):
        return "yields", [plain(part) for part in value]
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if hasattr(value, "keys"):
        return [(name, plain(value[name])) for name in value.keys()]  # noqa: SIM118 - in their order
    if hasattr(value, "model_configs"):
        return [config.model_name for config in value.model_configs.values()]
    return value


def answer(how: str, kwargs: dict[str, Any]) -> Any:
    """What the decorated function returns."""
    x = kwargs["x"]
    rows = len(x)
    if how == "cut":
        return {"y": x[:-1], "z": x}
    if how == "ragged":
        return {"y": np.full((rows, rows, 1), 2.0), "z": np.array([[b"z" * rows]] * rows)}
    if how == "yield":
        return ({"y": x + step, "z": x} for step in range(2))
    return {"dict": {"y": x, "z": x}, "list": [x, x], "tuple": (x, x), "few": [x], "none": None}[how]


def function_of(decorators: Any, stack: str, form: str, how: str, seen: list[Any]) -> Function:
    """A decorated function, method or object, which notes its arguments."""

    def function(*args: Any, **kwargs: Any) -> Any:
        seen.append((plain(args), plain(kwargs)))
        return answer(how, kwargs) if "x" in kwargs else [{"y": request["x"]} for request in args[0]]

    if form == "function":
        return STACKS[stack](decorators, function)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    name = method.__name__ = "infer" if form == "method" else "__call__"
    model = type("Model", (), {name: STACKS[stack](decorators, method)})()
    bound: Function = model.infer if form == "method" else model
    return bound


def bind(package: Any, function: Function, *, batching: bool, preferred: list[int] | None) -> None:
    """Give a function its context."""
    config = package.model_config.triton_model_config
    spec = config.TensorSpec
    inputs = [
        spec("x", (2,), np.float32), spec("k", (1,), np.int32), spec("text", (1,), object),
        spec("bias", (1,), np.float32, True),
    ]  # fmt: skip
    context = package.decorators.TritonContext()
    context.model_configs[function] = config.TritonModelConfig(
        "model",
        batching=batching,
        batcher=package.model_config.DynamicBatcher(preferred_batch_size=preferred),
        max_batch_size=8,
        inputs=inputs,
        outputs=[spec("y", (-1,), np.float32), spec("z", (-1,), np.float32)],
    )
    getattr(function, "__self__", function).__triton_context__ = context


def outcome(package: Any, stack: str, form: str, how: str, given_requests: list[dict[str, Any]], **config: Any) -> Any:
    """What the function saw, and the result of the call; or the class and text of its exception."""
    seen: list[Any] = []
    request = package.proxy.types.Request
    try:
        function = function_of(package.decorators, stack, form, how, seen)
        if config:
            bind(package, function, **config)
        result = plain(function([request({name: value.copy() for name, value in r.items()}) for r in given_requests]))
    except Exception as error:
        return seen, type(error).__name__, str(error)
    return seen, "", result


@st.composite
def requests_of_a_call(draw: Any) -> list[dict[str, Any]]:
    requests = []
    for rows in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        number = st.integers(0, draw(st.integers(0, 2)))
        texts = st.sampled_from([b"", b"a", b"ab", b"a" * 253, "ü"])
        request = {
            "x": np.array([[draw(number), 1] for _ in range(rows)], np.float32),
            "k": np.array([[draw(number)] for _ in range(rows)], np.int32),
            "text": np.array([[draw(texts)] for _ in range(rows)], object),
        }
        if draw(st.booleans()):
            request["bias"] = np.array([[draw(number)] for _ in range(rows)], np.float32)
        requests.append(request)
    return requests


@pytest.mark.parametrize("stack", STACKS)
@given(
    form=st.sampled_from(["function", "method", "object"]),
    how=st.sampled_from(["dict", "list", "tuple", "few", "none", "cut", "ragged", "yield"]),
    requests=requests_of_a_call(),
    batching=st.booleans(),
    preferred=st.sampled_from([None, [2], [6, 4]]),
)
@settings(deadline=None, max_examples=40)
def test_decorators_do_what_pytritons_do(
    stack: str, form: str, how: str, requests: list[dict[str, Any]], batching: bool, preferred: list[int] | None
) -> None:
    (seen, error, result), (their_seen, their_error, theirs) = (
        outcome(package, stack, form, how, requests, batching=batching, preferred=preferred) for package in PACKAGES
    )
    assert (seen, error) == (their_seen, their_error), (result, theirs)
    if not error:
        assert result == theirs
    else:
        assert _facts(result) >= _facts(theirs)


def _facts(message: str) -> set[str]:
    """The numbers and the names of tensors in a message."""
    return set(re.findall(r"\d+|\b(?:x|k|text|bias|other|y|z)\b", message))


@st.composite
def results_of_calls(draw: Any) -> list[dict[str, Any]]:
    """Outputs of one, two or three dimensions, in any of which calls may differ."""
    shapes = st.lists(st.integers(0, 3), min_size=1, max_size=3) if draw(st.booleans()) else st.just([1, 2])
    types = st.sampled_from(
        draw(st.sampled_from([["f4"], ["f4", "f8"], ["S2", "S5"], ["U1", "U3"], ["O"], ["S2", "U2"]]))
    )
    outputs = st.builds(lambda shape, dtype: np.ones(shape, dtype), shapes, types)
    calls: list[dict[str, Any]] = draw(
        st.lists(st.dictionaries(st.sampled_from(["y", "z"]), outputs, max_size=2), min_size=1, max_size=3)
    )
    return calls


@given(results=results_of_calls(), value=st.sampled_from([0, -1, 2.5]))
@settings(deadline=None)
def test_results_are_padded_as_pytriton_pads_them(results: list[dict[str, Any]], value: Any) -> None:
    def padded(package: Any) -> Any:
        try:
            return plain(package.decorators.ConstantPadder(value)([dict(result) for result in results]))
        except Exception as error:
            return type(error).__name__

    assert padded(stand_in) == padded(pytriton)


@pytest.mark.parametrize("stack", ["first", "fill", "padded", "context"])
def test_a_function_that_is_not_bound_is_refused_as_pytriton_does(stack: str) -> None:
    requests = [{"x": np.zeros((1, 2), np.float32), "k": np.zeros((1, 1), np.int32)}]
    ours, theirs = (outcome(package, stack, "function", "dict", requests)[:2] for package in PACKAGES)
    assert ours == theirs == ([], "PyTritonValidationError")


def test_requests_with_different_inputs_are_no_batch() -> None:
    x, k = np.zeros((1, 2), np.float32), np.zeros((1, 1), np.int32)
    ours, theirs = (outcome(one, "batch", "function", "dict", [{"x": x}, {"x": x, "k": k}]) for one in PACKAGES)
    assert ours[:2] == theirs[:2] == ([], "PyTritonValidationError")


@pytest.mark.parametrize("package", PACKAGES, ids=["stand-in", "PyTriton"])
def test_decorated_functions_pass_for_what_they_decorate(package: Any) -> None:
    batch = package.decorators.batch

    class Base:
        """A model."""

        @package.decorators.group_by_keys
        @batch
        def infer(self, x: Any) -> Any:
            """Its function."""
            return {"y": x}

        @batch
        @staticmethod
        def doubled(x: Any) -> Any:
            return {"y": x * 2}

        @batch
        @classmethod
        def named(cls, x: Any) -> Any:
            return {cls.__name__: x}

    class Model(Base):
        def infer(self, requests: Any) -> Any:
            return [Base.infer(self, requests), super().infer(requests)]

    @package.decorators.triton_context
    async def waits(requests: Any, triton_context: Any) -> Any:
        return requests

    model, request = Model(), package.proxy.types.Request({"x": np.ones((1, 1))})
    assert plain(model.infer([request])) == plain([[{"y": np.ones((1, 1))}]] * 2)
    assert plain(Model.doubled([request])) == plain(model.doubled([request])) == plain([{"y": np.full((1, 1), 2.0)}])
    assert plain(model.named([request])) == plain([{"Model": np.ones((1, 1))}])
    assert (Base().infer.__name__, Base().infer.__doc__) == ("infer", "Its function.")
    assert inspect.ismethod(Base().infer)
    assert inspect.isfunction(waits)
    assert inspect.iscoroutinefunction(waits)
    assert list(inspect.signature(waits).parameters) == ["requests", "triton_context"]
    waits.note = 1
    assert inspect.unwrap(waits).note == 1
    bound = batch(model.infer)
    assert bound.__self__ is model
    kept = functools.partial(waits)
    assert inspect.iscoroutinefunction(kept)


@pytest.mark.parametrize("package", PACKAGES, ids=["stand-in", "PyTriton"])
def test_a_user_s_decorator_around_them_leaves_their_configuration_to_be_found(package: Any) -> None:
    around = wrapt.decorator(lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))

    class Model:
        @around
        @package.decorators.batch
        def infer(self, x: Any) -> Any:
            return [x, x]

    functions: list[Function] = [Model().infer, around(package.decorators.batch(lambda x: [x, x]))]
    for function in functions:
        bind(package, function, batching=True, preferred=None)
        (answered,) = function([package.proxy.types.Request({"x": np.ones((1, 1))})])
        assert list(answered) == ["y", "z"]


def _pair(name: str) -> tuple[ModuleType, ModuleType]:
    return importlib.import_module(f"{stand_in.__name__}.{name}"), importlib.import_module(f"pytriton.{name}")


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(one.name, one.default) for one in inspect.signature(function).parameters.values()]


def _fields(dataclass: Any) -> list[tuple[str, Any]]:
    fields = [(one.name, getattr(one.default, "name", one.default)) for one in dataclasses.fields(dataclass)]
    # The fields of TritonConfig are given by name, so their order is no part of it.
    return sorted(fields) if "http_port" in dict(fields) else fields


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_pytritons_with_its_fields_and_arguments(name: str) -> None:
    ours, theirs = _pair(name)
    for public in ours.__all__:
        mine, known = getattr(ours, public), getattr(theirs, public)
        if isinstance(mine, type) and issubclass(mine, BaseException):
            assert [one.__name__ for one in mine.__mro__] == [one.__name__ for one in known.__mro__]
        elif isinstance(mine, type) and issubclass(mine, enum.Enum):
            assert [(one.name, one.value) for one in mine] == [(one.name, one.value) for one in known]
        elif dataclasses.is_dataclass(mine):
            assert _fields(mine) == _fields(known), public
        elif inspect.isfunction(mine) and not hasattr(mine, "__wrapped__"):  # as decorators have
            assert _parameters(mine) == _parameters(known), public


def test_errors_have_a_message() -> None:
    for package in PACKAGES:
        error = package.exceptions.PyTritonUnrecoverableError("gone")
        assert (str(error), error.message, error.args) == ("gone", "gone", ("gone",))


def test_a_tensors_type_is_a_scalar_type() -> None:
    for package in PACKAGES:
        tensor = package.model_config.Tensor((1,), np.dtype("f4"))
        assert (tensor.dtype, tensor.name, tensor.optional) == (np.float32, None, False)
        with pytest.raises(dataclasses.FrozenInstanceError):
            tensor.name = "x"


def test_requests_are_mappings() -> None:
    for package in PACKAGES:
        request = package.proxy.types.Request({"x": 1}, {"p": 2})
        request["y"] = 3
        del request["x"]
        assert (list(request), len(request), "y" in request, dict(request)) == (["y"], 1, True, {"y": 3})
        assert (request.data, request.parameters, request.span) == ({"y": 3}, {"p": 2}, None)
        with request.traced_span("any"):
            assert list(request.items()) == [("y", 3)]


def test_tritons_configuration_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "HTTP_PORT": "8123", "LOG_FILE": "/tmp/log", "ALLOW_GRPC": "1", "ID": "a", "UNKNOWN": "1",
        "TRACE_CONFIG_0": "mode=triton", "TRACE_CONFIG_2": "rate=1", "GRPC_HTTP2_MAX_PING_STRIKES": "2",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"PYTRITON_TRITON_CONFIG_{name}", value)
    ours, theirs = (package.triton.TritonConfig.from_env().to_dict() for package in PACKAGES)
    assert ours == theirs
    monkeypatch.setenv("PYTRITON_TRITON_CONFIG_HTTP_PORT", "none")
    for package in PACKAGES:
        with pytest.raises(ValueError, match="none"):
            package.triton.TritonConfig.from_env()


def test_what_pytriton_refuses_in_tritons_configuration_is_refused() -> None:
    for package in PACKAGES:
        with pytest.raises(package.exceptions.PyTritonValidationError, match=r"http.*grpc"):
            package.triton.TritonConfig(allow_http=False, allow_grpc=False)
        with pytest.raises(package.exceptions.PyTritonValidationError, match=r"Invalid endpoint names.*nothing"):
            package.triton.TritonSecurityConfig(restricted_endpoints=["nothing"])
        with pytest.raises(TypeError):
            package.triton.TritonConfig("/models")
        assert package.triton.TritonSecurityConfig(restricted_endpoints=[]).access_token is None
    ours, theirs = (package.triton.TritonSecurityConfig() for package in PACKAGES)
    assert ours.restricted_endpoints == theirs.restricted_endpoints
    assert len(ours.access_token) == len(theirs.access_token)


SERVING = """
import numpy as np
from pytriton.model_config import Tensor
from pytriton.triton import Triton
X, Y = [Tensor(name="x", dtype=np.float32, shape=(-1,))], [Tensor(name="y", dtype=np.float32, shape=(-1,))]
triton = Triton()
triton.bind("echo", lambda requests: [{"y": request["x"]} for request in requests], X, Y)
triton.serve()
"""


def _finding(path: Path, first: Path = FOLDER) -> dict[str, Any]:
    """What is found of a script where PyTriton isn't installed: the folder of the stand-in comes before it."""
    return found_in(path, PYTHONPATH=f"{first}{os.pathsep}{FOLDER.parents[2]}")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from pytriton.client import ModelClient", "pytriton.client"),
        ("import pytriton.check.utils", "pytriton.check"),
        ("from pytriton import client", "pytriton.client"),
        ("from pytriton.decorators import nothing", "pytriton.decorators.nothing"),
        ("import pytriton; pytriton.client.ModelClient('localhost', 'm')", "pytriton.client"),
        ("import pytriton; pytriton.triton.get_libs_path()", "pytriton.triton.get_libs_path"),
    ],
)
def test_a_name_that_the_stand_in_lacks_is_refused_with_its_line(tmp_path: Path, line: str, name: str) -> None:
    script, helper = tmp_path / "server.py", tmp_path / "helper.py"
    for file, texts in ((script, {script: f"\n\n{line}\n{SERVING}"}),
                        (helper, {script: f"import helper\n{SERVING}", helper: f"\n\n{line}\n"})):  # fmt: skip
        for path, text in texts.items():
            path.write_text(text)
        problem = _finding(script)["problem"]
        assert problem["reason"].startswith(f"the script needs {name} at {file}:3, which PyTriton has")
        assert f"PyTriton is not installed under {sys.executable}" in problem["reason"]
        assert problem["fix"].startswith("set `python: own` for this deployment, or ")


def test_a_script_that_may_do_without_such_a_name_is_served_with_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "try:\n    from pytriton.client import ModelClient\nexcept ImportError:\n    pass\n"
        "def call():\n    import pytriton.check, pytriton.decorators\n    from pytriton import decorators\n"
        f"{SERVING}"
    )
    finding = _finding(script)
    assert finding["problem"] is None
    assert list(finding["settings"]) == ["echo"]
    lacking = ", which Headwater's stand-in for PyTriton lacks: uses of it fail"
    assert [text.partition(";")[0] for text in finding["warnings"]] == [
        f"line 2 imports pytriton.client.ModelClient{lacking}",
        f"line 6 imports pytriton.check{lacking}",
    ]


def test_an_installed_pytriton_that_cannot_be_imported_is_named_with_why(tmp_path: Path) -> None:
    script, package = tmp_path / "server.py", tmp_path / "other" / "pytriton" / "__init__.py"
    script.write_text(SERVING)
    package.parent.mkdir(parents=True)
    package.write_text("import numpy\nnumpy.no_such_name\n")
    problem = _finding(script, tmp_path / "other")["problem"]
    assert (
        "importing pytriton raised AttributeError: module 'numpy' has no attribute 'no_such_name'" in problem["reason"]
    )
    assert f"{package}:2" in problem["reason"]
    assert "remove it: Headwater stands in for it" in problem["fix"]


def test_a_folder_named_pytriton_beside_the_script_does_not_hide_the_stand_in(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVING)
    (tmp_path / "pytriton").mkdir()
    assert list(_finding(script)["settings"]) == ["echo"]


def test_a_triton_that_is_made_after_serve_is_refused() -> None:
    with pytest.raises(stand_in.exceptions.PyTritonInvalidOperationError, match="before serve"):
        stand_in.triton.Triton()
