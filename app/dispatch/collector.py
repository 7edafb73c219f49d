"""Where the pieces of a request's answer come together: of each head one result, of a stream any number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final, Protocol

from app.codecs.tensors import Answer, HeadAnswer, InferRequest, Outputs, RawTensor
from app.errors import Cancelled, HeadwaterError
from inference.signature import HeadSpec, Signature

__all__ = ["WHOLE", "Collector", "no_rows", "no_rows_by_head", "wanted_heads"]


WHOLE: Final = ""
"""Stands for the head of a model that has none."""

PIECES_LIMIT: Final = 16
"""Of a stream, so many pieces may wait for its reader before it is not asked for more."""

PIECES_LIMIT_BYTES: Final = 1024 * 1024
"""The same in bytes; one that is larger waits alone."""

_PLAIN: Final = {WHOLE: HeadSpec(WHOLE, ())}


def wanted_heads(request: InferRequest, signature: Signature) -> Mapping[str, HeadSpec]:
    """The heads that a request wants, by name; of a model without heads `WHOLE`."""
    if not signature.heads:
        return _PLAIN
    return {head.name: head for head in signature.heads if head.name in request.heads}


class HeadMeter(Protocol):
    """Counts what becomes of heads: of each that a request wants once."""

    def note_head(self, head: str, error: HeadwaterError | None, took_ms: float) -> None:
        """It has said its last, or failed."""
        ...

    def leave_head(self, head: str) -> None:
        """Nobody waits any more for what it would say."""
        ...


class Collector:
    """Collects one request's answer. Everything happens in one event loop.

    Args:
        heads: the wanted ones.
        is_stream: whether pieces are taken as they come; then a head that fails is one of them, and not the end.
        meter: counts the heads of a pipeline.
    """

    __slots__ = (
        "_answers", "_has_answer", "_has_error", "_loop", "_meter", "_reader", "_room", "_started_s", "future",
        "heads", "is_stream", "undecided",
    )  # fmt: skip

    def __init__(self, heads: Mapping[str, HeadSpec], *, is_stream: bool, meter: HeadMeter | None = None) -> None:
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._answers: list[HeadAnswer] = []  # not a deque, which takes ten times the memory, and is seldom long
        self._has_answer = False
        self._has_error = False
        self._reader: asyncio.Future[None] | None = None
        """Of a stream: set while one waits for the next piece."""
        self._room: asyncio.Future[None] | None = None
        """Of a stream: set while one waits for its reader."""
        self.heads = heads
        self.is_stream = is_stream
        self.undecided = dict(heads)
        """Heads of which there is more to come."""
        self.future: asyncio.Future[None] = self._loop.create_future()
        """Done as soon as nothing more is to come, or the request has failed as a whole."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to come."""
        return self.future.done()

    @property
    def succeeded(self) -> bool:
        """Whether all is decided, and not every head has failed."""
        return self.future.done() and not self.future.cancelled() and not self.failed

    @property
    def failed(self) -> bool:
        """Whether the request has failed as a whole, or each of its heads; it has not if its client went away."""
        if not self.future.done() or self.future.cancelled():
            return False
        return self.future.exception() is not None or (self._has_error and not self._has_answer)

    @property
    def error(self) -> BaseException | None:
        """Why the request has failed as a whole."""
        return None if not self.future.done() or self.future.cancelled() else self.future.exception()

    def decide(self, head: str, outputs: Outputs | None = None, error: HeadwaterError | None = None) -> None:
        """Take in a head's last result; what comes after its first last one is ignored."""
        spec = self.undecided.pop(head, None)
        if spec is None or self.is_done:
            return
        if self._meter is not None:
            self._meter.note_head(head, error, self.took_ms())
        if error is not None and (head == WHOLE or (spec.on_error == "fail" and not self.is_stream)):
            self.fail(error)
            return
        if outputs is not None or error is not None:
            self._take(HeadAnswer(head, outputs or {}, error, self.took_ms()))
        if not self.undecided:
            self.future.set_result(None)
            self._tell()

    def add(self, head: str, outputs: Outputs) -> None:
        """Take in a result of a head that has more to come."""
        if head in self.undecided and not self.is_done:
            self._take(HeadAnswer(head, outputs, None, self.took_ms()))

    def is_full(self, limit: int = PIECES_LIMIT) -> bool:
        """Whether so many pieces of a stream wait for its reader, and more are to come."""
        return len(self._answers) >= limit and not self.future.done()

    async def room(self, limit: int = PIECES_LIMIT) -> None:
        """Wait until fewer pieces wait for the reader, or for the end."""
        while self.is_full(limit):
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    def fail(self, error: HeadwaterError) -> None:
        """The request fails as a whole."""
        if not self.is_done:
            if self._meter is not None:
                for head in self.undecided:
                    self._meter.note_head(head, error, self.took_ms())
            self.future.set_exception(error)
            self._tell()

    def cancel(self) -> bool:
        """Someone cancels the request by its id. Returns whether it was under way."""
        if self.is_done:
            return False
        self.fail(Cancelled("the request was cancelled"))
        return True

    @property
    def is_cancelled(self) -> bool:
        """Whether someone cancelled it by its id."""
        return isinstance(self.error, Cancelled)

    async def whole(self) -> Answer:
        """Wait for all of it.

        Raises:
            HeadwaterError: the request failed, or a head that says ``on_error: fail``, or every head.
        """
        await self.future
        omitted = [answer for answer in self._answers if answer.error is not None]
        if omitted and len(omitted) == len(self._answers):
            error = omitted[0].error
            assert error is not None
            raise error
        outputs: Outputs = {}
        for answer in self._answers:
            outputs.update(answer.outputs)
        return Answer(outputs, omitted)

    async def pieces(self) -> AsyncIterator[HeadAnswer]:
        """The pieces as they come.

        Raises:
            HeadwaterError: the request failed as a whole.
        """
        while (piece := await self.next_piece()) is not None:
            yield piece

    async def next_piece(self) -> HeadAnswer | None:
        """The next piece, or None behind the last one.

        Raises:
            HeadwaterError: the request failed as a whole.
        """
        while not self._answers:
            if self.is_done:
                self.future.result()
                return None
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        answer = self._answers.pop(0)
        self._make_room()
        return answer

    def _take(self, answer: HeadAnswer) -> None:
        if answer.error is None:
            self._has_answer = True
        else:
            self._has_error = True
        self._answers.append(answer)
        self._tell()

    def _tell(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        self._make_room()

    def _make_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def close(self) -> None:
        """Nobody waits for it any more."""
        if self._meter is not None and (not self.is_done or self.future.cancelled()):
            for head in self.undecided:
                self._meter.leave_head(head)
        self.undecided.clear()
        self.future.cancel()
        self._make_room()

    def took_ms(self) -> float:
        """Since the request was taken in."""
        return (self._loop.time() - self._started_s) * 1000


def no_rows(signature: Signature, request: InferRequest) -> Outputs:
    """The answer to a request without rows, which no model is called for."""
    wanted = {wish.name for wish in request.outputs}
    return {
        spec.name: RawTensor(spec.datatype, (0, *(max(dim, 0) for dim in spec.shape)), b"")
        for spec in signature.outputs
        if spec.name in wanted
    }


def no_rows_by_head(signature: Signature, request: InferRequest) -> Iterator[HeadAnswer]:
    """The same in pieces, one of each wanted head."""
    outputs = no_rows(signature, request)
    for name, spec in wanted_heads(request, signature).items():
        yield HeadAnswer(name, {one: outputs[one] for one in spec.outputs or outputs if one in outputs})
