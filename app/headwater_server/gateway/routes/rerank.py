"""``POST /v1/rerank`` and ``/rerank`` as Jina and vLLM have them, ``/v2/rerank`` as Cohere does, over a model that
declares a `headwater.Reranking`; and `rank`, with which other routes rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from headwater.model import Scalar
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.replies import Reply
from headwater_server.gateway.routes import mapped
from headwater_server.gateway.routes.mapped import MAX_ROWS, Call, OnlyModel, Result

__all__ = ["RerankRequest", "best_first", "check_documents", "rank", "respond"]

_CUT: Final = "max_tokens_per_doc"
"""The parameter per row that cuts a document; see `headwater.Reranking`."""
_ONE_FIELD: Final = Meta(min_length=1, max_length=1, extra={"expected": "the name of one field"})


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to rank documents."""

    model: OnlyModel | None = None
    query: str
    documents: Annotated[list[str | dict[str, str]], Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_ROWS})]
    top_n: Annotated[int, Meta(ge=1, description="So many of the best; default: all")] | None = None
    return_documents: Annotated[bool, Meta(description="Default: yes; at /v2/rerank no")] | None = None
    rank_fields: Annotated[list[str], _ONE_FIELD] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, description="Cut longer documents, if the model can")] | None = None
    max_chunks_per_doc: None = None


async def respond(call: Call) -> Reply:
    """Answer with the documents' scores, the best first."""
    body = await call.read(RerankRequest)
    check_documents(body.query, "documents", len(body.documents))
    key = body.rank_fields[0] if body.rank_fields else "text"
    for index, entry in enumerate(body.documents):
        if isinstance(entry, dict) and key not in entry:
            message = f"documents[{index}].{key}: expected a text to rank by, got an object without this field"
            raise BadRequest(message, field="documents")
    texts = [entry if isinstance(entry, str) else entry[key] for entry in body.documents]
    documents = [{"text": entry} if isinstance(entry, str) else entry for entry in body.documents]
    queries, cut = [body.query] * len(texts), body.max_tokens_per_doc
    model, scores, tokens, cache = await rank(call, body.model, queries, texts, "documents", cut)
    returns = call.scope["path"] != "/v2/rerank" if body.return_documents is None else body.return_documents
    content = {
        "id": call.scope["state"]["request_id"],
        "object": "list",
        "model": model.name,
        "results": [
            {"index": index, "relevance_score": scores[index], **({"document": documents[index]} if returns else {})}
            for index in best_first(scores, body.top_n)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return mapped.reply(content, cache)


def check_documents(query: str, field: str, count: int) -> None:
    """Raise `BadRequest` if a query is empty, or if ``field`` has no documents or too many."""
    if not query:
        raise BadRequest("query: expected a text, got an empty one", field="query")
    mapped.check_count(field, count, "documents")


async def rank(
    call: Call, name: str | None, queries: Sequence[str], documents: Sequence[str], field: str, cut: int | None = None
) -> Result:
    """Score pairs of a query and a document.

    Args:
        call: the request.
        name: the model that the body names.
        queries, documents: the pairs; ``field`` of the request has the documents.
        cut: the tokens to which a longer document is cut; None: as the model does by itself.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    model = mapped.chosen_model(call, name, "rerank", "reranking")
    spec = model.dispatcher.check_ready().reranking
    assert spec is not None
    parameters: dict[str, Scalar] = {}
    if cut is not None:
        parameters[_CUT] = mapped.parameter_value(model, _CUT, _CUT, cut, "can't be told where to cut documents")
    columns = {spec.query: [text.encode() for text in queries], spec.document: [text.encode() for text in documents]}
    calls, wanted = mapped.text_calls(model, columns), [spec.score, spec.tokens]
    outputs, cache = await mapped.compute(call, model, calls, len(documents), wanted, field, parameters)
    scores = mapped.floats(outputs[spec.score], spec.score, (field + "[{}]").format)[:, 0].tolist()
    return Result(model, scores, mapped.token_sum(outputs, spec.tokens), cache)


def best_first(scores: Sequence[float], count: int | None = None) -> list[int]:
    """The places of the ``count`` highest scores, or of all, the highest first."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:count]
