"""Which replica a request goes to: the least busy one, or the one that has computed its prompt's beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

__all__ = ["PrefixAffinity"]

BLOCK_BYTES: Final = 512
"""Prompts are compared in steps of this size."""
MAX_BLOCKS: Final = 64
MAX_KNOWN: Final = 50_000
"""Beginnings that are remembered; the one that was asked for longest ago is forgotten first."""


class PrefixAffinity:
    """Remembers which replica had which beginnings of prompts."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, prompt: bytes, requests: Mapping[str, int], factor: float) -> str:
        """The replica for a prompt, which is remembered as that replica's.

        Args:
            prompt: the prompt's text.
            requests: how many each replica has under way, by id; at least one.
            factor: how many times the requests of the least busy replica another may have; 0: the least busy one.
        """
        least = min(requests, key=requests.__getitem__)
        if not factor or len(requests) == 1:
            return least
        beginnings = _beginnings(prompt)
        most = factor * max(requests[least], 1)
        chosen = least
        for one in reversed(beginnings):
            had = self._replicas.get(one)
            if had is not None and had in requests:
                chosen = had if requests[had] <= most else least
                break
        for one in beginnings:
            self._replicas[one] = chosen
            self._replicas.move_to_end(one)
        while len(self._replicas) > MAX_KNOWN:
            self._replicas.popitem(last=False)
        return chosen


def _beginnings(prompt: bytes) -> list[bytes]:
    """The digest of each beginning of a prompt, shortest first."""
    digest = blake2b(digest_size=16)
    found = []
    for start in range(0, min(len(prompt), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(prompt[start : start + BLOCK_BYTES])
        found.append(digest.copy().digest())
    return found
