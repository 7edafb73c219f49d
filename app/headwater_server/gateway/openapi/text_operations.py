"""The OpenAPI operations whose bodies are the same for every model: OpenAI's routes, the routes to rerank, classify and
tokenize, the generate extension of language models, and cancelling. Most schemas of bodies are generated from the
structs that decode the bodies."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headwater.engine import Sampling
from headwater.signature import Signature
from headwater_server.gateway.openapi.operations import (
    EVENTS,
    INTEGER,
    JSON,
    STRING,
    error_response,
    object_schema,
    operation,
    response,
)
from headwater_server.gateway.routes import tei
from headwater_server.gateway.routes.classify import ClassifyRequest
from headwater_server.gateway.routes.cohere import CohereEmbedRequest
from headwater_server.gateway.routes.embeddings import EmbeddingsRequest
from headwater_server.gateway.routes.pooling import PoolingRequest, ScoreRequest
from headwater_server.gateway.routes.rerank import RerankRequest
from headwater_server.gateway.routes.transcriptions import FORMATS
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.messages_request import CountTokensRequest, MessagesRequest
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text_generate import GenerateRequest
from headwater_server.lm.tokenize_body import DetokenizeRequest, TokenizeRequest
from headwater_server.telemetry.catalogue import Route
from headwater_server.vllm.requests import fields_of

__all__ = ["body_schemas", "mapped_paths", "of_models", "shared_paths", "text_operations"]

_PROMPT: Final = "def add(a, b):\n    "
_CANCELLED: Final = "The request was cancelled by its id"
_FINISH: Final = {"type": "string", "enum": ["stop", "length"]}
_USAGE: Final = object_schema(
    {
        "prompt_tokens": {"type": "integer", "description": "Each prompt once, however many choices it has"},
        "completion_tokens": {"type": "integer", "description": "The token that stopped a text included"},
        "total_tokens": INTEGER,
        "prompt_tokens_details": object_schema(
            {"cached_tokens": {"type": "integer", "description": "Prompt tokens taken from a cache"}}
        ),
    }
)

_TEXTS: Final = ["Boats slept in the port.", "The tax is due."]
_COMPATIBLE: Final[list[tuple[str, str, str, str, dict[str, Any]]]] = [
    ("/v1/embed /v2/embed", "CohereEmbedRequest", "e", "Embeddings, as Cohere's API has them", {"texts": _TEXTS}),
    ("/embed", "EmbedTextsRequest", "e", "Embeddings, as text-embeddings-inference has them", {"inputs": _TEXTS}),
    ("/similarity", "SimilarityRequest", "e", "Cosines of embeddings, as text-embeddings-inference has them",
     {"inputs": {"source_sentence": "Where do boats sleep?", "sentences": _TEXTS}}),
    ("/predict", "PredictRequest", "cr", "Scores of labels, as text-embeddings-inference has them",
     {"inputs": [[text] for text in _TEXTS]}),
    ("/classify", "ClassifyRequest", "c", "The same as /v1/classify", {"input": _TEXTS}),
    ("/score /v1/score", "ScoreRequest", "r", "Scores of pairs, as vLLM has them",
     {"text_1": "Where do boats sleep?", "text_2": _TEXTS}),
    ("/pooling", "PoolingRequest", "ec", "Embeddings or scores of labels, as vLLM has them", {"input": _TEXTS}),
]  # fmt: skip
"""Routes of other servers: the paths, the body, the initials of the tasks of their models, a summary and an example."""


def body_schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies' schemas by the structs' names, and the components that the schemas refer to."""
    kinds = (
        ChatRequest, ClassifyRequest, CohereEmbedRequest, CompletionRequest, CountTokensRequest, DetokenizeRequest,
        EmbeddingsRequest, GenerateRequest, MessagesRequest, PoolingRequest, RerankRequest, ResponsesRequest,
        ScoreRequest, TokenizeRequest, tei.EmbedTextsRequest, tei.PredictRequest, tei.RerankTextsRequest,
        tei.SimilarityRequest,
    )  # fmt: skip
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        if "properties" not in schema:
            continue
        fields = {name: _without_null(field) for name, field in schema["properties"].items()}
        schema["properties"] = {name: field for name, field in fields.items() if field != {"type": "null"}}
        for name, default in msgspec.structs.asdict(Sampling()).items():
            if name in fields and default is not None:
                fields[name].setdefault("default", default)
    return {kind.__name__: schemas.pop(kind.__name__) for kind in kinds}, schemas


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without null, which means the same as leaving the field out."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    rest = {key: value for key, value in field.items() if key != "anyOf" and (key, value) != ("default", None)}
    return {**(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {}), **rest}


def of_models(schema: dict[str, Any], models: list[str]) -> dict[str, Any]:
    """The schema, with the models' names as the values of ``model``."""
    return {**schema, "properties": {**schema["properties"], "model": {"type": "string", "enum": models}}}


def _body(schema: dict[str, Any], models: list[str], **fields: Any) -> dict[str, Any]:
    """The body of a request to one of the models, with an example of these fields."""
    return {"schema": of_models(schema, models), "example": {"model": models[0], **fields}}


def shared_paths(
    language_models: list[str], vllm_models: list[str], schemas: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The operations of language models that several models share, and the operation that cancels, by path.

    Args:
        language_models: names of the language models that Headwater's engines compute.
        vllm_models: names of the language models that vLLM computes.
        schemas: the bodies' schemas, by the structs' names.
    """

    def of_both(kind: str, route: Route, required_field: str) -> dict[str, Any]:
        bodies = [of_models(schemas[kind], language_models)] if language_models else []
        bodies += [_vllm_body(route, required_field, vllm_models)] if vllm_models else []
        return bodies[0] if len(bodies) == 1 else {"anyOf": bodies}

    cancel = {
        "tags": ["inference"],
        "summary": "Cancel a stream, or a request to a language model",
        "description": "Whoever knows a request's id, its `X-Request-Id`, can end it; it is answered with status 409.",
        "operationId": "cancel_request",
        "parameters": [{"name": "request_id", "in": "path", "required": True, "schema": STRING}],
        "responses": {
            "200": response(
                "How many sequences and streams were cancelled",
                {JSON: object_schema({"request_id": STRING, "cancelled": {"type": "integer", "minimum": 1}})},
            )
        },
    }
    paths = {"/v2/requests/{request_id}/cancel": cancel}
    text_models = [*language_models, *vllm_models]
    if text_models:
        messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
        paths["/v1/chat/completions"] = _openai_operation(
            "chat_completions",
            "Chat, as OpenAI's API has it",
            of_both("ChatRequest", "chat", "messages"),
            {"model": text_models[0], "messages": messages, "max_completion_tokens": 64},
            {"message": object_schema({"role": STRING, "content": STRING})},
        )
        paths["/v1/completions"] = _openai_operation(
            "completions",
            "Continue texts, as OpenAI's API does",
            of_both("CompletionRequest", "completions", "prompt"),
            {"model": text_models[0], "prompt": _PROMPT, "max_tokens": 64},
            {"text": STRING},
        )
        paths["/v1/responses"] = _responses_operation(
            of_models(schemas["ResponsesRequest"], text_models),
            {"model": text_models[0], "input": messages[0]["content"], "max_output_tokens": 64},
        )
        paths |= _messages_paths(text_models, messages, schemas)
    if language_models:
        strings = {"type": ["array", "null"], "items": {"type": ["string", "null"]}}
        tokens = {"type": "array", "items": INTEGER}
        paths["/tokenize"] = operation(
            "openai",
            "tokenize",
            "The tokens of a text or a conversation, as vLLM has it",
            _body(schemas["TokenizeRequest"], language_models, prompt=_PROMPT, return_token_strs=True),
            response(
                "The tokens; `token_strs` is the vocabulary's spelling of each, if asked for",
                {
                    JSON: object_schema(
                        {"count": INTEGER, "max_model_len": INTEGER, "tokens": tokens, "token_strs": strings}
                    )
                },
            ),
        )
        paths["/detokenize"] = operation(
            "openai",
            "detokenize",
            "The text of tokens, special ones included, as vLLM has it",
            _body(schemas["DetokenizeRequest"], language_models, tokens=[5, 6, 7]),
            response("The text", {JSON: object_schema({"prompt": STRING})}),
        )
    return paths


def mapped_paths(
    embedders: list[str],
    rerankers: list[str],
    classifiers: list[str],
    transcribers: list[str],
    schemas: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The operations of models that embed, rerank, classify or transcribe, by path.

    Args:
        embedders: names of the models with embeddings.
        rerankers: names of the models that rank documents.
        classifiers: names of the models that score labels.
        transcribers: names of the models that transcribe audio.
        schemas: the bodies' schemas, by the structs' names.
    """
    paths = {}
    usage = object_schema(dict.fromkeys(("prompt_tokens", "total_tokens"), INTEGER))
    number = {"type": "number"}
    if embedders:
        texts = ["The harbour lay still.", "Boats slept in the port."]
        paths["/v1/embeddings"] = operation(
            "openai",
            "embeddings",
            "Embeddings, as OpenAI's API has them",
            _body(schemas["EmbeddingsRequest"], embedders, input=texts),
            response("One embedding for each text, in order", {JSON: {"type": "object"}}),
        )
    if rerankers:
        result = object_schema(
            {"index": INTEGER, "relevance_score": number, "document": object_schema({"text": STRING})}, "document"
        )
        about = {"id": STRING, "object": STRING, "model": STRING}
        answer = object_schema({**about, "results": {"type": "array", "items": result}, "usage": usage})
        documents = ["Boats slept in the port.", "The tax is due."]
        body = _body(schemas["RerankRequest"], rerankers, query="Where do boats sleep?", documents=documents)
        texts_too = {"anyOf": [body["schema"], of_models(schemas["RerankTextsRequest"], rerankers)]}
        for path, name in (("/v1/rerank", "rerank"), ("/v2/rerank", "rerank_v2"), ("/rerank", "rerank_root")):
            paths[path] = operation(
                "openai",
                name,
                "Rank documents by how well they answer a query, as Jina's and Cohere's APIs do",
                {**body, "schema": texts_too} if path == "/rerank" else body,
                response("The documents' scores, the best first", {JSON: {} if path == "/rerank" else answer}),
            )
    if classifiers:
        label = object_schema({"label": STRING, "score": number})
        entry = {"index": INTEGER, "object": STRING, "label": STRING, "score": number, "num_classes": INTEGER}
        entry |= {"probs": {"type": "array", "items": number}, "predictions": {"type": "array", "items": label}}
        about = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
        answer = object_schema({**about, "data": {"type": "array", "items": object_schema(entry)}, "usage": usage})
        paths["/v1/classify"] = operation(
            "openai",
            "classify",
            "Score the labels of texts or images, as vLLM does",
            _body(schemas["ClassifyRequest"], classifiers, input=["The harbour lay still."]),
            response("For each input its best label, and all scores", {JSON: answer}),
        )
    if transcribers:
        text = {"language": STRING, "response_format": {"type": "string", "enum": list(FORMATS), "default": "json"}}
        form = object_schema(
            {"file": {"type": "string", "format": "binary"}, "model": {"type": "string", "enum": transcribers}, **text},
            *text,
            closed=True,
        )
        duration = {"usage": object_schema({"type": STRING, "seconds": number}), "duration": number}
        answer = object_schema({"text": STRING, "task": STRING, "language": STRING, **duration})
        answer["required"] = ["text"]
        described = operation(
            "openai",
            "transcriptions",
            "Transcribe a recording, as OpenAI's API does",
            {},
            response("The text; more of it with `verbose_json`", {JSON: answer, "text/plain": STRING}),
        )
        described["requestBody"]["content"] = {"multipart/form-data": {"schema": form}}
        paths["/v1/audio/transcriptions"] = described
    return paths | _compatible_paths({"e": embedders, "r": rerankers, "c": classifiers}, schemas)


def _compatible_paths(
    models_by_task: dict[str, list[str]], schemas: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The operations of `_COMPATIBLE`, of the routes to which the body decides, and of those that are refused."""
    answer, paths = response("As that API has it", {JSON: {}}), {}
    for names, kind, tasks, summary, example in _COMPATIBLE:
        if models := [name for task in tasks for name in models_by_task[task]]:
            for path in names.split():
                name = path.strip("/").replace("/", "_") + "_compatible"
                paths[path] = operation("compatible", name, summary, _body(schemas[kind], models, **example), answer)
    for path, name in (("/invocations", "invocations"), ("/", "root")):
        paths[path] = operation("compatible", name, "The route whose fields the body has", {"schema": {}}, answer)
    for path, reason in tei.REFUSED.items():
        paths[path] = operation("compatible", path[1:], "Refused", {"schema": {}}, description=reason)
    return paths


def _vllm_body(route: Route, required_field: str, models: list[str]) -> dict[str, Any]:
    """A schema of the fields that a body may have for a model of vLLM, with any values: vLLM checks them."""
    return {
        "type": "object",
        "description": "For a model that vLLM computes: the fields of vLLM's API",
        "properties": {name: {} for name in fields_of(route)} | {"model": {"type": "string", "enum": models}},
        "required": ["model", required_field],
        "additionalProperties": False,
    }


def _openai_operation(
    name: str, summary: str, schema: dict[str, Any], example: dict[str, Any], content: dict[str, Any]
) -> dict[str, Any]:
    logprobs = {"type": ["object", "null"]}
    choice = object_schema({"index": INTEGER, **content, "logprobs": logprobs, "finish_reason": _FINISH}, "logprobs")
    choices = {"type": "array", "items": choice}
    about = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
    answer = object_schema({**about, "choices": choices, "usage": _USAGE})
    end = "of which the last is `[DONE]`"
    return _answered_in_two_ways(name, summary, {"schema": schema, "example": example}, answer, end)


def _responses_operation(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    counts = object_schema(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER))
    part = object_schema({"type": STRING, "text": STRING})
    status = {"type": "string", "enum": ["completed", "incomplete"]}
    shared = {"id": STRING, "status": status}
    message = {"type": {"type": "string", "enum": ["message"]}, "content": {"type": "array", "items": part}}
    call = {"type": {"type": "string", "enum": ["function_call"]}, **dict.fromkeys(("call_id", "name"), STRING)}
    call["arguments"] = {"type": "string", "description": "An object, as JSON"}
    custom = {**call, "type": {"type": "string", "enum": ["custom_tool_call"]}, "input": STRING}
    del custom["arguments"]
    parts = {"type": "array", "items": part}
    thought = {"type": {"type": "string", "enum": ["reasoning"]}, "content": parts, "summary": parts}
    item = {"anyOf": [object_schema({**shared, **fields}) for fields in (message, call, custom, thought)]}
    about = {"id": STRING, "object": STRING, "created_at": INTEGER, "model": STRING}
    answer = object_schema({**about, "status": status, "output": {"type": "array", "items": item}, "usage": counts})
    end = "of which the last is `response.completed`, `response.incomplete` or `response.failed`"
    summary = "Answer, as OpenAI's API for responses does; no answer is stored"
    return _answered_in_two_ways("responses", summary, {"schema": schema, "example": example}, answer, end)


def _messages_paths(models: list[str], messages: list[dict[str, str]], schemas: dict[str, Any]) -> dict[str, Any]:
    """The operations of Anthropic's API, by path, with these messages as the example."""
    count = operation(
        "anthropic",
        "count_tokens",
        "Count the tokens of a prompt, as Anthropic's API does",
        _body(schemas["CountTokensRequest"], models, messages=messages),
        response("Their number", {JSON: object_schema({"input_tokens": INTEGER})}),
    )
    body = _body(schemas["MessagesRequest"], models, messages=messages, max_tokens=64)
    return {"/v1/messages": _messages_operation(body), "/v1/messages/count_tokens": count}


def _messages_operation(body: dict[str, Any]) -> dict[str, Any]:
    block = object_schema({"type": {"type": "string", "enum": ["text", "thinking", "tool_use"]}})
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    reasons = ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    about = dict.fromkeys(("id", "type", "role", "model"), STRING)
    answer = {
        **about,
        "content": {"type": "array", "items": block},
        "stop_reason": {"type": "string", "enum": reasons},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": object_schema(dict.fromkeys(names, INTEGER)),
    }
    summary, end = "Answer, as Anthropic's API for messages does", "of which the last is `message_stop` or `error`"
    return _answered_in_two_ways("messages", summary, body, object_schema(answer), end, "anthropic", "AnthropicError")


def _answered_in_two_ways(
    name: str,
    summary: str,
    body: dict[str, Any],
    answer: dict[str, Any],
    end: str,
    tag: str = "openai",
    error: str = "OpenAIError",
) -> dict[str, Any]:
    """An operation that answers whole, or with a stream; ``end`` describes the stream's end."""
    return operation(
        tag,
        name,
        summary,
        body,
        response(f"The answer; with `stream`, server-sent events, {end}", {JSON: answer, EVENTS: STRING}),
        error_response(_CANCELLED, error),
        description="A field that is null counts as absent. A feature that the model lacks is refused by its field.",
    )


def text_operations(signature: Signature, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The operations of the generate extension for a language model, by route; ``schema`` is the body's schema."""
    name = signature.name
    body = {"schema": schema, "example": {"text_input": _PROMPT, "parameters": {"max_tokens": 64}}}
    about = {"model_name": {"type": "string", "enum": [name]}, "model_version": STRING}
    about |= {"id": STRING, "text_output": STRING}
    facts = {"finish_reason": _FINISH, "prompt_tokens": INTEGER, "completion_tokens": INTEGER}
    token = object_schema(
        {"id": INTEGER, "text": STRING, "logprob": {"type": "number"}, "special": {"type": "boolean"}}
    )
    reason = {"type": "string", "enum": ["length", "eos_token", "stop_sequence"]}
    detailed = {"finish_reason": reason, "logprobs": {"type": "array", "items": token}}
    whole = object_schema(
        {**about, "parameters": object_schema(facts), "details": object_schema(detailed)}, "id", "details"
    )
    finish = {"type": "string", "enum": ["stop", "length", "error"]}
    end = {"final": {"type": "boolean"}, "error": STRING, "status": INTEGER}
    end["details"] = object_schema({**detailed, "token": token}, "token")
    event = {"type": "object", "properties": {**about, **facts, "finish_reason": finish, **end}}
    summary = f"Have {name} continue a text"
    description = f"{signature.description}\n\nThe text is taken as it is: no chat template is applied. Parameters may "
    description += "stand beside it, too."
    return {
        "generate": operation(
            "inference",
            f"generate_{name}",
            summary,
            body,
            response("The text", {JSON: whole}),
            error_response(_CANCELLED),
            description=description,
        ),
        "generate_stream": operation(
            "inference",
            f"generate_stream_{name}",
            f"{summary}, and get it piece by piece",
            body,
            response("Server-sent events, each a line `data: {...}`", {EVENTS: event}),
            error_response(_CANCELLED),
            description=f"{description}\n\nThe last event has `final`; an error after the start is an event with "
            "`error` and `status`, before it.",
        ),
    }
