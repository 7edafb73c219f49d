"""Which replica a request goes to: the least busy one, or the one that has computed its prompt's beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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

    def choose(self, prompt: bytes, least: str, requests: Callable[[str], int | None], factor: float) -> str:
        """The replica for a prompt, which is remembered as that replica's.

        Args:
            prompt: the prompt's text.
            least: the least busy replica's id.
            requests: how many a replica has under way, by id; None: it can't have another.
            factor: how many times the requests of the least busy replica another may have.
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
    """The digest of each beginning of a prompt, shortest first."""
    digest = blake2b(digest_size=16)
    found = []
    for start in range(0, min(len(prompt), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(prompt[start : start + BLOCK_BYTES])
        found.append(digest.copy().digest())
    return found
