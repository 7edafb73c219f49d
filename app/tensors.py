"""Tensors as the gateway carries them: raw bytes with a shape, undecoded."""

from __future__ import annotations

from dataclasses import dataclass

from inference.model import Scalar

__all__ = ["InferRequest", "OutputWish", "RawTensor", "Scalar"]


@dataclass(slots=True)
class RawTensor:
    """A tensor's bytes in the protocol's binary form: little-endian, C order; ``BYTES`` elements length-prefixed."""

    datatype: str
    shape: tuple[int, ...]
    """Batch axis first."""
    data: bytes | memoryview


@dataclass(slots=True)
class OutputWish:
    """One output that a request wants, and in which form."""

    name: str
    binary: bool


@dataclass(slots=True)
class InferRequest:
    """A request to infer, checked against the model's signature."""

    id: str
    inputs: dict[str, RawTensor]
    """By name; an optional input that was left out is absent."""
    rows: int
    """The batch axis, the same in all inputs; may be 0."""
    outputs: list[OutputWish]
    """The wanted outputs, in the order asked for; all declared ones if the request named none."""
    batch_parameters: dict[str, Scalar]
    """Declared parameters per batch, defaults filled in."""
    row_parameters: dict[str, Scalar]
    """Declared parameters per row, defaults filled in; the same value for all rows of this request."""
    heads: tuple[str, ...] = ()
    """Of a pipeline: the wanted heads, in the signature's order. Never empty there; always empty elsewhere."""
    priority: int = 0
    """1 is the most urgent; 0 stands for the default."""
    timeout_us: int = 0
    """The client's own deadline in microseconds; 0 for none."""
    cancel_id: str = ""
    """By which a client may cancel it (`app.security.key_check.owned_id`); empty: it can't be."""
