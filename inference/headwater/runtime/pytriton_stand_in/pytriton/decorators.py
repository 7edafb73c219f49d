"""Decorators of functions that answer requests.

A bound function takes a list of requests and returns a list of responses. With `batch` and `sample` the function takes
arrays instead. The other decorators change the requests, or the arrays, before the function gets them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from .exceptions import PyTritonBadParameterError, PyTritonRuntimeError, PyTritonValidationError
from .model_config.triton_model_config import TensorSpec, TritonModelConfig

__all__ = [
    "ConstantPadder",
    "InferenceRequest",
    "InferenceRequests",
    "InferenceResult",
    "InferenceResults",
    "InputNames",
    "ModelConfigDict",
    "TritonContext",
    "batch",
    "convert_output",
    "fill_optionals",
    "first_value",
    "get_inference_request_batch_size",
    "get_model_config",
    "get_triton_context",
    "group_by_keys",
    "group_by_values",
    "pad_batch",
    "sample",
    "triton_context",
]

Array = Any
"""A numpy array of any type."""
Function = Callable[..., Any]
InputNames = list[str]
InferenceRequest = dict[str, Array]
InferenceRequests = list[InferenceRequest] | tuple[InferenceRequest, ...]
InferenceResult = dict[str, Array]
InferenceResults = list[InferenceResult] | tuple[InferenceResult, ...]
Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""A function that a decorator calls in place of the decorated function. Its arguments are the decorated function, the
object whose method it is (or None), and the arguments of the call."""

CONTEXT: Final = "__triton_context__"
"""The attribute with the `TritonContext`, on a bound function or on the object whose method it is."""
_NOT_INPUTS: Final = (CONTEXT,)
_LENGTH: Final = struct.Struct("<I")


class _Decorated:
    """A function, method or object with a decorator around it.

    It behaves like the decorated object: attributes are read and set on that object, and it becomes a method if that
    object would.
    """

    def __init__(self, wrapped: Any, wrapper: Wrapper) -> None:
        documented = {"__doc__": getattr(wrapped, "__doc__", None), "__module__": getattr(wrapped, "__module__", None)}
        vars(self).update(documented, __wrapped__=wrapped, _wrapper=wrapper)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        wrapped = self.__wrapped__
        return self._wrapper(wrapped, getattr(wrapped, "__self__", None), args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if not hasattr(self.__wrapped__, "__get__"):
            return self
        if instance is None and inspect.isfunction(self):  # Class.method, which is called with the object

            @functools.wraps(self.__wrapped__)
            def call(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
                return self.__get__(instance, owner)(*args, **kwargs)

            return call
        return _Decorated(self.__wrapped__.__get__(instance, owner), self._wrapper)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)

    def __str__(self) -> str:
        return str(self.__wrapped__)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # inspect recognizes functions and methods by it
        return self.__wrapped__.__class__


def _decorator(wrapper: Wrapper) -> Callable[[Function], Any]:
    """Make a decorator from a function that is called in place of each decorated function."""

    @functools.wraps(wrapper)
    def decorate(wrapped: Function) -> Any:
        return _Decorated(wrapped, wrapper)

    return decorate


class ModelConfigDict(MutableMapping[Function, TritonModelConfig]):
    """Configurations by bound function; any decorated or undecorated form of the function may be used as key."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Function, TritonModelConfig]] = {}

    def __getitem__(self, infer_callable: Function) -> TritonModelConfig:
        return self._entries[self._key(infer_callable)][1]

    def __setitem__(self, infer_callable: Function, config: TritonModelConfig) -> None:
        self._entries[self._key(infer_callable)] = infer_callable, config

    def __delitem__(self, infer_callable: Function) -> None:
        del self._entries[self._key(infer_callable)]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Function]:
        return (infer_callable for infer_callable, _ in self._entries.values())

    @staticmethod
    def _key(infer_callable: Function) -> str:
        """The text of a function, equal for all its decorated forms; for ``__call__``, the text of its object."""
        if inspect.ismethod(infer_callable) and infer_callable.__name__ == "__call__":
            return str(infer_callable.__self__)
        return str(infer_callable)


@dataclass
class TritonContext:
    """Data about a ``Triton`` for the functions that it binds."""

    model_configs: ModelConfigDict = field(default_factory=ModelConfigDict)


def get_triton_context(wrapped: Any, instance: Any) -> TritonContext:
    """The context of a bound function, or of the object whose method it is.

    Raises:
        PyTritonValidationError: the function isn't bound.
    """
    owner = wrapped if instance is None else instance
    if not hasattr(owner, CONTEXT):
        raise PyTritonValidationError(f"{owner!r} has no {CONTEXT}: it must be bound with Triton.bind()")
    context: TritonContext = getattr(owner, CONTEXT)
    return context


def get_model_config(wrapped: Any, instance: Any) -> TritonModelConfig:
    """The configuration of a bound function.

    Raises:
        PyTritonValidationError: the function isn't bound.
    """
    return get_triton_context(wrapped, instance).model_configs[wrapped]


def get_inference_request_batch_size(inference_request: Mapping[str, Array]) -> int:
    """Number of rows of a request: the rows of its first input."""
    rows: int = next(iter(inference_request.values())).shape[0]
    return rows


def convert_output(
    outputs: Any, wrapped: Any = None, instance: Any = None, model_config: TritonModelConfig | None = None
) -> dict[str, Array]:
    """Outputs by name, from outputs that a function returned by name or in the declared order.

    Raises:
        PyTritonValidationError: there are more or fewer outputs than declared, or they are not in a dict, list or
            tuple.
    """
    if isinstance(outputs, dict):
        return outputs
    if not isinstance(outputs, (list, tuple)):
        raise PyTritonValidationError(f"Unsupported output type: expected a dict, list or tuple, got {type(outputs)}")
    names = [output.name for output in (model_config or get_model_config(wrapped, instance)).outputs or ()]
    if len(outputs) != len(names):
        raise PyTritonValidationError(
            f"Outputs length: expected {len(names)} outputs ({', '.join(names)}), got {len(outputs)}"
        )
    return dict(zip(names, outputs, strict=True))


@_decorator
def sample(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with the inputs, by name, of the only request; other requests would be ignored. For models
    without batching. Returns a list with the outputs by name."""
    requests, *other_args = args
    return [convert_output(wrapped(*other_args, **{**kwargs, **requests[0]}), wrapped, instance)]


@_decorator
def batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with the inputs of all requests by name, with the rows of the requests joined in order.

    Raises:
        PyTritonValidationError: the requests have different inputs.
        ValueError: an output has another number of rows than the inputs.
    """
    requests, *other_args = args
    names = requests[0].keys()
    if any(request.keys() != names for request in requests):
        raise PyTritonValidationError(
            "Cannot batch requests with different set of inputs; put @group_by_keys before @batch"
        )
    inputs = {name: np.concatenate([request[name] for request in requests]) for name in names}
    ends = list(itertools.accumulate(map(get_inference_request_batch_size, requests)))

    def split(result: Any) -> list[dict[str, Array]]:
        outputs = convert_output(result, wrapped, instance)
        wrong = [f"{name}: {array.shape}" for name, array in outputs.items() if array.shape[0] != ends[-1]]
        if wrong:
            raise ValueError(
                f"Received output tensors with different batch sizes: {', '.join(wrong)}. "
                f"Expected batch size: {ends[-1]}."
            )
        return [
            {name: array[start:end] for name, array in outputs.items()}
            for start, end in itertools.pairwise([0, *ends])
        ]  # fmt: skip

    result = wrapped(*other_args, **{**kwargs, **inputs})
    return (split(part) for part in result) if inspect.isgenerator(result) else split(result)


def group_by_values(
    *keys: str, pad_fn: Callable[[InferenceResults], InferenceResults] | None = None
) -> Callable[[Function], Any]:
    """Make a decorator that calls a function separately for each group of rows with equal values of some inputs. It
    must be used after `batch`.

    Args:
        keys: names of the inputs.
        pad_fn: pads the results of all calls to a common shape for each output, for example a `ConstantPadder`; None:
            an output must have the same shape in all calls.
    """

    @_decorator
    def grouped(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = wrapped
        while inner is not None:
            if getattr(inner, "_wrapper", None) is inspect.unwrap(batch):
                raise PyTritonRuntimeError("The @group_by_values decorator must be used after the @batch decorator.")
            inner = getattr(inner, "__wrapped__", None)
        context = {name: value for name, value in kwargs.items() if name in _NOT_INPUTS}
        inputs = {name: value for name, value in kwargs.items() if name not in _NOT_INPUTS}
        size = get_inference_request_batch_size(inputs)
        values = [tuple(_sortable(inputs[key][row]) for key in keys) for row in range(size)]
        order = sorted(range(size), key=values.__getitem__)
        groups = [list(rows) for _, rows in itertools.groupby(order, values.__getitem__)]
        results: Sequence[InferenceResult] = [
            wrapped(*args, **{name: array[rows, ...] for name, array in inputs.items()}, **context) for rows in groups
        ]
        if pad_fn is not None:
            results = pad_fn(tuple(results))
        outputs = {
            name: np.zeros((size, *array.shape[1:]), dtype=array.dtype) for name, array in results[0].items()
        }  # fmt: skip
        for rows, result in zip(groups, results, strict=False):
            for name, array in result.items():
                outputs[name][rows, ...] = array
        return outputs

    return grouped


def _sortable(value: Any) -> Any:
    """A row's value in a form that can be compared and sorted: equal values have equal forms."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind not in "OS":
        return value.tobytes()
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in value.ravel().tolist()]
    packed = b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    return _LENGTH.pack(len(packed)) + packed if texts else b""


class ConstantPadder:
    """Pads the results of calls at the end of each dimension, so that each output has the same shape in all results.

    Args:
        pad_value: the padding of numbers; texts are padded with empty texts.
    """

    def __init__(self, pad_value: Any = 0) -> None:
        self.pad_value = pad_value

    def __call__(self, batches_list: InferenceResults) -> InferenceResults:
        """Pad results; a result may lack outputs.

        Raises:
            PyTritonRuntimeError: an output has different types.
        """
        padded: list[dict[str, Array]] = [{} for _ in batches_list]
        for name in dict.fromkeys(itertools.chain.from_iterable(result.keys() for result in batches_list)):
            arrays = {place: result[name] for place, result in enumerate(batches_list) if result.get(name) is not None}
            shape = np.max([array.shape[1:] for array in arrays.values()], axis=0)
            dtype = _common_type(name, [array.dtype for array in arrays.values()])
            value: Any = b"" if dtype.kind in "SUO" else self.pad_value
            for place, array in arrays.items():
                widths = [
                    (0, 0),
                    *((0, target_size - here) for target_size, here in zip(shape, array.shape[1:], strict=True)),
                ]
                padded[place][name] = np.pad(array, widths, constant_values=value).astype(dtype)
        return padded


def _common_type(name: str, dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """The type of all arrays of an output; for texts, the type of the longest."""
    first = dtypes[0]
    same = all(dtype.kind == first.kind if first.kind in "SU" else dtype == first for dtype in dtypes)
    if not same:
        dtype_names = ", ".join(sorted({str(dtype) for dtype in dtypes}))
        raise PyTritonRuntimeError(f"All arrays of {name!r} must have the same dtype, got {dtype_names}")
    return max(dtypes, key=lambda dtype: dtype.itemsize)


@_decorator
def group_by_keys(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function separately for each group of requests with inputs of the same names. Must be used before
    `batch`."""
    requests, *other_args = args
    names = [tuple(sorted(request.keys())) for request in requests]
    order = sorted(range(len(requests)), key=names.__getitem__)
    responses: dict[int, Any] = {}
    for _, group in itertools.groupby(order, names.__getitem__):
        places = list(group)
        answered = wrapped([requests[place] for place in places], *other_args, **kwargs)
        responses.update(zip(places, answered, strict=False))
    return [responses[place] for place in sorted(responses)]


def fill_optionals(**defaults: Array) -> Callable[[Function], Any]:
    """Make a decorator that adds missing optional inputs to requests.

    Args:
        defaults: a row of each input, without the batch axis.

    Raises:
        PyTritonBadParameterError: when the function is called: there is no such input, or a default doesn't fit it.
    """

    @_decorator
    def filled(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = get_model_config(wrapped, instance)
        _check_defaults(defaults, {spec.name: spec for spec in config.inputs or ()})
        (requests,) = args
        for request in requests:
            rows = get_inference_request_batch_size(request) if config.batching else None
            for name, value in defaults.items():
                if name not in request:
                    request[name] = value if rows is None else np.repeat(value[np.newaxis], rows, axis=0)
        return wrapped(requests, **kwargs)

    return filled


def _check_defaults(defaults: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    def refuse(faults: Iterable[str], expectation: str) -> None:
        faults_text = ", ".join(faults)
        if faults_text:
            raise PyTritonBadParameterError(f"fill_optionals: {expectation} {faults_text}")

    refuse(sorted(defaults.keys() - specs.keys()), f"expected names of inputs ({', '.join(specs)}), got")
    refuse(
        (f"{name}={value}" for name, value in defaults.items() if not isinstance(value, np.ndarray)),
        "expected NumPy arrays, got",
    )
    refuse(
        (
            f"{name}: dtype={value.dtype} expected_dtype={specs[name].dtype}"
            for name, value in defaults.items()
            if value.dtype != specs[name].dtype
        ),
        "expected the inputs' dtypes, got",
    )
    refuse(
        (
            f"{name}: shape={value.shape} expected_shape={specs[name].shape}"
            for name, value in defaults.items()
            if not _fits(value.shape, specs[name].shape)
        ),
        "expected the inputs' shapes, got",
    )


def _fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    return len(shape) == len(declared) and all(
        here == limit or limit == -1 for here, limit in zip(shape, declared, strict=True)
    )


@_decorator
def triton_context(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with its `TritonContext` as the argument ``triton_context``."""
    return wrapped(*args, **{**kwargs, "triton_context": get_triton_context(wrapped, instance)})


@_decorator
def pad_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat the last row until the batch has the next larger size of ``preferred_batch_size`` and ``max_batch_size``.
    It must be used after `batch`.

    Raises:
        IndexError: there are more rows than ``max_batch_size``.
    """
    inputs = {name: value for name, value in kwargs.items() if name not in _NOT_INPUTS}
    config = get_model_config(wrapped, instance)
    preferred = config.batcher.preferred_batch_size if config.batcher is not None else None
    rows = get_inference_request_batch_size(inputs)
    sizes = [size for size in [*sorted(preferred or ()), config.max_batch_size] if size >= rows]
    padded = {
        name: np.concatenate([array, np.repeat(array[-1:], sizes[0] - len(array), axis=0)])
        for name, array in inputs.items()
    }  # fmt: skip
    return wrapped(*args, **{**kwargs, **padded})


def first_value(*keys: str, squeeze_single_values: bool = True, strict: bool = True) -> Callable[[Function], Any]:
    """Make a decorator that gives a function the first row of some inputs, for a model that batches.

    The function takes requests, or the decorator is used after `batch`.

    Args:
        keys: names of the inputs; an optional input may be absent.
        squeeze_single_values: whether a row with one element becomes a scalar.
        strict: whether the rows must be equal.

    Raises:
        PyTritonBadParameterError: a name is reserved.
        PyTritonRuntimeError: when the function is called: its model doesn't batch, or rows differ.
    """
    reserved = [key for key in keys if key in _NOT_INPUTS]
    if reserved:
        raise PyTritonBadParameterError(f"first_value: expected names of inputs, got {', '.join(reserved)}")

    def replace(inputs: MutableMapping[str, Any]) -> None:
        for key in keys:
            if key in inputs:
                rows = inputs[key]
                if strict and len(np.unique(rows, axis=None if rows.dtype == object else 0)) > 1:
                    raise PyTritonRuntimeError(
                        f"The values on the {key!r} input are not equal: expected equal rows, got {rows!r}; group them "
                        "with @group_by_values, or set strict=False"
                    )
                value = rows[0]
                if squeeze_single_values and not np.isscalar(value) and all(size == 1 for size in value.shape):
                    value = value.reshape(())[()]
                inputs[key] = value

    @_decorator
    def first(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not get_model_config(wrapped, instance).batching:
            raise PyTritonRuntimeError("The @first_value decorator can only be used with models that support batching.")
        if kwargs.keys() - _NOT_INPUTS:
            replace(kwargs)
        else:
            for request in args[0]:
                replace(request)
        return wrapped(*args, **kwargs)

    return first
