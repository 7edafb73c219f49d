"""Errors of the model side. A few modules derive more specific errors from these.

::

    ModelError                   anything below
    ├── DeclarationError         a Tensor, Parameter, Model or pipeline contradicts itself or another declaration, or a
    │                            value doesn't fit its declaration
    ├── BadInput                 raised by a callable: the client's rows are wrong (400, or its own 4xx)
    ├── BadOutput                a callable returned something other than it declared (500)
    └── ReplicaError             the replica can't start or continue; its message is for the operator
        ├── EnvironmentUnfit     the Python installation or the machine lacks requirements of every replica
        ├── LoadError            a model can't be found, imported, constructed or loaded
        ├── ModelUnfit           a model fails with its own example
        └── Shortage             the machine temporarily lacks processes, memory, disk space or descriptors
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "CLIENT_STATUSES",
    "FAULTS",
    "BadInput",
    "BadOutput",
    "DeclarationError",
    "EnvironmentUnfit",
    "LoadError",
    "ModelError",
    "ModelUnfit",
    "OutputMismatch",
    "Problem",
    "ReplicaError",
    "Shortage",
    "did_you_mean",
    "is_permanent",
    "shortage_in",
    "shortage_of",
    "text_for_clients",
]

CAUSE_CHARACTERS = 300
SHORT_OF = {
    errno.EAGAIN: "processes or threads (ulimit -u, or the pids limit of a container)",
    errno.ENOSPC: "space on a disk",
    errno.EDQUOT: "space on a disk (its quota)",
    errno.EMFILE: "file descriptors (ulimit -n)",
    errno.ENFILE: "file descriptors",
    errno.ENOMEM: "memory",
}
"""What the machine lacks when a system call fails with this error number."""
_PATH = re.compile(r"(?<![\w/:.~-])~?/[^\s:'\"]*")
"""A path that begins with ``/`` or ``~/``. It may have any text after the first slash, up to white space, a colon or a
quote, so that a search takes linear time."""


class ModelError(Exception):
    """Base of every error of the model side."""


class DeclarationError(ModelError):
    """A declaration contradicts itself or another declaration, or a value doesn't fit its declaration.

    Args:
        faults: a message for each fault.
        expected: the values that the declaration allows, if a value doesn't fit.
        fix: how to correct the declaration, if the faults don't say so.
    """

    def __init__(self, *faults: str, expected: str = "", fix: str = "") -> None:
        super().__init__(*faults)
        self.expected, self.fix = expected, fix

    def __str__(self) -> str:
        """The faults and the fix in one line."""
        return "; ".join(filter(None, (*map(str, self.args), self.fix)))


CLIENT_STATUSES = (400, 404, 409, 410, 413, 415, 422)
"""HTTP statuses that a callable may give rows that are the client's fault."""


class BadInput(ModelError):
    """Raised by a callable to answer the client with this message and with ``status``, one of `CLIENT_STATUSES`.

    If the model is idempotent and doesn't stream, the batch's other rows still succeed: the replica calls the model
    again with smaller groups of rows. Otherwise all rows of the call fail with this message.

    Raises:
        ValueError: the status is another number.
    """

    def __init__(self, *args: object, status: int = 400) -> None:
        super().__init__(*args)
        if status not in CLIENT_STATUSES:
            raise ValueError(
                f"BadInput, status: expected one of {', '.join(map(str, CLIENT_STATUSES))}, got {status!r}"
            )
        self.status = status


class OutputMismatch(NamedTuple):
    """An output that doesn't match its declaration."""

    output: str
    rows: int
    """The number of rows that the callable got."""
    datatype: str
    shape: tuple[int, ...]
    """The shape that the callable returned, batch axis included."""


class BadOutput(ModelError):
    """A callable returned something other than it declared: wrong name, datatype, shape or batch length."""

    mismatch: OutputMismatch | None = None
    """The output, if `headwater.wire.arrays.wire` found its datatype or shape wrong; None for other faults."""


class ReplicaError(ModelError):
    """The replica can't start or continue."""


class EnvironmentUnfit(ReplicaError):
    """The Python installation or the machine lacks a requirement of every replica."""


def did_you_mean(wrong: object, candidates: Iterable[object]) -> str:
    """Suffix for a message about an unknown name: suggests the closest known name; empty if no name is close."""
    matches = difflib.get_close_matches(str(wrong), [str(name) for name in candidates], n=1)
    return f"; did you mean `{matches[0]}`?" if matches else ""


@dataclass(frozen=True)
class Problem:
    """A problem that keeps Headwater from serving."""

    title: str
    """The subject, in a few words."""
    reason: str
    """The expected and the actual state."""
    fix: str
    """How to fix it."""

    def __str__(self) -> str:
        return f"{self.title}: {self.reason}; {self.fix}"


class LoadError(ReplicaError):
    """A model can't be found, imported, constructed or loaded."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
        """The error's message in parts."""


class ModelUnfit(ReplicaError):
    """A model fails with its own example, and would fail again at the next start."""


class Shortage(ReplicaError):
    """The machine temporarily lacks a resource.

    Args:
        error: the error number of the failed system call, a key of `SHORT_OF`.
        text: describes the failed operation.
    """

    def __init__(self, error: int, text: str) -> None:
        super().__init__(f"the machine lacks {SHORT_OF[error]}: {text}")


def shortage_of(error: BaseException) -> Shortage | None:
    """The shortage that an error of the system or the interpreter shows, or that caused a `LoadError`; None for other
    errors."""
    if isinstance(error, Shortage):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, LoadError):
        text, error = error.problem.reason, error.__cause__ or error
    if isinstance(error, OSError) and error.errno in SHORT_OF:
        return Shortage(error.errno, text)
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return Shortage(errno.EAGAIN, text)
    # The shared-library loader's shortage, or that of a `LoadError` with its cause only in words.
    return shortage_in([text]) if isinstance(error, (ImportError, LoadError)) else None


def shortage_in(lines: Iterable[str], prefix: str = "") -> Shortage | None:
    """The shortage in the first line that has the system's message for an error number in `SHORT_OF`; None if no line
    has. The error's text consists of ``prefix`` and the line."""
    for line in lines:
        for number in SHORT_OF:
            if os.strerror(number) in line:
                return Shortage(number, prefix + line)
    return None


FAULTS = (
    AssertionError, AttributeError, IndexError, KeyError, NameError, NotImplementedError, TypeError, UnboundLocalError,
    ValueError, ZeroDivisionError,
)  # fmt: skip
"""Exceptions that the user's code raises because of a fault in the code or in its options, if the type is exactly one
of these and no subclass. Other errors (of connections, files, memory, CUDA, other libraries) may be temporary."""


def is_permanent(error: Exception) -> bool:
    """Whether another start of the replica would raise the error again."""
    if isinstance(error, LoadError):
        cause = error.__cause__
        return isinstance(cause, (type(None), ImportError, SyntaxError, DeclarationError)) or _is_fault(cause)
    return isinstance(error, (DeclarationError, EnvironmentUnfit, ModelUnfit)) or _is_fault(error)


def _is_fault(error: BaseException) -> bool:
    """Whether the error's type is in `FAULTS` and the error was not caused by an error that may be temporary."""
    return type(error) in FAULTS and not isinstance(error.__cause__ or error.__context__, (OSError, MemoryError))


def text_for_clients(text: str) -> str:
    """The first line of an error's text, with paths cut to their last part, and at most `CAUSE_CHARACTERS` long."""
    first_line = text.partition("\n")[0]
    return _PATH.sub(_last_part, first_line)[:CAUSE_CHARACTERS]


def _last_part(path: re.Match[str]) -> str:
    return path[0][path[0].rstrip("/").rfind("/") + 1 :]
