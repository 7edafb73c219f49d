"""PyTriton's exceptions."""

from __future__ import annotations

__all__ = [
    "PyTritonBadParameterError",
    "PyTritonError",
    "PyTritonInvalidOperationError",
    "PyTritonModelConfigError",
    "PyTritonRuntimeError",
    "PyTritonUnrecoverableError",
    "PyTritonValidationError",
]


class PyTritonError(Exception):
    """Base of PyTriton's exceptions."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        """The text of the exception."""
        return str(self)


class PyTritonValidationError(PyTritonError):
    """A configuration or a value is invalid."""


class PyTritonInvalidOperationError(PyTritonError):
    """An operation is not possible."""


class PyTritonBadParameterError(PyTritonError):
    """A parameter is invalid."""


class PyTritonModelConfigError(PyTritonError):
    """A model's configuration is invalid."""


class PyTritonUnrecoverableError(PyTritonError):
    """The function can answer no further request: its replica ends and is replaced."""


class PyTritonRuntimeError(PyTritonError):
    """Any other failure."""
