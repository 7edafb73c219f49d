"""Checks the models that a PyTriton script binds, and the results of its functions.

A configuration is a ``TritonModelConfig`` with inputs and outputs of type ``TensorSpec``; both classes are in
``pytriton.model_config.triton_model_config``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.datatypes import DATATYPES
from headwater.errors import DeclarationError
from headwater.model import Tensor

__all__ = ["check_config", "check_responses", "declared"]


def check_config(config: Any) -> None:
    """Check that there are inputs and outputs, no optional outputs and, if the model batches, rows in a batch.

    Raises:
        DeclarationError: fields are invalid; the message names all of them.
    """
    faults = [f"{kind}: expected at least one" for kind in ("inputs", "outputs") if not getattr(config, kind)]
    faults += [f"output {spec.name!r}: expected optional=False, got True" for spec in config.outputs if spec.optional]
    if config.batching and config.max_batch_size < 1:
        faults.append(f"max_batch_size: expected a number from 1 on, got {config.max_batch_size!r}")
    if faults:
        raise DeclarationError(*faults)


def declared(spec: Any) -> Tensor:
    """A ``TensorSpec`` as a model's declaration.

    Raises:
        DeclarationError: its type or shape can't be served.
    """
    try:
        dtype = np.dtype(spec.dtype)
        shape = [int(size) for size in spec.shape]
    except (TypeError, ValueError) as error:
        got = f"dtype {spec.dtype!r} and shape {spec.shape!r}"
        raise DeclarationError(
            f"tensor {spec.name!r}: expected a type of numpy's and a tuple of integers, got {got}: {error}"
        ) from error
    datatype = "BYTES" if dtype.kind in "SO" else next((n for n, d in DATATYPES.items() if d.numpy == dtype), "")
    if not datatype or spec.dtype is None:  # numpy takes None for float64
        raise DeclarationError(
            f"tensor {spec.name!r}, dtype: expected np.bool_, a numpy integer, np.float16, np.float32, np.float64, "
            f"np.bytes_ or object, got {spec.dtype!r}"
        )
    return Tensor(spec.name, datatype, shape, optional=bool(spec.optional))


def check_responses(config: Any, responses: Any, requests: int, *, strict: bool) -> None:
    """Check the result of a function for a call.

    Raises:
        ValueError: the result isn't a list with a dict of arrays for each request; or, with ``strict``, an output isn't
            as declared.
    """
    name = config.model_name
    if not isinstance(responses, list) or not all(isinstance(response, dict) for response in responses):
        raise ValueError(
            f"The function of `{name}` must return a list of response dicts with numpy arrays, got {responses!r:.200}"
        )
    if len(responses) != requests:
        raise ValueError(f"The function of `{name}` returned {len(responses)} responses, expected {requests}")
    specs = {spec.name: spec for spec in config.outputs}
    for response in responses:
        for output, value in response.items():
            title = f"Returned output `{output}` for model `{name}`"
            _check_type(title, output, value)
            if strict:
                _check_declared(title, specs.get(output), value, batching=config.batching)


def _check_type(title: str, output: Any, value: Any) -> None:
    if not isinstance(output, str):
        raise ValueError(f"{title}: expected a string for its name, got {type(output).__name__}")
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{title}: expected a numpy array, got {type(value).__name__}")
    if value.dtype.kind not in "biufOSU":
        raise ValueError(f"{title}: expected bool, numbers, strings or bytes, got dtype {value.dtype}")
    if value.dtype.kind == "O" and value.size and not isinstance(value.item(0), bytes):
        raise ValueError(f"{title}: expected bytes in an array of objects, got {type(value.item(0)).__name__}")


def _check_declared(title: str, spec: Any, value: Any, *, batching: bool) -> None:
    """Check an output against its declaration.

    Raises:
        ValueError: the output has another type or shape. The message has PyTriton's wording, which clients may know.
    """
    if spec is None:
        raise ValueError(f"{title} is not defined in model config.")
    is_text = np.dtype(spec.dtype).kind in "SO"
    if is_text != (value.dtype.kind in "OSU") or not (is_text or np.issubdtype(value.dtype, spec.dtype)):
        returned = f"{value.dtype} ({value.dtype.kind})"
        raise ValueError(f"{title} has invalid type. Returned: {returned}. Expected: {spec.dtype}.")
    shape = value.shape[1:] if batching else value.shape
    compared = f"Returned: {shape}. Expected: {spec.shape}."
    if len(shape) != len(spec.shape):
        raise ValueError(f"{title} has invalid shapes. {compared}")
    if any(size != limit != -1 for size, limit in zip(shape, spec.shape, strict=True)):
        raise ValueError(f"{title} has invalid shapes at one or more positions. {compared}")
