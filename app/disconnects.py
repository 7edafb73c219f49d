"""Notices that a client went away while its answer is computed."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

from starlette.types import Receive, Scope

from app.errors import ClientGone
from app.exchange import exchange_of

__all__ = ["DisconnectWatch"]

WATCH_AFTER_S: Final = 0.02
"""Where only ``receive`` tells. Most answers are sooner than this, and a task for each of them would cost more than it
saves."""


class DisconnectWatch:
    """A context whose body is cancelled when the client goes away; `ClientGone` comes out of it then.

    To be entered by the request's own task, when the request's body has been read: from then on the server has nothing
    else to say.
    """

    __slots__ = ("_exchange", "_is_gone", "_receive", "_task", "_timer", "_watcher")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._exchange = exchange_of(scope)
        self._receive = receive
        self._is_gone = False
        self._watcher: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._task = exchange.task
            exchange.watch(self._leave)
            return
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._exchange is not None:
            self._exchange.on_gone = None
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._is_gone and kind is asyncio.CancelledError:
            raise ClientGone("the client went away before its answer") from None

    def _start(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._is_gone = True
        if self._task is not None:
            self._task.cancel()
