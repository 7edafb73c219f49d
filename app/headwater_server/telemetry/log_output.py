"""A text stream that never blocks its writers: a thread writes, and lines that don't fit into its queue are dropped.

Standard error is often a pipe. If no process reads the pipe, a write waits forever, and an event loop that waits in a
write answers no requests.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Final, cast

__all__ = ["LogOutput", "never_blocking"]

logger = logging.getLogger("headwater")

QUEUE_BYTES: Final = 4 * 1024 * 1024
"""The most bytes in the queue: some 10,000 lines."""
WRITE_BYTES: Final = 64 * 1024
"""The most bytes of a single write, unless a text is longer; the default size of a pipe."""
END_TIMEOUT_S: Final = 2.0
"""The most seconds that the process, when it ends, waits until queued lines have been written."""


class LogOutput(io.TextIOBase):
    """Writes to a file descriptor, in a thread. Any thread may call its methods.

    A text that doesn't fit into the queue is dropped as a whole, and its lines are counted. Once the queue is at most
    half full again, a line in the log says how many lines are missing at that place.

    Args:
        descriptor: the file's descriptor, which stays open.
        queue_bytes: the most bytes in the queue.
    """

    def __init__(self, descriptor: int, queue_bytes: int = QUEUE_BYTES) -> None:
        self._descriptor = descriptor
        self._queue_bytes = queue_bytes
        self._pieces: deque[bytes] = deque()
        self._size = 0
        """Bytes in the queue or being written."""
        self._missing = 0
        """Dropped lines that the log doesn't mention yet."""
        self._on_dropped: Callable[[int], None] | None = None
        self._dropped = 0
        self._changed = threading.Condition()
        """Notified when a text is queued, and when everything queued has been written."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def dropped(self) -> int:
        """Number of lines dropped so far."""
        return self._dropped

    def on_dropped(self, count: Callable[[int], None]) -> None:
        """Call ``count`` with a number of lines whenever lines are dropped.

        The first function that is set is also called at once, with the number of lines dropped so far. A later function
        replaces it, and is called for further lines only. ``count`` may be called in any thread, but never in two
        threads at once.
        """
        with self._changed:
            if self._on_dropped is None:
                count(self._dropped)
            self._on_dropped = count

    def write(self, text: str) -> int:
        """Queue a text, or drop it if the queue has no capacity for it. Returns the text's length in characters."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._size + len(data) > self._queue_bytes:
                self._drop(data)
            elif data:
                self._pieces.append(data)
                self._size += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: `finish` waits until everything has been written."""

    def finish(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait until everything queued has been written or dropped, for at most ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, timeout_s)

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the file is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """True: see `io.IOBase`."""
        return True

    def _drop(self, data: bytes) -> None:
        lines = data.count(b"\n")
        self._missing += lines
        self._dropped += lines
        if self._on_dropped is not None:
            self._on_dropped(lines)

    def _run(self) -> None:
        while True:
            data = self._next()
            rest = self._write(data)
            with self._changed:
                self._size -= len(data)
                if rest:
                    self._drop(rest)
                missing = self._missing if not rest and self._size <= self._queue_bytes // 2 else 0
                self._missing -= missing
                if not self._size:
                    self._changed.notify_all()
            if missing:
                text = "the log lacks %d lines here: they were dropped, because standard error was not read in time"
                logger.warning(text, missing, extra={"dropped_lines": missing})

    def _next(self) -> bytes:
        """Wait for queued texts, and take texts of up to `WRITE_BYTES` together, but at least a single text."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces)
            taken = [self._pieces.popleft()]
            size = len(taken[0])
            while self._pieces and size + len(self._pieces[0]) <= WRITE_BYTES:
                taken.append(self._pieces.popleft())
                size += len(taken[-1])
        return b"".join(taken)

    def _write(self, data: bytes) -> bytes:
        """Write all data. Returns the rest if the file can't be written any more."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process that shares the file made it non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                break
        return bytes(rest)


def never_blocking(stream: IO[str]) -> IO[str]:
    """A `LogOutput` that replaces a standard stream; the stream itself if it has no file descriptor."""
    if isinstance(stream, LogOutput):
        return stream
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return stream
    stream.flush()
    output = LogOutput(descriptor)
    atexit.register(output.finish)
    return cast("IO[str]", output)
