"""The threads of a gateway worker that turn requests into tokens, shared fairly among its clients."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from headwater_server.errors import QueueFull

__all__ = ["TextPool"]

SHORT_BYTES: Final = 64 * 1024
"""Maximum size of a short body, which takes about 0.1 s at most: a megabyte of text takes about a second."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Maximum total size of a client's waiting short bodies, and of its waiting long bodies. A single body may be
larger."""
_RETRY_AFTER_S: Final = 1

_T = TypeVar("_T")


class TextPool:
    """Runs work that takes too long for the event loop in a pool of threads.

    Short bodies (up to `SHORT_BYTES`) and long bodies run in separate threads, so a short body never waits for a long
    body. A single client can't occupy all threads for long bodies. Clients take turns.

    Args:
        cpus: number of CPUs, from which the numbers of threads follow; by default the CPUs that this process may use.
    """

    def __init__(self, cpus: int | None = None) -> None:
        cpus = cpus or len(os.sched_getaffinity(0))
        self._short = _TextLane("text", cpus + 4, cpus + 4)
        threads = max(2, cpus // 2)
        self._long = _TextLane("long-text", threads, threads - 1)

    async def run(self, work: Callable[[], _T], owner: str, size_bytes: int) -> _T:
        """Do the work in a thread, and return its result, or raise its exception.

        Args:
            work: called once, unless the caller is cancelled before the work starts.
            owner: the client: the name of its API key, or its address.
            size_bytes: size of the request's body.

        Raises:
            QueueFull: with this body, the waiting bodies of this client would exceed `MAX_WAITING_BYTES`.
        """
        lane = self._short if size_bytes <= SHORT_BYTES else self._long
        result: _T = await lane.run(_Work(work, owner, size_bytes, asyncio.get_running_loop().create_future()))
        return result


class _Work(NamedTuple):
    call: Callable[[], Any]
    owner: str
    size_bytes: int
    result: asyncio.Future[Any]


class _TextLane:
    """A group of threads, and the work that waits for them. Used in a single event loop.

    Args:
        name: prefix of the threads' names.
        threads: number of threads.
        owner_threads: maximum number of threads that a client may occupy at once.
    """

    def __init__(self, name: str, threads: int, owner_threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = threads
        self._owner_threads = owner_threads
        self._waiting: dict[str, deque[_Work]] = {}
        """Waiting work by client, in the order of the clients' turns."""
        self._waiting_bytes = Counter[str]()
        self._running = Counter[str]()
        """Number of threads that each client occupies."""

    async def run(self, work: _Work) -> Any:
        held = self._waiting_bytes[work.owner]
        if held and held + work.size_bytes > MAX_WAITING_BYTES:
            raise QueueFull(
                f"expected at most {MAX_WAITING_BYTES} bytes of your requests to wait for the tokenizer, got "
                f"{held + work.size_bytes}; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._waiting.setdefault(work.owner, deque()).append(work)
        self._waiting_bytes[work.owner] += work.size_bytes
        self._start()
        result = work.result
        try:
            return await result
        finally:
            del work, result  # an error's traceback refers to this frame: this cycle would keep the texts

    def _start(self) -> None:
        while self._running.total() < self._threads and (work := self._next()) is not None:
            self._running[work.owner] += 1
            done = asyncio.get_running_loop().run_in_executor(self._executor, work.call)
            done.add_done_callback(lambda done, work=work: self._end(work, done))  # type: ignore[misc]

    def _next(self) -> _Work | None:
        """Take the next work of a client that may occupy another thread, without work of callers that were cancelled.
        None: there is no such work."""
        for owner, works in list(self._waiting.items()):
            if self._running[owner] >= self._owner_threads:
                continue
            del self._waiting[owner]
            while works:
                work = works.popleft()
                self._waiting_bytes[owner] -= work.size_bytes
                if not self._waiting_bytes[owner]:
                    del self._waiting_bytes[owner]
                if work.result.done():  # the caller was cancelled
                    continue
                if works:
                    self._waiting[owner] = works  # behind all other clients
                return work
        return None

    def _end(self, work: _Work, done: asyncio.Future[Any]) -> None:
        self._running[work.owner] -= 1
        if not self._running[work.owner]:
            del self._running[work.owner]
        error = done.exception()
        if not work.result.done():
            if error is None:
                work.result.set_result(done.result())
            else:
                work.result.set_exception(error)
        self._start()
