"""Requests of routes that map to a model's tensors (`headwater.mapping`): the inputs are rows of BYTES, the outputs
numbers or texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from starlette.types import Receive, Scope

from headwater.datatypes import pack_bytes
from headwater.model import Scalar
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.errors import BadRequest, CallableFailed
from headwater_server.gateway.http.exchange import DisconnectWatch
from headwater_server.gateway.identify import identify
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.telemetry.catalogue import Route
from headwater_server.telemetry.recorder import accept

__all__ = ["Computed", "Inputs", "chosen_model", "compute", "floats", "rows_at_once", "text_calls", "token_sum"]

Inputs: TypeAlias = dict[Any, RawTensor]
"""The inputs of a call, by name."""


class Computed(NamedTuple):
    """The result of `compute`."""

    outputs: dict[str, list[RawTensor]]
    """Tensors of each output, one tensor per call."""
    cache: str
    """How the cache was used: the slowest of the calls' results. A miss is slower than a shared computation, and a
    shared computation is slower than a hit. Empty: the deployment has no cache."""


def chosen_model(models: Models, scope: Scope, name: str, kind: Route, mapping: str) -> ServedModel:
    """The deployment, or its version, that answers a request. The request is counted as accepted for it.

    Args:
        models: all models of this worker.
        scope: the request's scope.
        name: the model that the request names.
        kind: the request's route, for its record.
        mapping: see `Models.check_mapped`.

    Raises:
        NotFound: no deployment has this name.
        BadRequest: the deployment does not have this mapping.
        Unavailable: the deployment accepts no requests now.
    """
    model = models.choose(scope, name)
    accept(scope, model.route.name, kind)
    models.check_mapped(model, mapping)
    return model


def rows_at_once(count: int, queue_size: int) -> int:
    """The number of rows in a call: all rows if a queue of ``queue_size`` can hold them, else half a queue but at least
    1, for calls in sequence."""
    return count if count <= queue_size else max(1, queue_size // 2)


def text_calls(model: ServedModel, columns: Mapping[str, Sequence[bytes]]) -> Iterator[Inputs]:
    """The inputs of the calls that rows need.

    Args:
        model: the model that computes the rows.
        columns: by input, its rows; each input is BYTES of shape [1], and all have the same number of rows.
    """
    count = len(next(iter(columns.values())))
    step = rows_at_once(count, model.route.max_queue_size)
    for start in range(0, count, step):
        rows = min(step, count - start)
        yield {
            name: RawTensor("BYTES", (rows, 1), pack_bytes(column[start : start + rows]))
            for name, column in columns.items()
        }


async def compute(
    scope: Scope,
    receive: Receive,
    model: ServedModel,
    calls: Iterable[Inputs],
    count: int,
    wanted: Sequence[str | None],
    field: str,
    parameters: Mapping[str, Scalar] | None = None,
) -> Computed:
    """Compute rows, within the deployment's ``timeout_s``.

    Args:
        scope, receive: ASGI arguments of the request; its body has been read.
        model: the model that computes the rows.
        calls: the inputs of each call; the calls are made in sequence.
        count: the number of rows of all calls.
        wanted: names of the outputs; None is left out.
        field: the request's field that contains the rows, which becomes the ``field`` of a `BadRequest`.
        parameters: parameters per row that differ from the defaults; the same for all rows.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    dispatcher = model.dispatcher
    signature = dispatcher.check_ready()
    ends_s = time.monotonic() + model.route.timeout_s
    tensors: dict[str, list[RawTensor]] = {name: [] for name in wanted if name is not None}
    defaults = {item.name: item.default for item in signature.parameters if item.per == "row"}
    caches = set()
    with DisconnectWatch(scope, receive):
        for inputs in calls:
            rows = next(iter(inputs.values())).shape[0]
            request = InferRequest(
                id="",
                inputs=inputs,
                rows=rows,
                outputs=[OutputWish(name, binary=True) for name in tensors],
                batch_parameters={item.name: item.default for item in signature.parameters if item.per == "batch"},
                row_parameters={**defaults, **(parameters or {})},
                heads=tuple(head.name for head in signature.heads if not tensors.keys().isdisjoint(head.outputs)),
                # 0: only the deployment's deadline applies
                timeout_us=0 if rows == count else max(1, int(1e6 * (ends_s - time.monotonic()))),
            )
            identify(scope, model, request)
            try:
                answer = await dispatcher.infer(request)
            except BadRequest as error:
                error.field = field
                raise
            for head in answer.omitted:  # the route needs every output
                if head.error is not None:
                    raise head.error
            caches.add(answer.cache)
            for name, parts in tensors.items():
                parts.append(answer.outputs[name])
    scope["state"]["note"] = f"rows={count}"
    return Computed(tensors, next((outcome for outcome in ("miss", "shared", "hit") if outcome in caches), ""))


def floats(
    parts: Sequence[RawTensor], output: str, place: Callable[[int], str], *, length: int | None = None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An FP32 output of several calls as a single array.

    Args:
        parts: the output of each call; all have the same shape except for the number of rows.
        output: the output's name.
        place: names the item of a row in the request, by the row's index.
        length: how many numbers of a row the answer takes; default: all.

    Returns:
        The numbers, with an axis of rows and an axis of ``length``.

    Raises:
        CallableFailed: a number is NaN or infinite: it would sort the results wrongly, and JSON has no such number.
    """
    pieces = [np.frombuffer(part.data, np.float32).reshape(part.shape)[:, :length] for part in parts]
    array: np.ndarray[Any, np.dtype[np.float32]] = np.concatenate(pieces)
    if not np.isfinite(array).all():
        row, column = np.argwhere(~np.isfinite(array))[0].tolist()
        value = float(array[row, column])
        message = f"{place(row)}: expected finite numbers in the model's output `{output}`, got {value}"
        raise CallableFailed(message)
    return array


def token_sum(outputs: Mapping[str, Sequence[RawTensor]], name: str | None) -> int:
    """The number of tokens that the model read: the sum of an INT32 output of several calls; 0 if it has no name."""
    return 0 if name is None else sum(int(np.frombuffer(part.data, "<i4").sum()) for part in outputs[name])
