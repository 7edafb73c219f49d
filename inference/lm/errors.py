"""Errors of an engine.

::

    ModelError
    ├── EngineFull               the waiting queue is full (429)
    └── BadInput
        └── RequestRejected      this engine can never serve this request (400)
            └── RequestTooLong   prompt and answer exceed the context, or the cache
"""

from inference.errors import BadInput, ModelError

__all__ = ["EngineFull", "RequestRejected", "RequestTooLong"]


class EngineFull(ModelError):
    """As many requests wait as may; try again later."""


class RequestRejected(BadInput):
    """The engine can't serve this request, now or later."""


class RequestTooLong(RequestRejected):
    """Prompt and answer together exceed what the model or the cache holds."""
