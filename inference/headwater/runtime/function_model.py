"""A model that is a function, ``module:function`` in a configuration; the options declare its tensors."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from headwater.errors import LoadError, Problem
from headwater.model import Model
from headwater.runtime.tensor_options import (
    BATCH,
    EXAMPLES,
    STATES,
    check_names,
    declared_batch,
    declared_tensors,
    set_example,
    set_states,
)

__all__ = ["FunctionModel", "open_function"]


class FunctionModel(Model):
    """A function as a model; see `open_function`."""

    function: ClassVar[Callable[..., Any]]

    @classmethod
    def named(cls, result: Any) -> Any:
        """A function's result by output name: if there is a single output, a result that is no dict gets the output's
        name; other results are returned unchanged."""
        return result if isinstance(result, dict) or len(cls.outputs) > 1 else {cls.outputs[0].name: result}

    @classmethod
    async def awaited(cls, result: Awaitable[Any]) -> Any:
        """An async function's result by output name."""
        return cls.named(await result)


class _Plain(FunctionModel):
    def __call__(self, /, **inputs: Any) -> Any:
        result = type(self).function(**inputs)
        # A decorator may hide that the function is async.
        return self.awaited(result) if inspect.isawaitable(result) else self.named(result)


class _Async(FunctionModel):
    async def __call__(self, /, **inputs: Any) -> Any:
        return self.named(await type(self).function(**inputs))


class _Generator(FunctionModel):
    def __call__(self, /, **inputs: Any) -> Iterator[Any]:
        for result in type(self).function(**inputs):
            yield self.named(result)


class _AsyncGenerator(FunctionModel):
    async def __call__(self, /, **inputs: Any) -> AsyncIterator[Any]:
        results = type(self).function(**inputs)
        try:
            async for result in results:
                yield self.named(result)
        finally:
            await results.aclose()


def open_function(
    reference: str, function: Callable[..., Any], options: Mapping[str, Any], search: Sequence[str] = ()
) -> FunctionModel:
    """Make a model of a function, plain or async, or of a generator that streams.

    Its arguments are the inputs by name, numpy arrays with the batch axis first, or torch tensors with the option
    ``arrays: torch``. It returns or yields a dict of arrays by output name, or a single array if there is only one
    output.

    The options are ``inputs``, ``outputs`` and ``arrays``, ``batch: none`` for a function of arrays without a batch
    axis, ``states`` (see `set_states`), and ``example`` and ``sizes`` (see `set_example`).

    Raises:
        LoadError: an option is unknown, missing or invalid, or the function takes other arguments.
    """
    title = f"model {reference}"
    check_names(title, options, ["inputs", "outputs", "arrays", BATCH, STATES, *EXAMPLES])
    inputs, outputs = (declared_tensors(title, options, where) for where in ("inputs", "outputs"))
    arrays = options.get("arrays", "numpy")
    if arrays not in ("numpy", "torch"):
        reason = f"options.arrays: expected numpy or torch, got {arrays!r:.80}"
        raise LoadError(Problem(title, reason, "correct or remove `options.arrays`"))
    signature = inspect.signature(function)
    try:
        signature.bind(**{tensor.name: None for tensor in inputs})
    except TypeError as error:
        raise LoadError(
            Problem(
                title,
                f"options.inputs: the function is called with {', '.join(tensor.name for tensor in inputs)}, and takes "
                f"{signature}: {error}",
                "name the inputs as the function's arguments",
            )
        ) from None
    base: type[FunctionModel] = _Plain
    if inspect.isasyncgenfunction(function):
        base = _AsyncGenerator
    elif inspect.isgeneratorfunction(function):
        base = _Generator
    elif inspect.iscoroutinefunction(function):
        base = _Async
    declared = {
        "inputs": inputs, "outputs": outputs, "arrays": arrays, "batch": declared_batch(title, options),
        "function": staticmethod(function),
    }  # fmt: skip
    origin = {"__doc__": function.__doc__, "__module__": function.__module__}
    model: FunctionModel = type(function.__name__, (base,), {**declared, **origin})()
    set_states(title, model, options)
    set_example(title, model, options, search)
    return model
