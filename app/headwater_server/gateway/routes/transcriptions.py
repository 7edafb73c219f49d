"""``POST /v1/audio/transcriptions``: OpenAI's API over a model that declares a `headwater.Transcription`."""

from __future__ import annotations

import asyncio
from typing import Final

import orjson
from starlette.types import Receive, Scope

from headwater.datatypes import unpack_bytes
from headwater.model import Scalar
from headwater_server.codecs.multipart import read_form
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.replies import JSON, Reply, cache_headers
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.mapped import Call, chosen_model, compute, floats, text_calls

__all__ = ["FIELDS", "FORMATS", "TranscriptionsEndpoint"]

FIELDS: Final = ("file", "model", "language", "response_format")
_PLAIN: Final = (b"content-type", b"text/plain; charset=utf-8")
_MAX_TEXT_BYTES: Final = 1024
"""Size limit of a form field other than the file."""
FORMATS: Final = ("json", "text", "verbose_json")


class TranscriptionsEndpoint(Endpoint):
    """Answers with the text of a recording."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        raw, headers = await self._reader.read(scope, receive, form=True)
        fields = await asyncio.to_thread(read_form, raw, headers[b"content-type"])
        name = _text(fields, "model")
        if not name:
            raise _missing("model")
        call = Call(self._models, scope, receive, raw)
        model = chosen_model(call, name, "transcriptions", "transcription")
        for field in fields:
            if field not in FIELDS:
                message = f"{field[:80]}: unknown field; this route has {', '.join(FIELDS)}"
                raise BadRequest(message, field=field[:80])
        kind = _text(fields, "response_format") or "json"
        language = _text(fields, "language")
        file = bytes(fields.get("file", b""))
        if not file:
            raise _missing("file")
        if kind not in FORMATS:
            message = f"response_format: expected one of {', '.join(FORMATS)}, got {kind[:80]!r}"
            raise BadRequest(message, field="response_format")
        spec = model.dispatcher.check_ready().transcription
        assert spec is not None
        parameters: dict[str, Scalar] = {}
        if language:
            if spec.language is None:
                message = f"language: model `{name}` takes none; leave it out"
                raise BadRequest(message, field="language")
            parameters[spec.language] = language
        calls, wanted = text_calls(model, {spec.audio: [file]}), [spec.text, spec.duration]
        outputs, cache = await compute(call, model, calls, 1, wanted, "file", parameters)
        text = unpack_bytes(outputs[spec.text][0].data)[0].decode("utf-8", "replace")
        if kind == "text":
            return Reply(200, [f"{text}\n".encode()], [_PLAIN, *cache_headers(cache)])
        content: dict[str, object] = {"text": text}
        if spec.duration is not None:
            seconds = float(floats(outputs[spec.duration], spec.duration, lambda row: "file")[0, 0])
            content["usage"] = {"type": "duration", "seconds": seconds}
            if kind == "verbose_json":
                content["duration"] = seconds
        if kind == "verbose_json":
            content |= {"task": "transcribe", "language": language}
        return Reply(200, [orjson.dumps(content)], [JSON, *cache_headers(cache)])


def _text(fields: dict[str, memoryview], name: str) -> str:
    """The text of a form field; empty if the field is missing.

    Raises:
        BadRequest: the text is too long, or not UTF-8.
    """
    value = fields.get(name, memoryview(b""))
    if len(value) > _MAX_TEXT_BYTES:
        raise BadRequest(f"{name}: expected at most {_MAX_TEXT_BYTES} bytes, got {len(value)}", field=name)
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name}: expected UTF-8: {error.reason} at byte {error.start}", field=name) from None


def _missing(field: str) -> BadRequest:
    return BadRequest(f"{field}: required, but missing or empty", field=field)
