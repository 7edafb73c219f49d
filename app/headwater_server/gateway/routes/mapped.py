"""Requests of routes that map to a model's tensors (`headwater.mapping`): the inputs are rows of BYTES, the outputs
numbers or texts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qs

import numpy as np
import orjson
from msgspec import Meta
from starlette.types import Receive, Scope

from headwater.datatypes import pack_bytes
from headwater.errors import DeclarationError
from headwater.model import Scalar
from headwater_server.codecs.faults import read_json, shown
from headwater_server.codecs.memory import object_bytes
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.errors import BadRequest, CallableFailed
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.endpoint import BodyEndpoint
from headwater_server.gateway.http.exchange import DisconnectWatch
from headwater_server.gateway.http.replies import JSON, Reply, cache_headers
from headwater_server.gateway.identify import identify
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.telemetry.catalogue import Route
from headwater_server.telemetry.recorder import accept

__all__ = [
    "MAX_ROWS", "Call", "Computed", "Inputs", "MappedEndpoint", "OnlyModel", "Result", "check_count", "chosen_model",
    "compute", "floats", "listed", "parameter_value", "reply", "rows_at_once", "text_calls", "token_sum",
]  # fmt: skip

MAX_ROWS: Final = 2048
"""Texts, documents or pairs of a request: the limit of OpenAI and Jina; Cohere's is 10,000 chunks."""
Inputs: TypeAlias = dict[Any, RawTensor]
"""The inputs of a call, by name."""
OnlyModel: TypeAlias = Annotated[str, Meta(description="May be left out where only one model can be meant")]
_Body = TypeVar("_Body")


class Call(NamedTuple):
    """A request whose body, ``raw``, has been read."""

    models: Models
    scope: Scope
    receive: Receive
    raw: bytes

    async def read(self, kind: type[_Body]) -> _Body:
        """The body as a value of this type."""
        return await decoded(lambda raw: read_json(raw, kind), self.raw, self.scope)

    async def decode(self, decode: Callable[[bytes], _Body], *, is_part: bool = False) -> _Body:
        """The body, decoded; or, with ``is_part``, a part that `read` left raw, whose memory is counted already."""
        return await decoded(decode, self.raw, self.scope, (lambda _: 0) if is_part else object_bytes)

    def name(self, name: str | None, *mappings: str) -> str:
        """The name of the model that the request means: the name in its body or in ``?model=``, or of the only model
        that has one of the mappings.

        Raises:
            BadRequest: body and query have different names, or neither has one and not exactly one model can be meant.
            Unavailable: neither has a name, and a model that may be meant has not loaded yet.
        """
        query: bytes = self.scope["query_string"]
        names = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("model", []) if query else []
        names += [] if name is None else [name]
        if len(set(names)) > 1:
            got = " and ".join(map(shown, names))
            raise BadRequest(f"model: expected one name, in the body or as ?model=, got {got}", field="model")
        return names[0] if names else self.models.only(mappings)


class MappedEndpoint(BodyEndpoint):
    """A route over a model's mapping; ``respond`` reads a request's body and answers it."""

    def __init__(self, models: Models, reader: BodyReader, respond: Callable[[Call], Awaitable[Reply]]) -> None:
        super().__init__(reader)
        self._models = models
        self._respond = respond

    async def answer_body(self, scope: Scope, receive: Receive, raw: bytes) -> Reply:
        """See `BodyEndpoint.answer_body`."""
        return await self._respond(Call(self._models, scope, receive, raw))


class Result(NamedTuple):
    """The result of a request, whatever its route."""

    model: ServedModel
    """The model that computed it."""
    rows: list[Any]
    """For each text, pair or image its embedding, score, or list of scores."""
    tokens: int
    cache: str
    """See `Computed`."""


class Computed(NamedTuple):
    """The result of `compute`."""

    outputs: dict[str, list[RawTensor]]
    """Tensors of each output, one tensor per call."""
    cache: str
    """How the cache was used: the slowest of the calls' results. A miss is slower than a shared computation, and a
    shared computation is slower than a hit. Empty: the deployment has no cache."""


def chosen_model(call: Call, name: str | None, kind: Route, mapping: str) -> ServedModel:
    """The deployment, or its version, that answers a request. The request is counted as accepted for it.

    Args:
        call: the request.
        name: the model that the body names; None: see `Call.name`.
        kind: the request's kind, for its record.
        mapping: see `Models.check_mapped`.

    Raises:
        NotFound: no deployment has this name.
        BadRequest: the deployment does not have this mapping; see also `Call.name`.
        Unavailable: the deployment accepts no requests now.
    """
    model = call.models.choose(call.scope, call.name(name, mapping))
    accept(call.scope, model.route.name, kind)
    call.models.check_mapped(model, mapping)
    return model


def parameter_value(model: ServedModel, name: str | None, field: str, value: Scalar, lack: str) -> Scalar:
    """The value of a model's parameter per row that a request's field sets.

    Raises:
        BadRequest: the model doesn't have the parameter, which ``lack`` says in words, or not this value of it.
    """
    for parameter in model.dispatcher.check_ready().parameters:
        if parameter.name == name and parameter.per == "row":
            try:
                return parameter.check(value)
            except DeclarationError as error:
                raise BadRequest(f"{field}: {error}", field=field) from error
    raise BadRequest(f"{field}: model `{model.name}` {lack}; leave it out", field=field)


def check_count(field: str, count: int, noun: str) -> None:
    """Raise `BadRequest` if a field has no items, or more than `MAX_ROWS`; ``noun`` names the items."""
    if not 0 < count <= MAX_ROWS:
        raise BadRequest(f"{field}: expected 1 to {MAX_ROWS} {noun}, got {count}", field=field)


def reply(content: object, cache: str) -> Reply:
    """A JSON answer, which may have arrays of numpy; for ``cache`` see `Computed`."""
    return Reply(200, [orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)], [JSON, *cache_headers(cache)])


def listed(call: Call, model: ServedModel, kind: str, items: Iterable[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """A list in OpenAI's form; each item gets its index, and ``kind`` as its ``object``."""
    return {
        "id": call.scope["state"]["request_id"],
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [{"index": index, "object": kind, **item} for index, item in enumerate(items)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


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
    call: Call,
    model: ServedModel,
    calls: Iterable[Inputs],
    count: int,
    wanted: Sequence[str | None],
    field: str,
    parameters: Mapping[str, Scalar] | None = None,
) -> Computed:
    """Compute rows, within the deployment's ``timeout_s``.

    Args:
        call: the request.
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
    with DisconnectWatch(call.scope, call.receive):
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
            identify(call.scope, model, request)
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
    call.scope["state"]["note"] = f"rows={count}"
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
