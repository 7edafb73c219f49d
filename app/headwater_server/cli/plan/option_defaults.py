"""Defaults of options of `headwater plan`."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["DEFAULTS"]

DEFAULTS: Final[dict[str, Any]] = {
    "batch_sizes": (1, 8, 32), "sequences": (1, 8, 32), "instances": (1, 2), "replicas": (1, 2),
    "seconds": 4.0, "tokens": 64, "rounds": 3,
}  # fmt: skip
"""Values of options that are not given. Their parsed value is None, so that a given option that would be ignored can be
refused."""
