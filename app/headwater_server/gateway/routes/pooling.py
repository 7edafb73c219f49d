"""``POST /score``, ``/v1/score`` and ``/pooling``: what a model computes of pairs and of texts, as vLLM has it."""

from __future__ import annotations

import base64
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from headwater_server.errors import BadRequest
from headwater_server.gateway.http.replies import Reply
from headwater_server.gateway.routes import mapped
from headwater_server.gateway.routes.classify import classify, read_items
from headwater_server.gateway.routes.embeddings import INPUTS_SCHEMA, TRUNCATE, Setting, embed, read_inputs
from headwater_server.gateway.routes.mapped import Call, OnlyModel
from headwater_server.gateway.routes.rerank import rank

__all__ = ["PoolingRequest", "ScoreRequest", "pool", "score"]

_SIDES: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that vLLM has for the two sides of pairs."""
_TASKS: Final = {"embed": "embedding", "classify": "classification"}
_Texts: TypeAlias = str | list[str]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to score pairs: a text with another, a text with each of several, or each with its own."""

    model: OnlyModel | None = None
    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, description="Cut longer documents, if the model can")] | None = None


class PoolingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for embeddings, or for the scores of labels."""

    model: OnlyModel | None = None
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=INPUTS_SCHEMA)]
    task: Annotated[Literal["embed", "classify"], Meta(description="Default: what the model does")] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, description="Of a model that embeds")] | None = None


async def score(call: Call) -> Reply:
    """Answer with the score of each pair, in the request's order."""
    body = await call.read(ScoreRequest)
    names = tuple(name for name in dict.fromkeys(sum(_SIDES, ())) if getattr(body, name) is not None)
    if names not in _SIDES:
        sides = ", or ".join(map(" and ".join, _SIDES))
        raise BadRequest(f"text_1: expected {sides}, got {' and '.join(names) or 'no texts'}", field="text_1")
    texts: list[list[str]] = []
    for name in names:
        side = getattr(body, name)
        texts.append([side] if isinstance(side, str) else side)
        mapped.check_count(name, len(texts[-1]), "texts")
    first, second = texts
    if len(first) not in (1, len(second)):
        message = f"{names[0]}: expected a single text, or {len(second)} as in {names[1]}, got {len(first)}"
        raise BadRequest(message, field=names[0])
    queries = first * (len(second) // len(first))
    cut = body.max_tokens_per_doc
    model, scores, tokens, cache = await rank(call, body.model, queries, second, names[1], cut)
    data = [{"score": value} for value in scores]
    return mapped.reply(mapped.listed(call, model, "score", data, tokens), cache)


async def pool(call: Call) -> Reply:
    """Answer with the embedding of each input, or with the scores of its labels."""
    body = await call.read(PoolingRequest)
    mappings = [_TASKS[body.task]] if body.task else list(_TASKS.values())
    name = call.name(body.model, *mappings)
    if call.models.mapping_of(name, mappings) == "classification":
        if body.truncate_prompt_tokens is not None:
            message = f"{TRUNCATE}: expected it for a model that embeds, got it for `{name}`; leave it out"
            raise BadRequest(message, field=TRUNCATE)
        items = await call.decode(lambda _: read_items(body.input), is_part=True)
        model, rows, tokens, cache = await classify(call, name, items)
        rows = [np.array(row, np.float32) for row in rows]
    else:
        inputs = await call.decode(lambda _: read_inputs(body.input, "input"), is_part=True)
        cut = Setting(TRUNCATE, "cut", body.truncate_prompt_tokens)
        model = mapped.chosen_model(call, name, "embeddings", "embedding")
        _, rows, tokens, cache = await embed(call, model, inputs, "input", cut)
    if body.encoding_format == "base64":
        rows = [base64.b64encode(row.tobytes()).decode() for row in rows]
    return mapped.reply(mapped.listed(call, model, "pooling", [{"data": row} for row in rows], tokens), cache)
