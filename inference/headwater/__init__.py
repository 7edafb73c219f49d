"""The model side of Headwater: the classes of a user's callable, and the process that serves it.

A model file imports from here and from nowhere else in the package::

    from headwater import Model, Tensor

Importing the package itself imports neither numpy nor other modules of Headwater: each name is imported when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.errors import BadInput
    from headwater.model import (
        Classification,
        Embedding,
        Model,
        Parameter,
        Request,
        Reranking,
        State,
        Tensor,
        Transcription,
    )
    from headwater.model_metrics import metrics

__all__ = [
    "BadInput",
    "Classification",
    "Embedding",
    "Model",
    "Parameter",
    "Request",
    "Reranking",
    "State",
    "Tensor",
    "Transcription",
    "metrics",
]

__version__ = "0.1.0"

_ELSEWHERE = {"BadInput": "headwater.errors", "metrics": "headwater.model_metrics"}
"""Modules of the names that `headwater.model` doesn't define."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_ELSEWHERE.get(name, "headwater.model"))
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
