"""Compiles grammars and computes masks in processes that may take too long, run out of memory, or crash.

``python -c 'from headwater.lm.grammar_host import main; main(FD)'`` is the host: it reads the tokenizer, and forks a
compiler for each grammar. A compiler that succeeds forks a follower for each answer, which computes the tokens that may
come next in that answer. Each process has a single thread, and ends with its parent, or once the engine closes its
socket. `headwater.lm.grammar_wire` defines the messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from headwater.lm.grammar_source import compiled, short_reason, special_texts
from headwater.lm.grammar_wire import (
    COMPILE_BYTES,
    FOLLOW_BYTES,
    FORK,
    MASK_CPU_S,
    NOT_STARTED,
    ORDER,
    OUT_OF_MEMORY,
    TOKEN,
    TOKEN_CPU_S,
    Reply,
    ended,
    pack_reply,
)

__all__ = ["main"]

_STACK_BYTES: Final = 64 * 2**20
_PR_SET_PDEATHSIG: Final = 1
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_LIBC: Final = ctypes.CDLL(None)


class _Forker:
    """Forks a child for each order, kills it on order, and reports its end.

    Args:
        orders: the socket from which orders are read, and to which reports are sent.
        begin: runs in a child, which ends when `begin` returns; gets the child's socket, the file descriptor of a
            grammar or None, and the limit of processor time in the order, in seconds.
    """

    def __init__(self, orders: socket.socket, begin: Callable[[socket.socket, int | None, float], None]) -> None:
        self._orders = orders
        self._begin = begin
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[int, int]] = {}
        """Process id and pidfd of each child, by the number that the engine chose."""

    def run(self) -> None:
        """Serve until the engine closes the socket."""
        self._selector.register(self._orders, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._orders:
                    self._reap(key.data)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        packet, files, _, _ = socket.recv_fds(self._orders, ORDER.size, 2)
        if not packet:
            return False
        kind, number, cpu_s = ORDER.unpack(packet)
        if kind == FORK:
            channel = socket.socket(fileno=files[0])
            self._fork(number, channel, files[1] if len(files) > 1 else None, cpu_s)
            channel.close()
            for file in files[1:]:
                os.close(file)
        elif number in self._children:
            os.kill(self._children[number][0], signal.SIGKILL)  # not reaped yet, so the id is still the child's
        return True

    def _fork(self, number: int, channel: socket.socket, file: int | None, cpu_s: float) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._orders.send(ended(number, NOT_STARTED))
            return
        if not pid:
            try:
                self._begin_child(channel, file, cpu_s)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except BaseException:
                os._exit(1)
            os._exit(0)
        pidfd = os.pidfd_open(pid)
        self._children[number] = pid, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, number)

    def _begin_child(self, channel: socket.socket, file: int | None, cpu_s: float) -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        kept = {0, 1, 2, channel.fileno(), file}
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if descriptor not in kept:
                with contextlib.suppress(OSError):  # the listing's descriptor is already closed
                    os.close(descriptor)
        self._begin(channel, file, cpu_s)

    def _reap(self, number: int) -> None:
        pid, pidfd = self._children.pop(number)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._orders.send(ended(number, status))


def main(descriptor: int) -> None:
    """Run the host on the socket with this descriptor, until the engine closes the other end. The first packet is a
    JSON array of the tokenizer's file, the vocabulary size and the end-of-sequence tokens. A reply says whether the
    library can read the tokenizer; if not, the host ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _let_stack_grow()
    engine = socket.socket(fileno=descriptor)
    tokenizer_file, vocab_size, eos_ids = json.loads(engine.recv(65_536))
    try:
        tokenizer = LLTokenizer(Path(tokenizer_file).read_text(encoding="utf-8"), vocab_size, eos_ids)
        special = special_texts(tokenizer)
    except BaseException as error:  # the library's panics are BaseExceptions
        engine.send(pack_reply(Reply(b"", False, str(error) or type(error).__name__, 0)))
        return
    engine.send(pack_reply(Reply(b"", False, "", 0)))
    # If memory runs out, the kernel kills these processes first.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would copy pages that the children share

    def begin(channel: socket.socket, file: int | None, cpu_s: float) -> None:
        assert file is not None
        _compile(tokenizer, special, channel, file, cpu_s)

    with contextlib.suppress(ConnectionError):  # the engine is gone
        _Forker(engine, begin).run()


def _compile(tokenizer: LLTokenizer, special: list[str], channel: socket.socket, file: int, cpu_s: float) -> None:
    """Compile the grammar in a file, send the result and, if it succeeded, fork followers on order."""
    grown = _Growth(COMPILE_BYTES)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides messages of the library when it aborts
    with open(file, encoding="utf-8") as source:
        kind, text, before = json.load(source)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        matcher, mask = compiled(tokenizer, special, kind, text, before)
    except ValueError as error:
        channel.send(pack_reply(Reply(b"", False, str(error), 0)))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    channel.send(pack_reply(Reply(mask, matcher.is_stopped(), "", grown.size())))
    _Forker(channel, lambda answer, file, cpu_s: _follow(matcher, answer)).run()


def _follow(matcher: LLMatcher, answer: socket.socket) -> None:
    """After each token of an answer, send the mask of the tokens that may come next."""
    grown = _Growth(FOLLOW_BYTES)
    left_s = MASK_CPU_S
    while packet := answer.recv(TOKEN.size):
        (token,) = TOKEN.unpack(packet)
        signal.setitimer(signal.ITIMER_PROF, left_s)
        try:
            matcher.consume_token(token)
            mask = matcher.compute_bitmask()
            error = short_reason(matcher.get_error())
        except MemoryError:
            raise
        except BaseException as failure:  # the library's panics are BaseExceptions
            mask, error = b"", str(failure) or type(failure).__name__
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        left_s = min(left_s + TOKEN_CPU_S, MASK_CPU_S)
        answer.send(pack_reply(Reply(mask, matcher.is_stopped(), error, grown.size())))


class _Growth:
    """Limits the further growth of this process's memory, and measures it.

    Args:
        most_bytes: the limit.
    """

    def __init__(self, most_bytes: int) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        size, self._before = self._pages()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit_bytes = size * _PAGE + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes if hard < 0 else min(limit_bytes, hard), hard))

    def size(self) -> int:
        """Bytes by which the process's data and stack have grown."""
        return max(0, self._pages()[1] - self._before) * _PAGE

    def _pages(self) -> tuple[int, int]:
        """The size in pages of the address space, and of its part for data and stack."""
        size, _, _, _, _, data, *_ = os.pread(self._file, 256, 0).split()
        return int(size), int(data)


def _let_stack_grow() -> None:
    """Raise the limit of the stack, because the library recurses. The gateway limits the depth of grammars."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES if hard < 0 else min(_STACK_BYTES, hard), hard))
