"""Notices that a client went away while its answer is computed."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from app.errors import ClientGone

__all__ = ["DisconnectWatch"]

WATCH_AFTER_S = 0.02
"""Most answers are sooner than this, and a task for each of them would cost more than it saves."""


class DisconnectWatch:
    """An async context whose body is cancelled when the client goes away; `ClientGone` comes out of it then.

    To be entered when the request's body has been read: from then on the server has nothing else to say.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        self._is_gone = True
        if self._task is not None:
            self._task.cancel()
