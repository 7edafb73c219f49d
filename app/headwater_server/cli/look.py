"""What ``check`` finds out about a deployment that it doesn't construct in the usual way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater.errors import Problem
from headwater.signature import Signature

__all__ = ["Look"]


class Look(NamedTuple):
    """The findings about a deployment."""

    python: dict[str, Any]
    """The ``path`` of its Python, and the ``versions`` of what it has; empty: Headwater's own Python runs it."""
    signature: Signature | None
    """Its signature; None: it can't be served."""
    problems: Sequence[Problem] = ()
    notes: tuple[str, ...] = ()
    """More lines about it."""
