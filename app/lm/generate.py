"""Requests and answers of Triton's generate extension for a language model.

The field names are those of Triton's backend for vLLM. No chat template is applied to the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from app.codecs.faults import at
from app.codecs.parameters import MAX_UINT64, RequestId, integer
from app.errors import BadRequest, HeadwaterError
from app.lm.answer_grammar import checked_grammar
from app.lm.answers import AnswerForm
from app.lm.sampling_fields import DEFAULT_TOKENS, SamplingFields
from app.lm.text_plan import Prompt, TextPlan, answer_tokens, plan, text_ids
from app.lm.text_stream import TextPiece, Usage
from inference.engine import EngineLimits

if TYPE_CHECKING:
    from app.lm.text.language import LanguageText

__all__ = ["GenerateAnswer", "GenerateRequest"]


class GenerateAnswer(AnswerForm):
    """The answer to one text.

    Args:
        model: the model's name.
        id: the id that the client gave the request; empty if none.
    """

    def __init__(self, model: str, id: str = "") -> None:
        about = {"model_name": model, "model_version": "1", **({"id": id} if id else {})}
        self._head = orjson.dumps(about)[:-1]
        self._text_head = self._head + b',"text_output":'
        self._finish: str | None = None

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        (text,) = texts
        parameters = orjson.dumps(_facts(text.finish, usage))
        return b'%b%b,"parameters":%b}' % (self._text_head, orjson.dumps(text.text), parameters)

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        self._finish = piece.finish
        return [b"%b%b}" % (self._text_head, orjson.dumps(piece.text))] if piece.text else []

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        failure = [] if error is None else [orjson.dumps({"error": error.message, "status": error.status})]
        facts = orjson.dumps(_facts(self._finish if error is None else "error", usage))
        return [*failure, b'%b,"final":true,%b' % (self._head, facts[1:])]


def _facts(finish: str | None, usage: Usage) -> dict[str, Any]:
    return {"finish_reason": finish, **usage._asdict()}


class GenerateParameters(SamplingFields, kw_only=True):
    """The parameters of a request."""

    timeout: (
        Annotated[int, Meta(description="The request's own deadline in microseconds", extra_json_schema={"minimum": 0})]
        | None
    ) = None


class GenerateRequest(GenerateParameters, kw_only=True):
    """The body of a request; the parameters may also stand beside the text."""

    text_input: str
    id: RequestId | None = None
    parameters: GenerateParameters | None = None

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and turn it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or asks for more than the model can take.
        """
        given, within = self._merged()
        try:
            sampling, end = given.sampling(limits), given.text_end(limits)
            grammar = checked_grammar(None, given.structured_outputs, limits)
            timeout_us = integer("timeout", None, given.timeout or 0, MAX_UINT64)
            ids = text_ids("text_input", self.text_input, text, limits)
            max_tokens = answer_tokens("text_input", "max_tokens", ids, given.max_tokens, DEFAULT_TOKENS, limits)
        except BadRequest as error:
            if error.field is not None and re.split(r"[.\[]", error.field)[0] in within:
                raise BadRequest(f"parameters.{error.message}", field=f"parameters.{error.field}") from None
            raise
        timeout_s = timeout_us / 1e6 if timeout_us else None
        return plan([Prompt(ids, max_tokens)], 1, sampling, end, limits, timeout_s, grammar)

    def _merged(self) -> tuple[GenerateParameters, set[str]]:
        """The parameters, and the names of those that were given within ``parameters``."""
        within = set()
        values = {name: getattr(self, name) for name in GenerateParameters.__struct_fields__}
        for name in values if self.parameters is not None else ():
            value = getattr(self.parameters, name)
            if value is None:
                continue
            if values[name] is not None:
                raise at(name, None, f"expected it once, got parameters.{name} as well")
            values[name] = value
            within.add(name)
        return msgspec.structs.replace(GenerateParameters(), **values), within
