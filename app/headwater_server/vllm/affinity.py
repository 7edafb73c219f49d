"""Chooses the replica for a request: the least busy replica, or a replica that has computed a prefix of the prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

__all__ = ["PrefixAffinity"]

BLOCK_BYTES: Final = 512
"""Bytes of a block. Prompts are compared block by block."""
MAX_BLOCKS: Final = 64
"""Maximum number of blocks of a prompt that are compared, from its beginning."""
MAX_KNOWN: Final = 50_000
"""Maximum number of prefixes remembered; the least recently used prefix is forgotten first."""


class PrefixAffinity:
    """Remembers which replica was chosen last for which prefixes of prompts."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, prompt: bytes, least_busy: str, requests: Callable[[str], int | None], factor: float) -> str:
        """Choose the replica for a prompt, and remember that this replica computes it.

        The choice is, of the replicas that can take another request, the replica with the longest known prefix; without
        a known prefix, or if that replica has too many requests, the least busy replica. Returns the replica's id.

        Args:
            prompt: the prompt's text, with everything else that must be equal for a shared prefix before it.
            least_busy: the least busy replica's id.
            requests: returns the number of requests in flight on the replica with this id; `None` if the replica can't
                take another request.
            factor: a replica is chosen for its prefix only while it has at most this many times the requests of the
                least busy replica, which count as at least 1.
        """
        beginnings = _beginnings(prompt)
        max_requests = factor * max(requests(least_busy) or 0, 1)
        chosen = least_busy
        for beginning in reversed(beginnings):
            replica = self._replicas.get(beginning)
            if replica is not None and (count := requests(replica)) is not None:
                chosen = replica if count <= max_requests else least_busy
                break
        for beginning in beginnings:
            self._replicas[beginning] = chosen
            self._replicas.move_to_end(beginning)
        while len(self._replicas) > MAX_KNOWN:
            self._replicas.popitem(last=False)
        return chosen


def _beginnings(prompt: bytes) -> list[bytes]:
    """The digest of each prefix of a prompt that consists of whole blocks, shortest first; at most `MAX_BLOCKS`."""
    digest = blake2b(digest_size=16)
    digests = []
    for start in range(0, min(len(prompt), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(prompt[start : start + BLOCK_BYTES])
        digests.append(digest.copy().digest())
    return digests
