"""The event loop in which an instance's calls run, and in which coroutine hooks of a model are awaited.

A connection or a lock of asyncio belongs to the loop in which it was first used, so `load` must use the loop that
serves.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import types
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from headwater.model import Model

__all__ = ["CallLoop", "begin"]

T = TypeVar("T")


class CallLoop:
    """An event loop in a separate thread. The thread starts with the first use and ends with the process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Await an awaitable in the loop, from another thread, and return its result.

        Raises:
            BaseException: the awaitable's exception.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="callee", daemon=True).start()

        async def awaited() -> tuple[T | None, BaseException | None]:
            try:
                return await awaitable, None
            except BaseException as error:  # SystemExit would end the loop
                return None, error

        result, error = asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def load(self, model: Model, device: str) -> None:
        """Load a model: call its `load` in this thread and, if it returns an awaitable, await that in the loop.

        Raises:
            BaseException: the exception of the model's `load`.
        """
        self._finish(model.load(device))

    def unload(self, models: Sequence[Model]) -> None:
        """Unload models, the last model first; coroutines are awaited as in `load`.

        Raises:
            BaseException: the last exception of a model's `unload`; the other models are unloaded nevertheless.
        """
        with ExitStack() as stack:
            for model in models:
                stack.callback(self._unload, model)

    def _unload(self, model: Model) -> None:
        self._finish(model.unload())

    def _finish(self, result: object) -> None:
        if inspect.isawaitable(result):
            self.wait(result)


def begin(coroutine: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
    """Run a coroutine in the running event loop up to its first wait, which must be ``asyncio.sleep(0)``. Returns its
    result, or the task that runs the rest of it. A task alone would take another turn of the loop.

    Raises:
        BaseException: the coroutine's exception.
        RuntimeError: the coroutine has waited for something else.
    """
    context = contextvars.copy_context()
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration as end:
        result: T = end.value
        return result
    if awaited is not None:  # what it awaits may need the task, which doesn't exist yet
        coroutine.close()
        raise RuntimeError(f"expected a coroutine that waits for asyncio.sleep(0) first, got {awaited!r}")
    return context.run(asyncio.get_running_loop().create_task, _rest(coroutine))


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Run the rest of a coroutine that has begun."""
    result: T = yield from coroutine
    return result
