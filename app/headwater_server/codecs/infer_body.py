"""The JSON of an inference request, as msgspec parses it.

Shapes, data and parameters' values stay text (`msgspec.Raw`) until their sizes are checked, so that parsing builds no
large lists.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headwater_server.codecs.parameters import RequestId

__all__ = ["NO_DATA", "InferBody", "InputEntry", "OutputEntry"]

_Parameters = dict[str, msgspec.Raw] | None
NO_DATA: Final = msgspec.Raw(b"")
"""The ``data`` of an input that lacks the field. Compared by identity."""


class InputEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An element of ``inputs``."""

    name: str
    datatype: str
    shape: msgspec.Raw
    data: msgspec.Raw = NO_DATA
    parameters: _Parameters = None


class OutputEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An element of ``outputs``."""

    name: str
    parameters: _Parameters = None


class InferBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The body's JSON: the whole body, or the part before the binary tensors."""

    inputs: list[InputEntry]
    id: RequestId | None = None
    model_name: str | None = None
    """KServe's client repeats the path's model name here."""
    parameters: _Parameters = None
    outputs: list[OutputEntry] | None = None
