"""See app/process/machine.py."""

from __future__ import annotations

from typing import Final

__all__ = ["HOST", "size_text"]


HOST: Final = "the machine"
"""Where every replica is; those on a GPU are there, too."""


def size_text(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:.0f} MiB"
