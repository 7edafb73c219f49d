"""``POST /v2/embed`` and ``/v1/embed``: Cohere's API for embeddings. Its ranking is in
`headwater_server.gateway.routes.rerank`."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from headwater_server.errors import BadRequest
from headwater_server.gateway.http.replies import Reply
from headwater_server.gateway.routes import mapped
from headwater_server.gateway.routes.embeddings import Setting, embed
from headwater_server.gateway.routes.mapped import MAX_ROWS, Call, OnlyModel

__all__ = ["CohereEmbedRequest", "respond"]

_InputType: TypeAlias = Literal["search_document", "search_query", "classification", "clustering"]


class CohereEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for embeddings."""

    model: OnlyModel | None = None
    texts: Annotated[list[str], Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_ROWS})]
    input_type: Annotated[_InputType, Meta(description="Chooses a prompt of the model, if it has any")] | None = None
    embedding_types: Annotated[list[Literal["float", "binary", "ubinary", "base64"]], Meta(min_length=1)] | None = None
    truncate: Annotated[Literal["NONE", "END"], Meta(description="Default: END")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, description="Cut longer texts to so many tokens")] | None = None
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    images: None = None
    inputs: None = None


async def respond(call: Call) -> Reply:
    """Answer with one embedding per text, in each of the types."""
    body = await call.read(CohereEmbedRequest)
    mapped.check_count("texts", len(body.texts), "texts")
    cut = Setting("truncate", "cut", 0 if body.truncate == "NONE" else -1, needs_model=False)
    if body.max_tokens is not None:
        if body.truncate == "NONE":
            raise BadRequest("max_tokens: expected it with truncate END, got it with NONE", field="max_tokens")
        cut = Setting("max_tokens", "cut", body.max_tokens)
    prompt = Setting("input_type", "prompt", body.input_type, needs_model=False)
    dimensions = Setting("output_dimension", "dimensions", body.output_dimension)
    model = mapped.chosen_model(call, body.model, "embeddings", "embedding")
    _, rows, tokens, cache = await embed(call, model, body.texts, "texts", dimensions, cut, prompt)
    matrix, version = np.stack(rows), call.scope["path"][2:3]
    by_type = {kind: _typed(kind, matrix) for kind in body.embedding_types or ("float",)}
    is_bare = body.embedding_types is None and version == "1"
    content = {
        "id": call.scope["state"]["request_id"],
        "response_type": "embeddings_floats" if is_bare else "embeddings_by_type",
        "embeddings": matrix if is_bare else by_type,
        "texts": body.texts,
        "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": tokens}},
    }
    return mapped.reply(content, cache)


def _typed(kind: str, matrix: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    """Embeddings as Cohere defines a type: ``binary`` and ``ubinary`` are a bit for each number, 1 for those above 0,
    eight in a byte, the first in its highest bit; ``binary`` is ``ubinary`` less 128.

    Raises:
        BadRequest: bits of embeddings whose length is no multiple of eight.
    """
    if kind == "float":
        return matrix
    if kind == "base64":
        return [base64.b64encode(row.tobytes()).decode() for row in matrix]
    if matrix.shape[1] % 8:
        message = f"embedding_types: expected embeddings of a multiple of 8 numbers for {kind}, got {matrix.shape[1]}"
        raise BadRequest(message, field="embedding_types")
    packed = np.packbits(matrix > 0, axis=1)
    return packed if kind == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
