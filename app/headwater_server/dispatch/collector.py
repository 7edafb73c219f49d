"""Collects the pieces of a request's answer: a result from each head, or any number of pieces of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from headwater.signature import HeadSpec, Signature
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, Outputs, RawTensor
from headwater_server.errors import Cancelled, HeadwaterError
from headwater_server.telemetry.recorder import DeploymentMeter

__all__ = ["PLAIN", "WHOLE", "Collector", "no_rows", "no_rows_by_head", "wanted_heads"]

WHOLE: Final = ""
"""The name of the only head of a model without heads."""

PIECES_LIMIT: Final = 16
"""Pieces of a stream that may wait for their reader; then the worker takes no further frames of the stream from the
connection."""

PIECES_LIMIT_BYTES: Final = 1024 * 1024
"""Bytes of a stream's pieces that may wait for their reader, estimated by the size of the last frame; a larger piece
waits alone."""

PLAIN: Final = {WHOLE: HeadSpec(WHOLE, ())}
"""The heads of a model without heads."""


def wanted_heads(request: InferRequest, signature: Signature) -> Mapping[str, HeadSpec]:
    """The heads that a request wants, by name; for a model without heads, `WHOLE`."""
    if not signature.heads:
        return PLAIN
    return {head.name: head for head in signature.heads if head.name in request.heads}


class Collector:
    """Collects one request's answer. Everything happens in one event loop.

    Args:
        heads: the wanted heads.
        is_stream: whether pieces are read as they arrive; then the failure of a pipeline's head is a piece and doesn't
            end the request.
        meter: counts results and failures of a pipeline's heads.
    """

    __slots__ = (
        "_answers", "_has_answer", "_has_error", "_meter", "_reader", "_writer", "future", "heads", "is_stream", "loop",
        "started_s", "undecided",
    )  # fmt: skip

    def __init__(self, heads: Mapping[str, HeadSpec], is_stream: bool, meter: DeploymentMeter | None = None) -> None:
        self._meter = meter
        self.loop = asyncio.get_running_loop()
        self.started_s = self.loop.time()
        self._answers: list[HeadAnswer] = []  # a deque takes ten times the memory, and the list is short
        self._has_answer = False
        self._has_error = False
        self._reader: asyncio.Future[None] | None = None
        """Set while a stream's reader waits for the next piece."""
        self._writer: asyncio.Future[None] | None = None
        """Set while a stream's writer waits for its reader."""
        self.heads = heads
        self.is_stream = is_stream
        self.undecided = dict(heads)
        """Heads without last outputs or an error so far; empty after `close`."""
        self.future: asyncio.Future[None] = self.loop.create_future()
        """Done once all heads have answered, or the request has failed as a whole; cancelled if the client left or
        `close` came before."""

    @property
    def is_done(self) -> bool:
        """Whether all heads have answered, or the request has ended otherwise."""
        return self.future.done()

    @property
    def error(self) -> BaseException | None:
        """The error with which the request failed as a whole; None otherwise, also if its client disconnected."""
        return None if not self.future.done() or self.future.cancelled() else self.future.exception()

    @property
    def succeeded(self) -> bool:
        """Whether all heads are decided, and not all have failed."""
        future = self.future
        if not future.done() or future.cancelled() or future.exception() is not None:
            return False
        return self._has_answer or not self._has_error

    @property
    def failed(self) -> bool:
        """Whether the request failed as a whole, or all its heads failed. A cancelled request has not failed."""
        ended = self.future.done() and not self.future.cancelled()
        return ended and not self.succeeded and not isinstance(self.error, Cancelled)

    def decide(self, head: str, outputs: Outputs | None = None, error: HeadwaterError | None = None) -> None:
        """Take a head's last outputs, or its error; later calls for the head are ignored. At the end of a stream
        neither is given.

        The error of a model without heads fails the request as a whole. So does the error of a head with
        ``on_error: fail``, unless `is_stream`.
        """
        spec = self.undecided.pop(head, None)
        if spec is None or self.future.done():
            return
        took_ms = self._took_ms()
        if self._meter is not None:
            self._meter.note_head(head, error, took_ms)
        if error is not None and (head == WHOLE or (spec.on_error == "fail" and not self.is_stream)):
            self.fail(error)
            return
        if outputs is not None or error is not None:
            self._append(HeadAnswer(head, outputs or {}, error, took_ms))
        if not self.undecided:
            self.future.set_result(None)
            _wake(self._reader)
            _wake(self._writer)

    def add(self, head: str, outputs: Outputs) -> None:
        """Take outputs of a head that will send more outputs."""
        if head in self.undecided and not self.is_done:
            self._append(HeadAnswer(head, outputs, None, self._took_ms()))

    def fail(self, error: HeadwaterError) -> None:
        """Fail the request as a whole, unless it has ended."""
        if not self.is_done:
            if self._meter is not None:
                for head in self.undecided:
                    self._meter.note_head(head, error, self._took_ms())
            self.future.set_exception(error)
            _wake(self._reader)
            _wake(self._writer)

    def cancel(self) -> bool:
        """Fail the request because a client cancelled it by its id. Returns whether it was in flight."""
        if self.is_done:
            return False
        self.fail(Cancelled("the request was cancelled"))
        return True

    def is_full(self, limit: int = PIECES_LIMIT) -> bool:
        """Whether ``limit`` or more pieces of a stream wait for its reader, and the stream has not ended."""
        return len(self._answers) >= limit and not self.future.done()

    async def wait_for_capacity(self, limit: int = PIECES_LIMIT) -> None:
        """Wait until fewer than ``limit`` pieces wait for the reader, or the stream has ended."""
        while self.is_full(limit):
            self._writer = self.loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    async def whole(self) -> Answer:
        """Wait for the whole answer.

        Raises:
            HeadwaterError: the request failed, or a head with ``on_error: fail`` failed, or every head failed.
        """
        await self.future
        answers = self._answers
        if len(answers) == 1 and answers[0].error is None:
            return Answer(answers[0].outputs, [])
        omitted = [answer for answer in answers if answer.error is not None]
        if omitted and len(omitted) == len(answers):
            error = omitted[0].error
            assert error is not None
            raise error
        outputs: Outputs = {}
        for answer in answers:
            outputs.update(answer.outputs)
        return Answer(outputs, omitted)

    async def next_piece(self) -> HeadAnswer | None:
        """Wait for the next piece; returns None after the last piece.

        Raises:
            HeadwaterError: the request failed as a whole.
        """
        while not self._answers:
            if self.is_done:
                self.future.result()
                return None
            self._reader = self.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        answer = self._answers.pop(0)
        _wake(self._writer)
        return answer

    def close(self) -> None:
        """End the collection: no client waits for the answer any more."""
        if self._meter is not None and (not self.is_done or self.future.cancelled()):
            for head in self.undecided:
                self._meter.leave_head(head)
        self.undecided.clear()
        self.future.cancel()
        _wake(self._writer)

    def _append(self, answer: HeadAnswer) -> None:
        if answer.error is None:
            self._has_answer = True
        else:
            self._has_error = True
        self._answers.append(answer)
        _wake(self._reader)

    def _took_ms(self) -> float:
        return (self.loop.time() - self.started_s) * 1000


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def no_rows(signature: Signature, request: InferRequest) -> Outputs:
    """The answer to a request without rows: outputs of zero rows. No model is called."""
    wanted = {output.name for output in request.outputs}
    return {
        spec.name: RawTensor(spec.datatype, (0, *(max(dim, 0) for dim in spec.shape)), b"")
        for spec in signature.outputs
        if spec.name in wanted
    }


def no_rows_by_head(signature: Signature, request: InferRequest) -> Iterator[HeadAnswer]:
    """The answer to a request without rows in pieces, one for each wanted head."""
    outputs = no_rows(signature, request)
    for name, spec in wanted_heads(request, signature).items():
        yield HeadAnswer(name, {output: outputs[output] for output in spec.outputs or outputs if output in outputs})
