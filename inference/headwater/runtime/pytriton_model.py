"""A model that a PyTriton script binds: ``pytriton:SCRIPT`` or ``pytriton:SCRIPT:NAME`` in a configuration.

The bound function gets the argument that PyTriton would pass: a list of ``Request``, one for each client's request in
the call. The names that this module imports from ``pytriton`` are PyTriton's, or the stand-in's where PyTriton isn't
installed: a script runs before these imports (`headwater.runtime.pytriton_script`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import queue
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES
from headwater.errors import BadOutput, DeclarationError, LoadError, Problem, ReplicaError, did_you_mean
from headwater.model import Model, Parameter, Tensor
from headwater.reference import find_path, script_and_name
from headwater.runtime.pytriton_checks import check_config, check_responses, declared
from headwater.runtime.pytriton_script import Binding, Script, run_script
from headwater.runtime.pytriton_warmup import warmup_calls
from headwater.signature import REQUEST
from headwater.wire.arrays import Array

__all__ = ["PytritonModel", "open_model", "settings_of"]

logger = logging.getLogger(__name__)

CONTEXT_ATTRIBUTE: Final = "__triton_context__"
"""The attribute in which PyTriton's decorators look for the configuration of the model that they serve."""
OPTIONS: Final = ("arguments", "idempotent", "ignore")
MOST_LEVELS: Final = 10
"""Number of Headwater's priorities; `headwater_server.dispatch.queue` has 1 to 10, by default 5."""
DEFAULT_PRIORITY: Final = 5
HEAVIEST: Final = 1_000_000
"""The greatest weight of a priority: a level goes before the next level as far as weights allow."""


class _ScriptCall(NamedTuple):
    """A call of a bound function."""

    requests: list[Any]
    """``pytriton.proxy.types.Request``."""
    rows: list[int]
    """Number of rows of each request."""


class PytritonModel(Model):
    """A function that a PyTriton script binds, as a model that answers each request at once, without streaming.

    Inputs, outputs and batching are the script's. Each client's request becomes a separate ``Request`` with its rows in
    the call and its parameters, without the optional inputs that the client left out. If the model doesn't batch, the
    function is called for a single row, without the batch axis, and clients may leave that axis out too. If ``bind()``
    gets several functions, each function is called by one thread at a time.

    Args:
        script: the script, run up to ``serve()``.
        binding: the arguments of its ``bind()``.
        idempotent: see `Model.idempotent`.

    Raises:
        DeclarationError: the configuration contradicts itself, or an input or output can't be served.
    """

    parameters = (Parameter(REQUEST, "str", "", per="row"),)

    def __init__(self, script: Script, binding: Binding, *, idempotent: bool = True) -> None:
        from pytriton.exceptions import PyTritonUnrecoverableError
        from pytriton.proxy.types import Request

        self._script = script
        self._binding = binding
        self._request, self._fatal = Request, PyTritonUnrecoverableError
        self._config = _triton_config(binding)
        check_config(self._config)
        self.inputs = tuple(map(declared, self._config.inputs))  # type: ignore[misc]
        self.outputs = tuple(map(declared, self._config.outputs))  # type: ignore[misc]
        self.idempotent = idempotent  # type: ignore[misc]
        self.bare_rows = not binding.config.batching  # type: ignore[misc]
        self.__doc__ = inspect.getdoc(binding.functions[0]) or f"`{binding.name}` of {script.path.name}."
        self._names = [tensor.name for tensor in self.outputs]
        self._free: queue.SimpleQueue[Callable[..., Any]] = queue.SimpleQueue()
        for function in binding.functions:
            self._free.put(function)
        self._turns = itertools.cycle(binding.functions)

    async def load(self, device: str) -> None:
        """Give the functions PyTriton's context, and make the calls of ``model_warmup``; a failed call is only logged.

        Raises:
            DeclarationError, OSError: as `warmup_calls`.
        """
        for function in self._binding.functions:
            self._binding.context.model_configs[function] = self._config
            setattr(getattr(function, "__self__", function), CONTEXT_ATTRIBUTE, self._binding.context)
        warmup = list(warmup_calls(self._binding.config.model_warmup or ()))
        for function, data in itertools.product(self._binding.functions, warmup):
            try:
                await _all(function([self._new_request(dict(data))]))
            except Exception as error:  # PyTriton also serves after a failed warm-up
                logger.warning("model_warmup of %s failed: %s: %s", self._binding.name, type(error).__name__, error)

    def __call__(self, /, parameters: Mapping[str, Any], **inputs: Array | None) -> dict[str, Array]:
        """Call a function; an exception of the function becomes the client's answer.

        Raises:
            ReplicaError: the function raised ``PyTritonUnrecoverableError``.
            BadOutput: the function's responses contradict each other, or don't match their requests.
            ValueError: as `check_responses`.
        """
        outputs = []
        for call in self._calls(parameters, inputs):
            function = self._free.get()
            try:
                result = function(call.requests)
                outputs.append(self._joined(call, _only(list(result)) if inspect.isgenerator(result) else result))
            except self._fatal as error:
                raise _unrecoverable(error) from error
            finally:
                self._free.put(function)
        return {name: np.concatenate([call_outputs[name] for call_outputs in outputs]) for name in self._names}

    def unload(self) -> None:
        """Let the script continue after ``serve()``, where it may clean up."""
        self._script.end()

    def _calls(self, parameters: Mapping[str, Any], inputs: Mapping[str, Array | None]) -> list[_ScriptCall]:
        """The calls for these rows: a single call, or a call for each row if the model doesn't batch."""
        arrays = {name: array for name, array in inputs.items() if array is not None}
        requests, counts, start = [], [], 0
        for request, rows in itertools.groupby(parameters[REQUEST]):
            end = start + len(list(rows))
            _, _, text = request.partition(" ")
            request_parameters = msgspec.json.decode(text) if text else {}
            parts = [slice(start, end)] if self._config.batching else range(start, end)
            for part in parts:
                data = {name: array[part] for name, array in arrays.items()}
                requests.append(self._new_request(data, dict(request_parameters)))
                counts.append(end - start if self._config.batching else 1)
            start = end
        if self._config.batching:
            return [_ScriptCall(requests, counts)]
        return [_ScriptCall([request], [1]) for request in requests]

    def _new_request(self, data: dict[str, Array], parameters: dict[str, Any] | None = None) -> Any:
        request = self._request(data=data, parameters=parameters)
        request.requested_output_names = self._names
        return request

    def _joined(self, call: _ScriptCall, responses: Any) -> dict[str, Array]:
        """The outputs of all rows of a call, in the declared types."""
        check_responses(self._config, responses, len(call.requests), strict=self._binding.strict)
        outputs: dict[str, Array] = {}
        for tensor in self.outputs:
            pieces = []
            for response, rows in zip(responses, call.rows, strict=True):
                if tensor.name not in response:
                    raise BadOutput(f"the function returned no output {tensor.name!r}, expected {self._names}")
                piece = response[tensor.name]
                piece = piece if self._config.batching else piece[np.newaxis]
                if piece.shape[:1] != (rows,):
                    raise BadOutput(f"output {tensor.name!r}: expected {rows} rows, got shape {list(piece.shape)}")
                pieces.append(piece if tensor.datatype == "BYTES" else _cast(tensor, piece))
            if len({piece.shape[1:] for piece in pieces}) > 1:
                shapes = " and ".join(str(list(piece.shape)) for piece in pieces)
                raise BadOutput(
                    f"output {tensor.name!r}: expected one shape for all requests of a call, got {shapes}; pad them, "
                    "or set `batching.max_batch_size: 1`"
                )
            outputs[tensor.name] = np.concatenate(pieces)
        return outputs


class _AwaitedModel(PytritonModel):
    """A model with coroutine functions; PyTriton runs any number of their calls at once."""

    async def __call__(  # type: ignore[override]
        self, /, parameters: Mapping[str, Any], **inputs: Array | None
    ) -> dict[str, Array]:
        """Await a function; raises as `PytritonModel.__call__`."""
        outputs = []
        for call in self._calls(parameters, inputs):
            try:
                outputs.append(self._joined(call, _only(await _all(next(self._turns)(call.requests)))))
            except self._fatal as error:
                raise _unrecoverable(error) from error
        return {name: np.concatenate([call_outputs[name] for call_outputs in outputs]) for name in self._names}


class _StreamingModel(PytritonModel):
    """A model with ``decoupled=True`` and functions that aren't async: generator functions, or functions with a single
    result."""

    def __call__(self, /, parameters: Mapping[str, Any], **inputs: Array | None) -> Iterator[dict[str, Array]]:  # type: ignore[override]
        """Yield the results of a function; raises as `PytritonModel.__call__`."""
        for call in self._calls(parameters, inputs):
            try:
                result = next(self._turns)(call.requests)
                for responses in result if inspect.isgenerator(result) else [result]:
                    yield self._joined(call, responses)
            except self._fatal as error:
                raise _unrecoverable(error) from error


class _AwaitedStream(PytritonModel):
    """A model with ``decoupled=True`` and functions that are coroutine functions or async generators."""

    async def __call__(  # type: ignore[override]
        self, /, parameters: Mapping[str, Any], **inputs: Array | None
    ) -> AsyncGenerator[dict[str, Array], None]:
        """Yield the results of a function; raises as `PytritonModel.__call__`."""
        for call in self._calls(parameters, inputs):
            try:
                async with contextlib.aclosing(_results(next(self._turns)(call.requests))) as results:
                    async for responses in results:
                        yield self._joined(call, responses)
            except self._fatal as error:
                raise _unrecoverable(error) from error


async def _results(result: Any) -> AsyncGenerator[Any, None]:
    """The results in a function's return value: a generator, plain or async, a coroutine, or the result itself."""
    if inspect.isasyncgen(result):
        async with contextlib.aclosing(result):
            async for responses in result:
                yield responses
    elif inspect.isgenerator(result):
        for responses in result:
            yield responses
    else:
        yield await result if inspect.isawaitable(result) else result


async def _all(result: Any) -> list[Any]:
    """All results in a function's return value; see `_results`."""
    return [responses async for responses in _results(result)]


def _only(results: Sequence[Any]) -> Any:
    if len(results) != 1:
        raise BadOutput(f"the function yielded {len(results)} results, expected 1 without `decoupled=True`")
    return results[0]


def open_model(path: str, options: Mapping[str, Any], search: Sequence[str] = ()) -> PytritonModel:
    """Run a script, found as `find_path` does, and make a model of one of its bindings.

    Args:
        path: ``SCRIPT``, or ``SCRIPT:NAME`` if it binds several models.
        options: ``arguments``, a list of texts that the script gets as ``sys.argv[1:]``; ``idempotent``; and
            ``ignore``, a list of names of unsupported settings without which the script may be served.

    Raises:
        LoadError: there is no such script, binding or option, the script fails, or it asks for an unsupported setting.
    """
    title = f"model pytriton:{path}"
    _check_options(title, options)
    file, name = script_and_name(path)
    script = run_script(title, find_path(title, file, search, "file"), options.get("arguments", ()))
    binding = script.binding(title, name)
    refused = {**script.refused, **_refusals(binding)}
    ignored = options.get("ignore", ())
    for setting in ignored:
        if setting not in refused:
            settings_text = ", ".join(refused) or "no unsupported setting"
            reason = (
                f"options.ignore: the script asks for {settings_text}, got {setting!r}{did_you_mean(setting, refused)}"
            )
            raise LoadError(Problem(title, reason, f"remove {setting!r} from `options.ignore`"))
    if unsupported := [setting for setting in refused if setting not in ignored]:
        reason = f"the script asks for {', '.join(unsupported)}, which Headwater does not support"
        fixes = [
            *dict.fromkeys(refused[setting] for setting in unsupported),
            f"serve it without, by `options.ignore: {unsupported}`",
        ]
        raise LoadError(Problem(title, reason, "; or ".join(fixes)))
    try:
        return _kind_of(binding)(script, binding, idempotent=options.get("idempotent", True))
    except DeclarationError as error:
        reason = f"bind() of {binding.name}: {error}"
        raise LoadError(Problem(title, reason, "correct the arguments of bind() in the script")) from error


def settings_of(binding: Binding) -> dict[str, Any]:
    """The fields of a deployment's configuration that the script sets: ``batching``, ``warmup_batch_sizes`` and, for
    several functions that may be called at once by threads, ``instances``.

    Headwater adds no warm-up to the script's ``model_warmup``, because neutral values may be meaningless to its
    function.
    """
    config, batcher = binding.config, binding.config.batcher
    batching: dict[str, Any] = {"max_batch_size": config.max_batch_size if config.batching else 1}
    if config.batching and batcher is not None:
        batching["max_queue_delay_ms"] = batcher.max_queue_delay_microseconds / 1000
        levels = batcher.priority_levels
        if 1 < levels <= MOST_LEVELS:
            weights = {level: round(HEAVIEST ** ((levels - level) / (levels - 1))) for level in range(1, levels + 1)}
            batching["priority_weights"] = weights
        policy = batcher.default_queue_policy
        if policy is not None and policy.max_queue_size > 0:
            batching["max_queue_size"] = policy.max_queue_size
    settings: dict[str, Any] = {"batching": batching, "warmup_batch_sizes": []}
    if len(binding.functions) > 1 and _kind_of(binding) is PytritonModel:
        settings["instances"] = len(binding.functions)
    return settings


def _kind_of(binding: Binding) -> type[PytritonModel]:
    """The class of model for these functions; PyTriton distinguishes them in the same way."""
    is_async = any(map(_is_async, binding.functions))
    if binding.config.decoupled:
        return _AwaitedStream if is_async else _StreamingModel
    return _AwaitedModel if is_async else PytritonModel


def _is_async(function: Callable[..., Any]) -> bool:
    called = function if inspect.isfunction(function) or inspect.ismethod(function) else function.__call__  # type: ignore[operator]
    return inspect.isasyncgenfunction(called) or inspect.iscoroutinefunction(called)


def _refusals(binding: Binding) -> dict[str, str]:
    """Unsupported settings of a ``bind()`` that would change answers. Maps each name to its fix."""
    batcher = binding.config.batcher
    if not binding.config.batching or batcher is None:
        return {}
    refused: dict[str, str] = {}
    if batcher.priority_levels > MOST_LEVELS:
        refused["priority_levels"] = f"use at most {MOST_LEVELS}"
    default, levels = batcher.default_priority_level, batcher.priority_levels
    if default and default != min(levels, DEFAULT_PRIORITY):
        refused["default_priority_level"] = "let clients send `priority`"
    if batcher.priority_queue_policy:
        refused["priority_queue_policy"] = "use default_queue_policy"
    policy = batcher.default_queue_policy
    if policy is not None and policy.default_timeout_microseconds:
        refused["default_queue_policy.default_timeout_microseconds"] = "set the deployment's `timeout_s`"
    return refused


def _check_options(title: str, options: Mapping[str, Any]) -> None:
    """Check a deployment's options.

    Raises:
        LoadError: an option is unknown or of another type.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            reason = f"unknown option {name!r}; its options are {', '.join(OPTIONS)}{did_you_mean(name, OPTIONS)}"
            raise LoadError(Problem(title, reason, f"correct or remove `options.{name}`"))
        if name == "idempotent" and not isinstance(value, bool):
            reason = f"options.idempotent: expected true or false, got {value!r:.80}"
            raise LoadError(Problem(title, reason, "correct `options.idempotent`"))
        if name != "idempotent" and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            reason = f"options.{name}: expected a list of texts, got {value!r:.80}"
            raise LoadError(Problem(title, reason, f"correct `options.{name}`"))


def _cast(tensor: Tensor, piece: Array) -> Array:
    """An output in its declared type, to which floating-point numbers may be rounded.

    Raises:
        BadOutput: the declared type is an integer or bool that can't hold a number.
    """
    dtype = DATATYPES[tensor.datatype].numpy
    with np.errstate(invalid="ignore"):  # numpy warns of numbers out of range, which are refused below
        cast = piece.astype(dtype, copy=False)
    if dtype.kind in "biu" and piece.dtype.kind in "biuf" and (cast != piece).any():
        reason = f"expected numbers that {tensor.datatype} holds, got {piece.dtype} with others"
        raise BadOutput(f"output {tensor.name!r}: {reason}; round them in the function, or declare another type")
    return cast


def _triton_config(binding: Binding) -> Any:
    """The binding as decorators see it: a ``pytriton.model_config.triton_model_config.TritonModelConfig``."""
    from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

    inputs, outputs = (
        [
            TensorSpec(tensor.name or f"{kind}_{place}", tensor.shape, tensor.dtype, tensor.optional)
            for place, tensor in enumerate(tensors, start=1)
        ]
        for kind, tensors in (("INPUT", binding.inputs), ("OUTPUT", binding.outputs))
    )
    return TritonModelConfig(
        model_name=binding.name,
        batching=binding.config.batching,
        batcher=binding.config.batcher,
        max_batch_size=binding.config.max_batch_size,
        decoupled=binding.config.decoupled,
        inputs=inputs,
        outputs=outputs,
    )


def _unrecoverable(error: Exception) -> ReplicaError:
    return ReplicaError(f"{type(error).__name__}: {error}")
