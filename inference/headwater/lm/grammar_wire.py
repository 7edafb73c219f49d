"""Messages between the engine and its grammar processes: socket pairs carry a message in each packet.

The processes form a tree: the engine starts the host (`headwater.lm.grammar_host`), the host forks a compiler for each
grammar, and the compiler forks a follower for each answer. A parent forks and kills on the engine's order, and reports
the end of its children.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

__all__ = [
    "COMPILE_BYTES",
    "FOLLOW_BYTES",
    "FORK",
    "KILL",
    "MASK_CPU_S",
    "NOT_STARTED",
    "ORDER",
    "OUT_OF_MEMORY",
    "TOKEN",
    "TOKEN_CPU_S",
    "Reply",
    "end_of",
    "ended",
    "pack_reply",
    "reply_of",
]

FORK: Final = b"f"
"""The order to fork a child. It carries the child's socket and, for a compiler, a file with the grammar."""
KILL: Final = b"k"
"""The order to kill a child."""
ORDER: Final = Struct("<cQd")
"""`FORK` or `KILL`; the child's number, which the engine chooses; the processor time that compilation may take, in
seconds (no effect in an order to kill, or to fork a follower)."""
TOKEN: Final = Struct("<I")
"""The answer's next token."""
NOT_STARTED: Final = -1
"""In place of a wait status: the child could not be forked, or was lost with its parent."""
COMPILE_BYTES: Final = 256 * 2**20
"""Bytes by which a compiler's address space may grow."""
FOLLOW_BYTES: Final = 128 * 2**20
"""Bytes by which a follower's address space may grow."""
MASK_CPU_S: Final = 1.0
"""The most processor time for a mask, in seconds. An answer begins with this budget."""
TOKEN_CPU_S: Final = 0.1
"""The processor time that each token adds to the answer's budget, up to `MASK_CPU_S`."""
OUT_OF_MEMORY: Final = 3
"""The exit status of a process in which Python ran out of memory. If llguidance runs out of memory, it aborts."""
_REPLIED: Final = b"r"
_ENDED: Final = b"e"
_END: Final = Struct("<cQi")
_REPLY: Final = Struct("<c??Q")


class Reply(NamedTuple):
    """The result of a compiler or a follower; from the host, only whether it could read the tokenizer."""

    mask: bytes
    """Which tokens may come next, a bit for each token of the vocabulary, the lowest bit of a byte first; empty if
    there is an error, and from the host."""
    is_stopped: bool
    """Whether the answer must end here."""
    error: str
    """Why the library failed; empty if it succeeded."""
    size_bytes: int
    """Bytes by which the process's data and stack have grown since it was forked."""


def pack_reply(reply: Reply) -> bytes:
    """A reply as a packet."""
    head = _REPLY.pack(_REPLIED, reply.is_stopped, bool(reply.error), reply.size_bytes)
    return head + (reply.error.encode("utf-8", "replace") if reply.error else reply.mask)


def reply_of(packet: bytes) -> Reply:
    """The reply in a packet."""
    _, is_stopped, is_error, size_bytes = _REPLY.unpack_from(packet)
    rest = packet[_REPLY.size :]
    return Reply(b"" if is_error else rest, is_stopped, rest.decode() if is_error else "", size_bytes)


def ended(number: int, status: int) -> bytes:
    """The packet that reports a child's end; the status is as `os.waitpid` returns it, or `NOT_STARTED`."""
    return _END.pack(_ENDED, number, status)


def end_of(packet: bytes) -> tuple[int, int] | None:
    """The number and the status in a packet of `ended`; None for a reply."""
    if not packet.startswith(_ENDED):
        return None
    _, number, status = _END.unpack(packet)
    return number, status
