"""The routes of Hugging Face's text-embeddings-inference: ``POST /embed``, ``/similarity``, ``/predict`` and
``/rerank``, ``GET /info``, and the routes that no model here can serve."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from msgspec import Meta
from starlette.types import Receive, Scope

import headwater_server
from headwater_server.codecs.faults import read_json
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.replies import Reply
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes import mapped, rerank
from headwater_server.gateway.routes.classify import classify, labels_of, predictions
from headwater_server.gateway.routes.embeddings import INPUTS_SCHEMA, Setting, embed, read_inputs
from headwater_server.gateway.routes.mapped import MAX_ROWS, Call, OnlyModel

__all__ = [
    "REFUSED", "EmbedTextsRequest", "PredictRequest", "RefusingEndpoint", "RerankTextsRequest", "SimilarityRequest",
    "embed_texts", "info_routes", "predict", "rerank_any", "similarity",
]  # fmt: skip

REFUSED: Final = {
    "/embed_sparse": "no model of this server gives sparse embeddings; /embed has dense ones",
    "/embed_all": "no model gives embeddings of tokens here; a folder with the task `feature-extraction` does so at "
    "/v2/models/NAME/infer",
    "/decode": "this server has no tokenizer of a model that embeds; /detokenize decodes a language model's tokens",
}
"""Routes that no model can serve, each with the reason."""
_KINDS: Final = {"embedding": "embedding", "reranking": "reranker", "classification": "classifier"}
"""By mapping, the type of a model that has it."""
_TEXTS: Final = {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "string"}}
_PREDICT_SCHEMA: Final = {"anyOf": [
    {"type": "string"}, _TEXTS, {"type": "array", "minItems": 1, "maxItems": MAX_ROWS, "items": _TEXTS},
]}  # fmt: skip
_Inputs: TypeAlias = str | list[str | list[str]]
_Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


class _Cut(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    truncate: Annotated[bool, Meta(description="Whether longer texts are cut")] | None = None
    truncation_direction: Literal["right", "Right"] | None = None


class _Prompted(_Cut, kw_only=True):
    prompt_name: str | None = None

    def settings(self, where: str = "") -> tuple[Setting, Setting]:
        """The settings of an embedding; ``where`` is the path of the fields in the body."""
        value = None if self.truncate is None else -1 if self.truncate else 0
        cut = Setting(f"{where}truncate", "cut", value, needs_model=False)
        return cut, Setting(f"{where}prompt_name", "prompt", self.prompt_name)


class _Scored(_Cut, kw_only=True):
    model: OnlyModel | None = None
    raw_scores: Annotated[bool, Meta(description="Only false is supported")] | None = None

    def check(self) -> None:
        """Raise `BadRequest` if a field asks for what no model here has."""
        for field, is_wrong, expected in (
            ("raw_scores", self.raw_scores, "false, since scores are as the model gives them, got true"),
            ("truncate", self.truncate is False, "true, since models that rank or classify may cut texts, got false"),
        ):
            if is_wrong:
                raise BadRequest(f"{field}: expected {expected}; leave it out", field=field)


class EmbedTextsRequest(_Prompted, kw_only=True):
    """The body of a request for embeddings."""

    model: OnlyModel | None = None
    inputs: Annotated[msgspec.Raw, Meta(extra_json_schema=INPUTS_SCHEMA)]
    normalize: Annotated[bool, Meta(description="false: as the model gives them; default: true")] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class _Similar(msgspec.Struct, forbid_unknown_fields=True):
    source_sentence: str
    sentences: Annotated[list[str], Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_ROWS})]


class SimilarityRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to compare a sentence with others."""

    model: OnlyModel | None = None
    inputs: _Similar
    parameters: _Prompted | None = None


class _PredictParameters(msgspec.Struct, forbid_unknown_fields=True):
    function_to_apply: None = None
    top_k: Annotated[int, Meta(ge=1)] | None = None


class PredictRequest(_Scored, kw_only=True):
    """The body of a request to classify: a text, a pair of texts, or a list of lists of one or two texts."""

    inputs: Annotated[msgspec.Raw, Meta(extra_json_schema=_PREDICT_SCHEMA)]
    parameters: Annotated[_PredictParameters, Meta(description="As huggingface_hub sends it")] | None = None


class RerankTextsRequest(_Scored, kw_only=True):
    """The body of a request to rank texts."""

    query: str
    texts: Annotated[list[str], Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_ROWS})]
    return_text: bool | None = None


async def embed_texts(call: Call) -> Reply:
    """Answer with a list of embeddings, of length 1 unless the request says otherwise."""
    body = await call.read(EmbedTextsRequest)
    inputs = await call.decode(lambda _: read_inputs(body.inputs, "inputs"), is_part=True)
    model = mapped.chosen_model(call, body.model, "embeddings", "embedding")
    dimensions = Setting("dimensions", "dimensions", body.dimensions)
    _, rows, _, cache = await embed(call, model, inputs, "inputs", dimensions, *body.settings())
    return mapped.reply(rows if body.normalize is False else [*map(_unit, rows)], cache)


async def similarity(call: Call) -> Reply:
    """Answer with the cosine between the embedding of the source and that of each sentence."""
    body = await call.read(SimilarityRequest)
    mapped.check_count("inputs.sentences", len(body.inputs.sentences), "sentences")
    model = mapped.chosen_model(call, body.model, "embeddings", "embedding")
    texts, settings = [body.inputs.source_sentence, *body.inputs.sentences], body.parameters or _Prompted()
    _, rows, _, cache = await embed(call, model, texts, "inputs", *settings.settings("parameters."))
    source, *units = map(_unit, rows)
    return mapped.reply(np.stack(units) @ source, cache)


async def predict(call: Call) -> Reply:
    """Answer with the labels of each input, the best first. The one label of a pair is the output that scores it."""
    body = await call.read(PredictRequest)
    body.check()
    value: Any = await call.decode(lambda _: read_json(body.inputs, _Inputs, "inputs", is_checked=True), is_part=True)
    is_batch = isinstance(value, list) and not all(isinstance(item, str) for item in value)
    inputs = value if is_batch else [[value] if isinstance(value, str) else value]
    mapped.check_count("inputs", len(inputs), "inputs")
    width = len(inputs[0])
    if width not in (1, 2) or any(isinstance(item, str) or len(item) != width for item in inputs):
        message = "inputs: expected a text, a pair [text, text], or a list of only [text] or only [text, text]"
        raise BadRequest(message, field="inputs")
    labels: tuple[str, ...]
    if width == 2:
        firsts, seconds = zip(*inputs, strict=True)
        model, scores, _, cache = await rerank.rank(call, body.model, firsts, seconds, "inputs")
        spec = model.dispatcher.check_ready().reranking
        assert spec is not None
        labels, rows = (spec.score,), [[score] for score in scores]
    else:
        items = [(f"inputs[{index}]" if is_batch else "inputs", text) for index, (text,) in enumerate(inputs)]
        model, rows, _, cache = await classify(call, body.model, items)
        labels = labels_of(model.dispatcher.check_ready())
    top_k = None if body.parameters is None else body.parameters.top_k
    content = [predictions(labels, row, top_k) for row in rows]
    # `parameters` is of Hugging Face's API for tasks, which answers a single text with a list of lists, too.
    return mapped.reply(content if is_batch or body.parameters is not None else content[0], cache)


async def rerank_any(call: Call) -> Reply:
    """Answer ``/rerank``: a body with ``texts`` with their scores, the best first, any other as Jina does."""
    if b'"texts"' not in call.raw or "texts" not in await call.read(dict[str, msgspec.Raw]):
        return await rerank.respond(call)
    body = await call.read(RerankTextsRequest)
    rerank.check_documents(body.query, "texts", len(body.texts))
    body.check()
    _, scores, _, cache = await rerank.rank(call, body.model, [body.query] * len(body.texts), body.texts, "texts")
    content = [
        {"index": index, **({"text": body.texts[index]} if body.return_text else {}), "score": scores[index]}
        for index in rerank.best_first(scores)
    ]
    return mapped.reply(content, cache)


class RefusingEndpoint(Endpoint):
    """A route of `REFUSED`."""

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        raise BadRequest(f"route {scope['path']}: {REFUSED[scope['path']]}")


def info_routes(models: Models) -> APIRouter:
    """``/info``: a model, as text-embeddings-inference describes it."""
    router = APIRouter(tags=["models"])

    @router.get("/info", summary="The model that embeds, ranks or classifies, as text-embeddings-inference has it")
    async def info(request: Request, model: str | None = None) -> JSONResponse:
        name = Call(models, request.scope, request.receive, b"").name(model, *_KINDS)
        signature = models.get(name).dispatcher.check_ready()
        kinds: dict[str, Any] = {kind: {} for mapping, kind in _KINDS.items() if getattr(signature, mapping)}
        if signature.classification is not None:
            labels = labels_of(signature)
            places = {label: place for place, label in enumerate(labels)}
            kinds["classifier"] = {"id2label": dict(enumerate(labels)), "label2id": places}
        limits = {"max_client_batch_size": MAX_ROWS, "max_batch_requests": signature.max_batch_size}
        about = {"model_id": name, "model_type": kinds, "version": headwater_server.__version__}
        return JSONResponse({**about, **limits})

    return router


def _unit(row: _Vector) -> _Vector:
    """The embedding with length 1; zeros stay zeros."""
    return row / max(np.float32(np.linalg.norm(row)), np.finfo(np.float32).tiny)
