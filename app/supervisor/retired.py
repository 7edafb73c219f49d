"""What came of ending replicas: who was in flight, what was freed, what remains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.control.messages import Drained
from app.process.proc import NOTHING, GroupMemory

__all__ = ["Retired"]


@dataclass
class Retired:
    """What came of ending replicas."""

    drained: Drained = field(default_factory=Drained)
    before: GroupMemory = NOTHING
    after: GroupMemory = NOTHING
    leftovers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """As an operator is told."""
        gpu = None
        if self.before.gpu_bytes is not None and self.after.gpu_bytes is not None:
            gpu = self.before.gpu_bytes - self.after.gpu_bytes
        told: dict[str, Any] = {
            "drained": self.drained.drained,
            "ended": self.drained.ended,
            "freed": {"host_bytes": self.before.host_bytes - self.after.host_bytes, "gpu_bytes": gpu},
            "leftovers": self.leftovers,
        }
        if self.warnings:
            told["warnings"] = self.warnings
        return told

    def __add__(self, other: Retired) -> Retired:
        """Both together."""
        return Retired(
            self.drained + other.drained,
            _sum(self.before, other.before),
            _sum(self.after, other.after),
            self.leftovers + other.leftovers,
            self.warnings + other.warnings,
        )


def _sum(one: GroupMemory, other: GroupMemory) -> GroupMemory:
    gpu = [found for found in (one.gpu_bytes, other.gpu_bytes) if found is not None]
    return GroupMemory(one.host_bytes + other.host_bytes, sum(gpu) if gpu else None)
