"""Converts vLLM's chat answers into the parts of answers in other APIs: content, reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from headwater_server.errors import RETRY_AFTER_LOST_S, HeadwaterError, ReplicaLost
from headwater_server.lm.openai_answer import Event
from headwater_server.lm.parts_answer import PartsAnswer
from headwater_server.lm.text.answer_parts import AnswerPart, CallPart, ReasoningPart
from headwater_server.vllm.answers import LOST, RelayedAnswer, RelayedError, RelayedUsage, TokenCount, failure

__all__ = ["PartsRelay"]


class _RelayedFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ChatCall(msgspec.Struct):
    function: _RelayedFunction = msgspec.field(default_factory=_RelayedFunction)
    index: int | None = None
    """The call's index in its answer. Only the events of a stream have it."""
    id: str | None = None


class _RelayedText(msgspec.Struct):
    """A message, or the next part of a message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The name of ``reasoning`` in older versions of vLLM."""
    tool_calls: list[_ChatCall] | None = None


class _RelayedChatChoice(msgspec.Struct):
    message: _RelayedText = msgspec.field(default_factory=_RelayedText)
    delta: _RelayedText = msgspec.field(default_factory=_RelayedText)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the token, that ended the text."""


class _RelayedChat(msgspec.Struct):
    """A whole answer, or an event of a stream."""

    choices: list[_RelayedChatChoice] = []
    usage: RelayedUsage | None = None
    error: RelayedError | None = None


_answers: Final = msgspec.json.Decoder(_RelayedChat)


class PartsRelay(RelayedAnswer):
    """An answer in the form of another API, made from vLLM's answer of ``/v1/chat/completions`` with a single choice.

    Args:
        form: the answer in that API; its `PartsAnswer.add` gets the parts.
        count: counts the tokens.
    """

    def __init__(self, form: PartsAnswer, count: TokenCount) -> None:
        self.count = count
        self._form = form
        self._has_begun = False

    def whole(self, body: bytes) -> bytes:
        answer = _answers.decode(body)
        (choice,) = answer.choices
        finish = _finish(choice)
        self.count.usage_at_end(answer.usage, 1)
        self._form.add(list(_parts(choice.message)), finish, _stop(choice))
        return self._form.body(self.count.usage)

    def events(self, name: bytes, data: bytes) -> Sequence[Event]:
        event = _answers.decode(data)
        if event.error is not None:
            raise failure(event.error)
        if not event.choices:
            self.count.usage_at_end(event.usage)
            return ()
        (choice,) = event.choices
        finish = _finish(choice)
        if event.usage is not None:
            self.count.prompt(event.usage.prompt_tokens)
            self.count.choice(0, event.usage.completion_tokens or 0)
        if self._form.counts_usage:
            self._form.count(self.count.usage)
        begin = () if self._has_begun else self._form.begin()
        self._has_begun = True
        return [*begin, *self._form.add(list(_parts(choice.delta)), finish, _stop(choice))]

    def end(self, error: HeadwaterError | None) -> Sequence[Event]:
        return self._form.end(self.count.usage, error)


def _parts(text: _RelayedText) -> Iterator[AnswerPart]:
    if reasoning := text.reasoning or text.reasoning_content:
        yield ReasoningPart(reasoning)
    if text.content:
        yield text.content
    for place, call in enumerate(text.tool_calls or ()):
        number = place if call.index is None else call.index
        if call.function.name:
            yield CallPart(number, call.function.name, "", call.id or f"call_{secrets.token_hex(12)}")
        if call.function.arguments:
            yield CallPart(number, "", call.function.arguments)


def _finish(choice: _RelayedChatChoice) -> str | None:
    """Why the answer ends: as `PartsAnswer.add` has it.

    Raises:
        ReplicaLost: vLLM aborted the request, as it does when it is terminated.
    """
    if choice.finish_reason == "abort":
        raise ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S)
    return choice.finish_reason if choice.finish_reason in (None, "length") else "stop"


def _stop(choice: _RelayedChatChoice) -> str | None:
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None
