"""A text stream that never blocks its writers: a thread writes, and lines that don't fit into its queue are dropped.

Standard error is often a pipe. If nobody reads it, a write waits for ever, and an event loop that writes answers nobody
meanwhile.
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
"""What may wait to be written: some 10,000 lines."""
WRITE_BYTES: Final = 64 * 1024
"""Written at once; the default size of a pipe."""
END_TIMEOUT_S: Final = 2.0
"""How long the end of the process waits for what is queued."""


class LogOutput(io.TextIOBase):
    """Writes to a file descriptor, in a thread. Any thread may call its methods.

    A write that does not fit is dropped whole, and its lines are counted. Once the queue is half empty again, the log
    has a line with the number of the lines that are missing at that place.

    Args:
        descriptor: of the file; stays open.
        queue_bytes: the limit of what waits to be written.
    """

    def __init__(self, descriptor: int, queue_bytes: int = QUEUE_BYTES) -> None:
        self._descriptor = descriptor
        self._queue_bytes = queue_bytes
        self._pieces: deque[bytes] = deque()
        self._size = 0
        """Bytes queued, those being written included."""
        self._missing = 0
        """Lines dropped since the log last had a line about that."""
        self._on_dropped: Callable[[int], None] | None = None
        self._dropped = 0
        self._changed = threading.Condition()
        """Notified when something is queued, and when all of it has been written."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def dropped(self) -> int:
        """Lines dropped so far."""
        return self._dropped

    def on_dropped(self, count: Callable[[int], None]) -> None:
        """Call ``count`` with the number of lines dropped so far, and with each further number when it is dropped; in
        any thread, but never in two at once. It may replace another, which has counted the lines so far."""
        with self._changed:
            if self._on_dropped is None:
                count(self._dropped)
            self._on_dropped = count

    def write(self, text: str) -> int:
        """Queue a text, or drop it."""
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
        """Nothing: see `finish`."""

    def finish(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait until all that is queued has been written, at most for so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, timeout_s)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it writes to a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """See `io.IOBase`."""
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
            is_written = self._write(data)
            with self._changed:
                self._size -= len(data)
                if not is_written:
                    self._drop(data)
                missing = self._missing if is_written and self._size <= self._queue_bytes // 2 else 0
                self._missing -= missing
                if not self._size:
                    self._changed.notify_all()
            if missing:
                text = "the log lacks %d lines here: they were dropped, because standard error was not read in time"
                logger.warning(text, missing, extra={"dropped_lines": missing})

    def _next(self) -> bytes:
        """Wait for pieces, and take some."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces)
            taken = [self._pieces.popleft()]
            size = len(taken[0])
            while self._pieces and size + len(self._pieces[0]) <= WRITE_BYTES:
                taken.append(self._pieces.popleft())
                size += len(taken[-1])
        return b"".join(taken)

    def _write(self, data: bytes) -> bool:
        """Write all of it. Returns False if the descriptor takes no more."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # whoever shares the file made it so
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True


def never_blocking(stream: IO[str]) -> IO[str]:
    """A `LogOutput` that takes the place of a standard stream; the stream itself if no file is behind it."""
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
