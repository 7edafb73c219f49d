"""The scopes of API keys: the kinds of request that a key may permit."""

from __future__ import annotations

from typing import Final, Literal, get_args

__all__ = ["SCOPES", "Scope"]

Scope = Literal["infer", "metrics", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
