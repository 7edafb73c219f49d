"""An input or output of a model that a script binds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Tensor"]


@dataclass(frozen=True)
class Tensor:
    """A tensor's row shape, in which -1 is a dimension that varies, and its numpy type; ``bytes`` is text."""

    shape: tuple[int, ...]
    dtype: Any
    """A scalar type of numpy; a ``np.dtype`` becomes its scalar type."""
    name: str | None = None
    optional: bool | None = False

    def __post_init__(self) -> None:
        if isinstance(self.dtype, np.dtype):
            object.__setattr__(self, "dtype", self.dtype.type)
