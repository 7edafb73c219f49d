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
MAX_KNOWN: Final = 50_000
"""Number of prefixes remembered; the least recently used prefix is forgotten first."""


class PrefixAffinity:
    """Remembers which replica computed which prefixes of prompts."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, prompt: bytes, least: str, requests: Callable[[str], int | None], factor: float) -> str:
        """Choose the replica for a prompt, and remember that this replica computes it.

        Args:
            prompt: the prompt's text.
            least: the least busy replica's id.
            requests: returns the number of requests in flight on the replica with this id; `None` if the replica can't
                take another request.
            factor: a replica is chosen for its prefix only while it has at most this many times the requests of the
                least busy replica.
        """
        beginnings = _beginnings(prompt)
        most = factor * max(requests(least) or 0, 1)
        chosen = least
        for one in reversed(beginnings):
            had = self._replicas.get(one)
            if had is not None and (count := requests(had)) is not None:
                chosen = had if count <= most else least
                break
        for one in beginnings:
            self._replicas[one] = chosen
            self._replicas.move_to_end(one)
        while len(self._replicas) > MAX_KNOWN:
            self._replicas.popitem(last=False)
        return chosen


def _beginnings(prompt: bytes) -> list[bytes]:
    """The digest of each prefix of a prompt, shortest first."""
    digest = blake2b(digest_size=16)
    found = []
    for start in range(0, min(len(prompt), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(prompt[start : start + BLOCK_BYTES])
        found.append(digest.copy().digest())
    return found
