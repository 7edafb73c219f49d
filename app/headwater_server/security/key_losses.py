"""Counts replicas that were lost with requests of a single API key against that key, and not against the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

__all__ = ["KeyLosses"]

REPLICAS: Final = 1024
"""The most lost replicas of a deployment for which the keys of their requests are remembered; the oldest replica is
forgotten first."""


class KeyLosses:
    """Decides for one deployment which key a lost replica counts against, and which keys have lost too many replicas.

    Callers pass the present time in seconds, always from the same clock.

    Args:
        window_s: seconds for which a loss counts.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._had: dict[str, set[str]] = {}
        """By lost replica, the keys of its requests ("" for a request without a key), or only the convicted key."""
        self._convicted: set[str] = set()
        """The lost replicas in ``_had`` that count against a convicted key."""
        self._losses: dict[str, list[float]] = {}
        """By key, the times of the losses that count against the key."""

    def note(self, replica: str, keys: Iterable[str]) -> None:
        """Note that a gateway worker lost a replica while the replica had requests of these keys."""
        if replica not in self._convicted:  # another worker may report the loss after the conviction
            self._had.setdefault(replica, set()).update(keys)
            self._forget_oldest()

    def convict(self, replicas: Collection[str], key: str) -> None:
        """Note that these replicas were lost with the same request of this key, and that the latest of them computed
        nothing else. Their losses count against this key only, whichever keys are noted before
        or afterwards."""
        for replica in replicas:
            self._had[replica] = {key}
            self._convicted.add(replica)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        if len(self._had) > REPLICAS:
            oldest = next(iter(self._had))
            del self._had[oldest]
            self._convicted.discard(oldest)

    def charge(self, replica: str, now_s: float) -> str:
        """Count a replica that has ended against a key, if all its requests were of that key. Returns the key; empty if
        the replica had requests of several keys, a request without a key, or no requests."""
        keys = self._had.get(replica, set())
        if len(keys) != 1 or "" in keys:
            return ""
        (key,) = keys
        self._losses.setdefault(key, []).append(now_s)
        return key

    def barred(self, limit: int, now_s: float) -> dict[str, float]:
        """The keys with at least ``limit`` losses within the window, each with the time until which that holds."""
        until_s: dict[str, float] = {}
        for key, losses in list(self._losses.items()):
            recent = self._losses[key] = [at_s for at_s in losses if at_s > now_s - self._window_s]
            if not recent:
                del self._losses[key]
            elif len(recent) >= limit:
                until_s[key] = recent[-limit] + self._window_s
        return until_s

    def lift(self) -> None:
        """Forget all losses that count against keys, because the model was reloaded."""
        self._losses.clear()
