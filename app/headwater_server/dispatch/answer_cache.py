"""A gateway worker's cache of a deployment's answers, by request; the least recently used answers are evicted first."""

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
"""`ENTRY_BYTES` bounds the memory of an entry without its tensors, `TENSOR_BYTES` that of a tensor without its data."""


class _KeptAnswer(NamedTuple):
    outputs: Outputs
    size_bytes: int
    ends_s: float
    """Monotonic time from which the answer isn't used any more; infinite without ``ttl_s``."""


class AnswerCache:
    """Keeps answers up to a number of bytes.

    Args:
        share: the worker's share of the deployment's cache.
        meter: counts evictions.
    """

    def __init__(self, share: CacheShare, meter: CacheMeter) -> None:
        self.size_bytes = 0
        """Bytes of all entries, an upper bound of their bookkeeping included."""
        self._share = share
        self._meter = meter
        self._entries: OrderedDict[bytes, _KeptAnswer] = OrderedDict()
        """Entries by key, the least recently used first."""
        self._secret = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def limit(self, share: CacheShare) -> None:
        """Adopt another share: evict answers that no longer fit, or all answers if ``per_key`` changes. Kept answers
        keep their ``ttl_s``."""
        if share.per_key != self._share.per_key:
            self.clear()
        self._share = share
        self._evict()

    def key(self, request: InferRequest) -> bytes:
        """A digest of everything that a request's answer depends on; takes about 1 ms for each MiB of inputs.

        The digest has a secret key: a client that could make two requests with the same digest could read another
        client's answer.
        """
        inputs = sorted(request.inputs.items())
        head = repr((
            request.owner if self._share.per_key else "",
            request.rows,
            request.heads,
            sorted(output.name for output in request.outputs),
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
        """The outputs that are kept under a key; None if no outputs are kept, or they have expired. The caller must not
        change them."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.ends_s < time.monotonic():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.outputs

    def put(self, key: bytes, outputs: Outputs) -> None:
        """Keep outputs, unless they are larger than the whole cache. Data in a memoryview is copied, since it may be
        part of a larger piece of memory. Outputs that were kept under the key before are dropped."""
        self._drop(key)
        size_bytes = ENTRY_BYTES + sum(
            [TENSOR_BYTES + len(name) + len(tensor.data) for name, tensor in outputs.items()]
        )
        if size_bytes > self._share.max_bytes:
            return
        kept = {name: RawTensor(tensor.datatype, tensor.shape, bytes(tensor.data)) for name, tensor in outputs.items()}
        ends_s = time.monotonic() + self._share.ttl_s if self._share.ttl_s else float("inf")
        self._entries[key] = _KeptAnswer(kept, size_bytes, ends_s)
        self.size_bytes += size_bytes
        self._evict()

    def clear(self) -> None:
        """Remove all entries."""
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
