"""The answers of ``execute`` of a model that is not decoupled: one for each request, returned or sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from headwater.triton.backend_utils import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    TritonModelException,
)

__all__ = ["SingleAnswer", "check_sent", "checked_answers"]


class SingleAnswer(InferenceResponseSender):
    """Takes the only answer to a request of a model that is not decoupled, from any thread."""

    def __init__(self) -> None:
        self.answers: list[InferenceResponse] = []
        self.is_closed = False
        self.closed = threading.Event()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """See `InferenceResponseSender.send`."""
        check_sent(response, flags, is_closed=self.is_closed)
        if response is not None:
            self.answers.append(response)
        if flags:
            self.is_closed = True
            self.closed.set()

    def is_cancelled(self) -> bool:
        """See `InferenceResponseSender.is_cancelled`."""
        return False


def check_sent(response: object, flags: int, *, is_closed: bool) -> None:
    if is_closed:
        raise TritonModelException("send: the answers to this request have ended")
    if response is not None and not isinstance(response, InferenceResponse):
        raise TypeError(f"send, response: expected an InferenceResponse, got {type(response).__name__}")
    if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
        raise TritonModelException(f"send, flags: expected 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL, got {flags}")
    if response is None and not flags:
        raise TritonModelException("send: expected a response, or flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL")


def checked_answers(answers: object, requests: Sequence[InferenceRequest]) -> list[InferenceResponse | str]:
    """The answers of ``execute``, one for each request; a text in place of what is no answer.

    Raises:
        TritonModelException: there is not one answer for each request.
    """
    size = len(requests)
    if answers is None and all(request.is_sender_taken for request in requests):
        return [_only_answer(request.get_response_sender()) for request in requests]
    if not isinstance(answers, list):
        got = type(answers).__name__
        raise TritonModelException(f"execute: expected a list of {size} responses, one for each request, got {got}")
    if len(answers) != size:
        raise TritonModelException(
            f"execute: expected a list of {size} responses, one for each request, got {len(answers)}"
        )
    for answer in answers:
        if answer is not None and not isinstance(answer, InferenceResponse):
            raise TritonModelException(f"execute: expected InferenceResponses, got {type(answer).__name__}")
    missing = "execute returned None for this request, expected an InferenceResponse"
    return [missing if answer is None else answer for answer in answers]


def _only_answer(sender: Any) -> InferenceResponse | str:
    """The answer that a model that isn't decoupled sends by a sender, at any time until the end of its answers."""
    sender.closed.wait()
    count = len(sender.answers)
    if count != 1:
        return f"execute sent {count} responses for this request, expected 1, since the model is not decoupled"
    answer: InferenceResponse = sender.answers[0]
    return answer
