"""Notes when a request passes chosen functions, in each process that Python starts with this folder on PYTHONPATH.

A mark is the number of a place in `PLACES` and the time of the monotonic clock, which all processes share. Each process
writes its marks to a mapped file in the folder HEADWATER_MARKS, where `benchmarks.waterfall` reads them.
"""

from __future__ import annotations

import functools
import importlib.abc
import inspect
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["MARK", "PLACES", "STUB_LINES", "wrap"]

MARK = struct.Struct("=qq")
"""A mark: the number of its place, from 1, and the time in nanoseconds. A mark with the number 0 is the end."""
_SIZE = MARK.size * 200_000
"""Size of a file in bytes; later marks are lost."""


class Marked(NamedTuple):
    """A function, and the places that a request passes with its call and its return; empty: not marked."""

    module: str
    """The module's name, or the end of the name after a dot."""
    function: str
    """The function's qualified name."""
    called: str = ""
    returned: str = ""


_CALL = "headwater_server.transport.http_connection"
_BRIDGE = "headwater.wire.bridge"
MARKS = (
    Marked(
        "headwater_server.gateway.http.bounded_connection",
        "BoundedConnection.data_received",
        called="the worker has read the request",
    ),
    Marked("headwater_server.transport.triton_http", "TritonClient.infer", called="the worker has a batch"),
    Marked(_CALL, "HttpConnection.begin", returned="the worker has written the call"),
    Marked("model", "TritonPythonModel.execute", "the stub has the call", "the stub has answered"),
    Marked("headwater.runtime.runner", "Runner.handle", called="the host has read the call"),
    Marked("headwater.zoo.scale", "Scale.__call__", "the model is called", "the model has answered"),
    Marked("headwater.replica.callee", "Callee._send", "the host has the answer", "the host has written the answer"),
    Marked(_CALL, "HttpConnection.data_received", called="the worker has read the answer"),
    Marked("headwater_server.gateway.http.exchange", "Exchange.answer", called="the worker has encoded the answer"),
)
PLACES = tuple(place for marked in MARKS for place in (marked.called, marked.returned))
"""The place of each number, from 1."""

STUB_LINES = f"""
import importlib.util, sys
_spec = importlib.util.spec_from_file_location("marks", {__file__!r})
_marks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_marks)
_marks.wrap(sys.modules[__name__])
"""
"""What a marked ``model.py`` ends with: the Python in Triton's stub doesn't read PYTHONPATH."""


class _MarksFile:
    """This process's file."""

    def __init__(self, folder: str) -> None:
        descriptor = os.open(os.path.join(folder, str(os.getpid())), os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _SIZE)
        self._map = mmap.mmap(descriptor, _SIZE)
        os.close(descriptor)
        self._end = 0

    def write(self, number: int) -> None:
        """Write a mark with the present time."""
        if self._end < _SIZE:
            MARK.pack_into(self._map, self._end, number, time.monotonic_ns())
            self._end += MARK.size


_files: dict[int, _MarksFile] = {}
"""By process id, since a fork needs a file of its own."""


def _mark(number: int) -> None:
    """Note the place of this number; 0: none."""
    if not number:
        return
    pid = os.getpid()
    if pid not in _files:
        _files[pid] = _MarksFile(os.environ["HEADWATER_MARKS"])
    _files[pid].write(number)


def _marking(function: Callable[..., Any], called: int, returned: int) -> Callable[..., Any]:
    """Wrap a function so that its call and its return note places."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*arguments: Any, **named: Any) -> Any:
            _mark(called)
            result = await function(*arguments, **named)
            _mark(returned)
            return result

        return coroutine

    @functools.wraps(function)
    def plain(*arguments: Any, **named: Any) -> Any:
        _mark(called)
        result = function(*arguments, **named)
        _mark(returned)
        return result

    return plain


def _is_in(name: str, marked: Marked) -> bool:
    """Whether a module of this name has the function."""
    return name == marked.module or name.endswith(f".{marked.module}")


def wrap(module: Any) -> None:
    """Have the functions of a module that `MARKS` names note their places, and the bridge's copy for Triton's stub."""
    for index, marked in enumerate(MARKS):
        if not _is_in(module.__name__, marked):
            continue
        *outer, name = marked.function.split(".")
        owner = module
        for part in outer:
            owner = getattr(owner, part, None)
        if hasattr(owner, name):
            called, returned = (2 * index + 1) * bool(marked.called), (2 * index + 2) * bool(marked.returned)
            setattr(owner, name, _marking(getattr(owner, name), called, returned))
    if module.__name__ == _BRIDGE:
        install = module.install

        def install_marked(script: Path) -> None:
            install(script)
            with script.open("a") as file:
                file.write(STUB_LINES)

        module.install = install_marked


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, and wraps its functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        wrap(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules whose functions are wrapped."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname != _BRIDGE and not any(_is_in(fullname, marked) for marked in MARKS):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if __name__ == "sitecustomize" and "HEADWATER_MARKS" in os.environ:
    sys.meta_path.insert(0, _Finder())
