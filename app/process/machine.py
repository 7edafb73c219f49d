"""The machine as a place of memory, and sizes in words."""

from __future__ import annotations

from typing import Final

__all__ = ["HOST", "size_text"]

HOST: Final = "the machine"
"""The place where every replica takes memory, even one on a GPU."""


def size_text(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:.0f} MiB"
