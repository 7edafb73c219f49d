"""Requests and responses."""

from __future__ import annotations

from . import types

__all__ = ["types"]
