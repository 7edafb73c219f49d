"""Defaults of options of `headwater plan`, and its own exit status."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["DEFAULTS", "NOT_HELD"]

DEFAULTS: Final[dict[str, Any]] = {
    "batch_sizes": (1, 8, 32), "sequences": (1, 8, 32), "instances": (1, 2), "replicas": (1, 2),
    "seconds": 4.0, "tokens": 64, "rounds": 3,
}  # fmt: skip
"""Values of options that are not given. Their parsed value is None, so that a given option that would be ignored can be
refused."""
NOT_HELD: Final = 3
"""Exit status: everything was run, but the figures did not hold: they differ too much between rounds, or from the
prediction, or vLLM's options don't fit."""
