"""Triton's generate extension over a language model: its requests and answers.

Source: Triton's generate extension, with the field names of its backend for vLLM. The text is taken as it is: no chat
template is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from app.codecs.faults import at
from app.codecs.parameters import MAX_UINT64, RequestId
from app.errors import BadRequest, HeadwaterError
from app.lm.sampling_fields import DEFAULT_TOKENS, SamplingFields, checked_integer
from app.lm.text_plan import Prompt, TextPlan, answer_capacity, check_size, fitting_tokens, plan
from app.lm.text_stream import TextPiece, Usage
from inference.engine import EngineLimits

if TYPE_CHECKING:
    from app.lm.text.language import LanguageText

__all__ = ["GenerateAnswer", "GenerateRequest"]


class GenerateAnswer:
    """One answer; see `app.lm.answers.AnswerForm`.

    Args:
        model: its name.
        id: the client's own for the request; empty: it has none.
    """

    def __init__(self, model: str, id: str = "") -> None:
        about = {"model_name": model, "model_version": "1", **({"id": id} if id else {})}
        self._head = orjson.dumps(about)[:-1]
        self._text_head = self._head + b',"text_output":'
        self._finish: str | None = None

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        """See `AnswerForm`."""
        (text,) = texts
        parameters = orjson.dumps(_facts(text.finish, usage))
        return b'%b%b,"parameters":%b}' % (self._text_head, orjson.dumps(text.text), parameters)

    def begin(self) -> list[bytes]:
        """See `AnswerForm`."""
        return []

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        """See `AnswerForm`."""
        self._finish = piece.finish
        return [b"%b%b}" % (self._text_head, orjson.dumps(piece.text))] if piece.text else []

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        """See `AnswerForm`."""
        failure = [] if error is None else [orjson.dumps({"error": error.message, "status": error.status})]
        facts = orjson.dumps(_facts(self._finish if error is None else "error", usage))
        return [*failure, b'%b,"final":true,%b' % (self._head, facts[1:])]


def _facts(finish: str | None, usage: Usage) -> dict[str, Any]:
    return {"finish_reason": finish, **usage._asdict()}


class GenerateParameters(SamplingFields, kw_only=True):
    """The parameters."""

    timeout: (
        Annotated[int, Meta(description="The request's own deadline in microseconds", extra_json_schema={"minimum": 0})]
        | None
    ) = None


class GenerateRequest(GenerateParameters, kw_only=True):
    """The body; parameters may stand beside the text, too."""

    text_input: str
    id: RequestId | None = None
    parameters: GenerateParameters | None = None

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and make tokens of it. Takes too long for the event loop.

        Raises:
            BadRequest: something in it is wrong, or more than the model can take.
        """
        given, within = self._merged()

        def path(name: str) -> str:
            return f"parameters.{name}" if name.partition("[")[0] in within else name

        sampling = given.sampling(limits, path=path)
        end = given.text_end(limits, path)
        timeout_us = checked_integer(path("timeout"), given.timeout or 0, 0, MAX_UINT64)
        try:
            check_size("text_input", self.text_input, limits)
            ids = text.encode_text(self.text_input)
        except BadRequest as error:
            raise at("text_input", None, error.message.partition(": ")[2]) from None
        room = answer_capacity("text_input", ids, limits)
        max_tokens = min(DEFAULT_TOKENS, room) if given.max_tokens is None else given.max_tokens
        max_tokens = fitting_tokens("text_input", path("max_tokens"), max_tokens, ids, room, limits)
        return plan([Prompt(ids, max_tokens)], 1, sampling, end, limits, timeout_us / 1e6 if timeout_us else None)

    def _merged(self) -> tuple[GenerateParameters, set[str]]:
        """The parameters, and which of them were given within ``parameters``."""
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
