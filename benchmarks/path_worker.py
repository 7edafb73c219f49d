"""A gateway worker that records which of our code runs in it, for `benchmarks.path`.

``python -m benchmarks.path_worker SETTINGS_FILE`` prints the port it listens on. Each line of input then begins or ends
a window, in turn, and is answered with one line: empty at the beginning, a `Window` at the end.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

import headwater_server.gateway.worker

__all__ = ["Window", "is_ours"]

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("app/", "inference/")
COROUTINE: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
WORKER: Final = headwater_server.gateway.worker.__file__


class Window(msgspec.Struct):
    """What ran in it, in all threads but not in the worker's background tasks, such as load reports."""

    calls: dict[str, dict[str, int]] = {}
    """Calls of each function, by file. A coroutine that was only resumed counts 0."""
    chains: dict[str, list[str]] = {}
    """The deepest chain of coroutines and async generators in each task, outermost first, by the outermost."""


class Recorder:
    """A profile function: Python calls it whenever a function is called or a coroutine resumed."""

    def __init__(self) -> None:
        self.is_on = False
        self._calls: Counter[tuple[str, str]] = Counter()
        self._chains: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call or resumption."""
        if not self.is_on or event != "call":
            return
        chain = _coroutines(frame)
        if any(one.f_code.co_filename == WORKER for one in chain):
            return
        names = [_name(one.f_code) for one in reversed(chain)]
        if any(map(is_ours, names)) and len(names) > len(self._chains.get(names[0], ())):
            self._chains[names[0]] = names
        name = _name(frame.f_code)
        if is_ours(name):
            file, _, function = name.partition(" ")
            self._calls[file, function] += not _is_resumed(frame)

    def take(self) -> Window:
        """End the window."""
        self.is_on = False
        calls, self._calls = self._calls, Counter()
        window, self._chains = Window({}, self._chains), {}
        for (file, function), count in calls.items():
            window.calls.setdefault(file, {})[function] = count
        return window


def is_ours(name: str) -> bool:
    """Whether a function, as `Window.chains` names it, is the product's."""
    return name.startswith(PRODUCT)


def _coroutines(frame: FrameType | None) -> list[FrameType]:
    """Coroutines and async generators on the stack, innermost first."""
    found = []
    while frame is not None:
        if frame.f_code.co_flags & COROUTINE:
            found.append(frame)
        frame = frame.f_back
    return found


@functools.cache
def _name(code: Any) -> str:
    """A function's file, relative to the repository if it is ours, and its name."""
    path = Path(code.co_filename)
    if path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    name: str = getattr(code, "co_qualname", code.co_name)  # which Python 3.10 doesn't have
    return f"{'/'.join(path.parts[-5:])} {name.replace('.<locals>', '')}"


def _is_resumed(frame: FrameType) -> bool:
    """Whether a generator or coroutine is resumed rather than started."""
    if sys.version_info < (3, 11):
        return frame.f_lasti >= 0
    return bool(frame.f_code.co_code[frame.f_lasti + 1])  # the argument of RESUME: 0 at a function's start


def main() -> None:
    """Run the worker."""
    recorder = Recorder()

    def obey() -> None:
        for _ in sys.stdin:
            answer = msgspec.json.encode(recorder.take()) if recorder.is_on else b""
            recorder.is_on = not answer
            print(answer.decode(), flush=True)

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=obey, daemon=True).start()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    print(listener.getsockname()[1], flush=True)
    settings = os.open(sys.argv[1], os.O_RDONLY)
    sys.argv[1:] = [sys.argv[1], str(settings), str(listener.fileno()), "2"]
    headwater_server.gateway.worker.main()


if __name__ == "__main__":
    main()
