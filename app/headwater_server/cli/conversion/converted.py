"""What a model of a repository becomes."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["MODULE", "Converted", "RefusedByTriton", "ScriptClass", "Unfit"]

MODULE = "triton_models"
"""The module that is written for scripts, beside the configuration."""


class Unfit(Exception):
    """A model can't be a deployment of its own.

    Args:
        reason: why.
        fix: what to change in the repository, so that it can; empty: nothing.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__("; ".join(filter(None, (reason, fix))))


class RefusedByTriton(Unfit):
    """Triton would refuse the model, too."""


class ScriptClass(NamedTuple):
    """A class of `MODULE` that runs a script."""

    name: str
    fields: dict[str, Any]
    """The class's attributes."""


class Converted(NamedTuple):
    """A model as a deployment."""

    section: dict[str, Any]
    """The deployment's fields in the configuration."""
    remarks: tuple[str, ...] = ()
    """What of the model's configuration is not carried over, and what to do instead."""
    classes: tuple[ScriptClass, ...] = ()
