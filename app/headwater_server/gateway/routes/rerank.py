"""``POST /v1/rerank``, ``/v2/rerank`` and ``/rerank``: Jina's and Cohere's API over a model that declares a
`headwater.Reranking`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import orjson
from msgspec import Meta
from starlette.types import Receive, Scope

from headwater_server.codecs.faults import read_json
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.replies import JSON, Reply, cache_headers
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.mapped import chosen_model, compute, floats, text_calls, token_sum

__all__ = ["RerankEndpoint", "RerankRequest"]

_MAX_DOCUMENTS: Final = 2048
"""Jina's limit; Cohere's is 10,000 chunks."""


class _DocumentObject(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to rank documents."""

    model: str
    query: str
    documents: Annotated[
        list[str | _DocumentObject], Meta(extra_json_schema={"minItems": 1, "maxItems": _MAX_DOCUMENTS})
    ]
    top_n: Annotated[int, Meta(ge=1, description="So many of the best; default: all")] | None = None
    return_documents: Annotated[bool, Meta(description="Whether results repeat the documents; default: no")] | None = (
        None
    )


class RerankEndpoint(Endpoint):
    """Answers with the documents' scores, the best first."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        body = await decoded(_read, raw, scope)
        model = chosen_model(self._models, scope, body.model, "rerank", "reranking")
        spec = model.dispatcher.check_ready().reranking
        assert spec is not None
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        columns = {spec.query: [body.query.encode()] * len(texts), spec.document: [text.encode() for text in texts]}
        calls, wanted = text_calls(model, columns), [spec.score, spec.tokens]
        outputs, cache = await compute(scope, receive, model, calls, len(texts), wanted, "documents")
        scores = floats(outputs[spec.score], spec.score, "documents[{}]".format)[:, 0].tolist()
        tokens = token_sum(outputs, spec.tokens)
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        content = {
            "id": scope["state"]["request_id"],
            "object": "list",
            "model": body.model,
            "results": [
                {
                    "index": index,
                    "relevance_score": scores[index],
                    **({"document": {"text": texts[index]}} if body.return_documents else {}),
                }
                for index in order
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return Reply(200, [orjson.dumps(content)], [JSON, *cache_headers(cache)])


def _read(raw: bytes) -> RerankRequest:
    body: RerankRequest = read_json(raw, RerankRequest)
    if not body.query:
        raise BadRequest("query: expected a text, got an empty one", field="query")
    if not 0 < len(body.documents) <= _MAX_DOCUMENTS:
        message = f"documents: expected 1 to {_MAX_DOCUMENTS} documents, got {len(body.documents)}"
        raise BadRequest(message, field="documents")
    return body
