"""Errors of the model side.

::

    ModelError                   anything below
    ├── DeclarationError         a Tensor, Parameter or Model that contradicts itself
    ├── BadInput                 raised by a callable: the client's rows are wrong (400)
    ├── BadOutput                a callable returned something other than it declared (500)
    └── ReplicaError             the replica can't start or go on; its message is for the operator
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BadInput", "BadOutput", "DeclarationError", "LoadError", "ModelError", "Problem", "ReplicaError"]


class ModelError(Exception):
    """Base of every error of the model side."""


class DeclarationError(ModelError):
    """A declaration contradicts itself; raised when the model is imported or constructed."""


class BadInput(ModelError):
    """Raise it in a callable to answer the client with 400 and this message.

    The rows of a batch that are not at fault still succeed: the replica calls the model again without the others.
    """


class BadOutput(ModelError):
    """A callable returned something other than it declared: wrong name, datatype, shape or batch length."""


class ReplicaError(ModelError):
    """The replica can't start or go on."""


@dataclass(frozen=True)
class Problem:
    """Something that keeps Headwater from serving."""

    title: str
    """What it is about, in a few words."""
    reason: str
    """What was expected, and what was found."""
    mend: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.title}: {self.reason}; {self.mend}"


class LoadError(ReplicaError):
    """A model can't be imported or constructed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
        """The same in parts."""
