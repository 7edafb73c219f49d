"""The JSON of a request to infer, as msgspec parses it.

Parsing builds no list of a client's length: those stay text until their sizes are checked.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headwater_server.codecs.parameters import RequestId

__all__ = ["NO_DATA", "InferBody", "InputEntry", "OutputEntry"]

_Parameters = dict[str, msgspec.Raw] | None
NO_DATA: Final = msgspec.Raw(b"")


class InputEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One of ``inputs``."""

    name: str
    datatype: str
    shape: msgspec.Raw
    data: msgspec.Raw = NO_DATA
    parameters: _Parameters = None


class OutputEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One of ``outputs``."""

    name: str
    parameters: _Parameters = None


class InferBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The whole body, or its part that is JSON."""

    inputs: list[InputEntry]
    id: RequestId | None = None
    model_name: str | None = None
    """KServe's client repeats the path's here."""
    parameters: _Parameters = None
    outputs: list[OutputEntry] | None = None
