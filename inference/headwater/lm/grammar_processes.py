"""The engine's side of its grammar processes: starts them, reads their packets and ends them.
`headwater.lm.grammar_wire` defines the packets."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import headwater
from headwater.errors import ReplicaError
from headwater.lm.grammar_wire import FORK, KILL, NOT_STARTED, ORDER, Reply, end_of, reply_of

__all__ = ["GrammarProcess", "GrammarProcesses", "Listener"]

logger = logging.getLogger(__name__)

_PACKAGES: Final = str(Path(headwater.__file__).parents[1])
_HOST: Final = "import sys; sys.path.append({!r}); from headwater.lm.grammar_host import main; main({})"
_PACKET_BYTES: Final = 4096
"""Upper bound of a packet's size without its mask."""
_HOST_END_S: Final = 5
"""Seconds that the host has to end by itself."""


class Listener(Protocol):
    """Receives the replies and the end of a process, in calls that `GrammarProcesses.poll` makes."""

    def note(self, reply: Reply) -> None:
        """Take a reply."""

    def end(self, status: int) -> None:
        """Note the process's end; the status is as `os.waitpid` returns it, or `NOT_STARTED`."""


class GrammarProcess:
    """The engine's handle of a process. After a call of `GrammarProcesses.release` the process ends by itself once it
    is idle."""

    def __init__(
        self, number: int, channel: socket.socket, parent: GrammarProcess | None, listener: Listener | None
    ) -> None:
        self.number = number
        self.channel = channel
        self.parent = parent
        """The process that forked this process; None for the host."""
        self.listener = listener
        self.children: dict[int, GrammarProcess] = {}
        """The processes that this process forked and that have not ended, by number."""

    def send(self, packet: bytes) -> None:
        """Send a packet. It is lost if the process has ended, or if the socket's buffer is full."""
        with contextlib.suppress(OSError):
            self.channel.send(packet)

    def kill(self) -> None:
        """Kill the process, even if it is busy."""
        if self.parent is not None:
            self.parent.send(ORDER.pack(KILL, self.number, 0))


class GrammarProcesses:
    """Starts the host and, through it, all other processes. If the host has ended, the next `compile` starts another.
    Only a single thread may use the object.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: the model's vocabulary size, which may exceed the tokenizer's.
        eos_ids: the model's end-of-sequence tokens.

    Raises:
        ReplicaError: the library can't read the tokenizer.
        ChildProcessError: the host ended at once.
        OSError: the host can't be started.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: list[int]) -> None:
        self._settings = json.dumps([str(tokenizer), vocab_size, eos_ids]).encode()
        self._packet_bytes = vocab_size // 8 + _PACKET_BYTES
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._channels: set[socket.socket] = set()
        self._unstarted: list[Listener] = []
        """Listeners of processes that could not be started, until `poll` informs them."""
        self._host = self._start_host()
        self._host.channel.setblocking(True)
        packet = b""
        with contextlib.suppress(ConnectionResetError):  # the host has ended before it read the settings
            packet = self._host.channel.recv(self._packet_bytes)
        self._host.channel.setblocking(False)
        if not packet:
            raise ChildProcessError("the process that compiles grammars has ended; the lines above say why")
        if error := reply_of(packet).error:
            raise ReplicaError(f"llguidance can't read {tokenizer}: {error}")

    def compile(self, kind: str, text: str, before: str, cpu_s: float, listener: Listener) -> GrammarProcess | None:
        """Have a grammar compiled. Returns the compiler; None if its start fails at once, which the next `poll` also
        reports to the listener.

        Args:
            kind: `headwater.engine.Grammar.kind`.
            text: `headwater.engine.Grammar.text`.
            before: `headwater.engine.Grammar.before`.
            cpu_s: the processor time that the compilation may take, in seconds.
            listener: receives the result.
        """
        try:
            if self._host.channel not in self._channels:
                self._host = self._start_host()
            with open(os.memfd_create("grammar"), "w+", encoding="utf-8") as file:
                json.dump([kind, text, before], file)
                file.seek(0)
                return self._start(self._host, listener, cpu_s, file.fileno())
        except OSError as error:
            logger.error("a grammar can't be compiled: no process can be started: %s", error)
            self._unstarted.append(listener)
            return None

    def follow(self, compiler: GrammarProcess, listener: Listener) -> GrammarProcess | None:
        """Have a compiler that succeeded fork a follower, and return the follower; None as for `compile`. Tokens may be
        sent to the follower at once."""
        try:
            return self._start(compiler, listener, 0)
        except OSError as error:
            logger.error("an answer can't be held to its grammar: no process can be started: %s", error)
            self._unstarted.append(listener)
            return None

    def release(self, process: GrammarProcess) -> None:
        """Let a process end once it is idle. The end is reported to its listener."""
        if process.channel in self._channels:
            self._selector.unregister(process.channel)
            self._channels.discard(process.channel)
            process.channel.close()

    def poll(self, timeout_s: float = 0) -> None:
        """Pass the packets of the processes to their listeners. If there are no packets yet, wait up to `timeout_s`."""
        for listener in self._unstarted:
            timeout_s = 0
            listener.end(NOT_STARTED)
        self._unstarted.clear()
        for key, _ in self._selector.select(timeout_s):
            self._hear(key.data)

    def close(self) -> None:
        """End all processes, without calls to listeners. Waits up to `_HOST_END_S` before it kills the host."""
        self._end()

    def _start_host(self) -> GrammarProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            host = subprocess.Popen(
                [sys.executable, "-c", _HOST.format(_PACKAGES, theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._end = weakref.finalize(self, _end_host, host, self._channels)
        process = GrammarProcess(next(self._numbers), ours, None, None)
        self._register(process)
        process.send(self._settings)
        return process

    def _start(self, parent: GrammarProcess, listener: Listener, cpu_s: float, *files: int) -> GrammarProcess:
        number = next(self._numbers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(parent.channel, [ORDER.pack(FORK, number, cpu_s)], [theirs.fileno(), *files])
            except OSError:
                ours.close()
                raise
        process = parent.children[number] = GrammarProcess(number, ours, parent, listener)
        self._register(process)
        return process

    def _register(self, process: GrammarProcess) -> None:
        process.channel.setblocking(False)
        self._channels.add(process.channel)
        self._selector.register(process.channel, selectors.EVENT_READ, process)

    def _hear(self, process: GrammarProcess) -> None:
        """Read all packets that a process has sent."""
        for packet in self._packets(process):
            if (end := end_of(packet)) is not None:
                number, status = end
                if (child := process.children.pop(number, None)) is not None:
                    self._hear(child)
                    self._lose(child, status)
            elif process.listener is not None:
                process.listener.note(reply_of(packet))

    def _packets(self, process: GrammarProcess) -> Iterator[bytes]:
        while process.channel in self._channels:
            try:
                packet = process.channel.recv(self._packet_bytes)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if packet:
                yield packet
                continue
            self.release(process)
            if process.parent is None:  # the host has ended, and all other processes with it
                logger.error("the process that compiles grammars has ended; the next request starts another")
                self._lose(process, NOT_STARTED)
                self._end()

    def _lose(self, process: GrammarProcess, status: int) -> None:
        """Note the end of a process, and of its children, which end with it."""
        self.release(process)
        for child in list(process.children.values()):
            self._lose(child, NOT_STARTED)
        process.children.clear()
        if process.listener is not None:
            process.listener.end(status)


def _end_host(host: subprocess.Popen[bytes], channels: set[socket.socket]) -> None:
    for channel in channels:
        channel.close()
    channels.clear()
    try:
        host.wait(_HOST_END_S)
    except subprocess.TimeoutExpired:
        host.kill()
        host.wait()
