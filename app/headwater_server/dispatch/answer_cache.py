"""Answers that a gateway worker keeps of one deployment, by what was asked: the least recently used go first."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from typing import Final, NamedTuple

from headwater_server.codecs.tensors import InferRequest, Outputs, RawTensor
from headwater_server.control.routing import CacheShare
from headwater_server.telemetry.recorder import CacheMeter

__all__ = ["AnswerCache"]

ENTRY_BYTES: Final = 1024
TENSOR_BYTES: Final = 512
"""What Python takes for an entry without its tensors, and for a tensor without its data: at most so much."""


class _Entry(NamedTuple):
    outputs: Outputs
    size_bytes: int
    ends_s: float


class AnswerCache:
    """Keeps answers within a number of bytes.

    Args:
        share: the worker's share of what the deployment may keep.
        meter: counts evictions.
    """

    def __init__(self, share: CacheShare, meter: CacheMeter) -> None:
        self.size_bytes = 0
        """Of all entries, bookkeeping included."""
        self._share = share
        self._meter = meter
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """The least recently used first."""
        self._secret = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def limit(self, share: CacheShare) -> None:
        """Adopt another share."""
        if share.per_key != self._share.per_key:
            self.clear()
        self._share = share
        self._evict()

    def key(self, request: InferRequest) -> bytes:
        """What stands for all that a request's answer depends on; 1 ms or so for each MiB of its inputs.

        A digest with a secret key: whoever could make two requests with the same one would read another's answer.
        """
        inputs = sorted(request.inputs.items())
        head = repr((
            request.owner if self._share.per_key else "",
            request.rows,
            request.heads,
            sorted(wish.name for wish in request.outputs),
            sorted(request.batch_parameters.items()),
            sorted(request.row_parameters.items()),
            [(name, tensor.datatype, tensor.shape, len(tensor.data)) for name, tensor in inputs],
        )).encode()  # fmt: skip
        digest = hashlib.blake2b(b"%d:" % len(head), digest_size=32, key=self._secret)
        digest.update(head)
        for _, tensor in inputs:
            digest.update(tensor.data)
        return digest.digest()

    def get(self, key: bytes) -> Outputs | None:
        """The outputs that are kept under a key, if any; they must not be changed."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.ends_s < time.monotonic():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.outputs

    def put(self, key: bytes, outputs: Outputs) -> None:
        """Keep outputs, unless they are larger than all that may be kept. Their data is copied if it is part of a
        larger piece of memory."""
        self._drop(key)
        size_bytes = ENTRY_BYTES + sum([TENSOR_BYTES + len(name) + len(one.data) for name, one in outputs.items()])
        if size_bytes > self._share.max_bytes:
            return
        kept = {name: RawTensor(one.datatype, one.shape, bytes(one.data)) for name, one in outputs.items()}
        ends_s = time.monotonic() + self._share.ttl_s if self._share.ttl_s else float("inf")
        self._entries[key] = _Entry(kept, size_bytes, ends_s)
        self.size_bytes += size_bytes
        self._evict()

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.size_bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry.size_bytes

    def _evict(self) -> None:
        while self.size_bytes > self._share.max_bytes:
            _, entry = self._entries.popitem(last=False)
            self.size_bytes -= entry.size_bytes
            self._meter.evictions.add()
