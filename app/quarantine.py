"""Requests that replicas were lost with: who is suspected of it, and who is refused because it happened twice."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from app.codecs.tensors import InferRequest

__all__ = ["LIMIT", "Quarantine", "fingerprint"]

LIMIT: Final = 1024
"""So many of each kind are remembered."""
FINGERPRINT_BYTES: Final = 16


def fingerprint(request: InferRequest) -> bytes:
    """What two requests have in common if a model computes the same for both: inputs, parameters and wanted heads."""
    parameters = (sorted(request.batch_parameters.items()), sorted(request.row_parameters.items()))
    digest = hashlib.blake2b(msgspec.json.encode((parameters, request.heads)), digest_size=FINGERPRINT_BYTES)
    for name, tensor in sorted(request.inputs.items()):
        # With their lengths, so that no two tensors can be cut otherwise and be the same.
        digest.update(msgspec.json.encode((name, tensor.datatype, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()


class Quarantine:
    """Of one deployment, by fingerprint. No clock of its own.

    A request is suspected once a replica was lost while it had it, perhaps with others; it should be computed alone. It
    is refused once another was lost while it was alone there.

    Args:
        for_s: how long either is remembered; 0: not at all.
    """

    def __init__(self, for_s: float) -> None:
        self.for_s = for_s
        self._suspected: dict[bytes, float] = {}
        """Until when; the first end first."""
        self._refused: dict[bytes, float] = {}

    def __len__(self) -> int:
        """How many it knows of; while there are none, nobody needs a fingerprint."""
        return len(self._suspected) + len(self._refused)

    def suspect(self, mark: bytes, now_s: float) -> None:
        """A replica was lost with it."""
        self._note(self._suspected, mark, now_s)

    def refuse(self, mark: bytes, now_s: float) -> None:
        """Two were."""
        self._suspected.pop(mark, None)
        self._note(self._refused, mark, now_s)

    def clear(self, mark: bytes) -> None:
        """It was answered: what it was suspected of, another did."""
        self._suspected.pop(mark, None)

    def lift(self) -> None:
        """Forget all: another model is served, or the same one anew."""
        self._suspected.clear()
        self._refused.clear()

    def is_suspected(self, mark: bytes, now_s: float) -> bool:
        """Whether it should be computed alone."""
        _drop_old(self._suspected, now_s)
        return mark in self._suspected

    def refused_s(self, mark: bytes, now_s: float) -> float:
        """For how long it is still refused; 0 if it isn't."""
        _drop_old(self._refused, now_s)
        return self._refused[mark] - now_s if mark in self._refused else 0.0

    def _note(self, kind: dict[bytes, float], mark: bytes, now_s: float) -> None:
        if not self.for_s:
            return
        _drop_old(kind, now_s)
        kind.pop(mark, None)
        kind[mark] = now_s + self.for_s
        if len(kind) > LIMIT:
            del kind[next(iter(kind))]


def _drop_old(kind: dict[bytes, float], now_s: float) -> None:
    while kind:
        first = next(iter(kind))
        if kind[first] > now_s:
            return
        del kind[first]
