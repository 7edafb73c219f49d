"""The types of a bound function's argument and results."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

__all__ = ["Request", "Requests", "Response", "Responses"]


@dataclass
class _Tensors(MutableMapping[str, Any]):
    """A mapping of arrays by name; the arrays are also in `data`."""

    data: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __setitem__(self, name: str, array: Any) -> None:
        self.data[name] = array

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)


@dataclass
class Request(_Tensors):
    """A client's request: its inputs, without the optional inputs that it left out, and its parameters."""

    parameters: dict[str, str | int | bool] | None = None
    span: Any = None
    """Always None: requests are not traced here."""
    requested_output_names: list[str] | None = None

    def traced_span(self, span_name: str) -> AbstractContextManager[None]:
        """A context without effect."""
        return nullcontext()


@dataclass
class Response(_Tensors):
    """The outputs for a request."""


Requests = list[Request]
Responses = list[Response]
