"""Replicas that were lost with one API key's requests: they count against that key, not against the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

__all__ = ["KeyLosses"]

REPLICAS: Final = 1024
"""Of so many lost replicas it is remembered whose requests they had."""


class KeyLosses:
    """Decides for one deployment which key a lost replica counts against, and which keys have lost too many.

    It has no clock of its own; times are in seconds, on any one clock.

    Args:
        window_s: how long a loss counts.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._had: dict[str, set[str]] = {}
        """By replica: the keys whose requests it had when it was lost, "" for a request without a key."""
        self._losses: dict[str, list[float]] = {}
        """When replicas were lost that count against a key."""

    def note(self, replica: str, keys: Iterable[str]) -> None:
        """A gateway worker lost a replica while it had requests of these keys."""
        self._had.setdefault(replica, set()).update(keys)
        if len(self._had) > REPLICAS:
            del self._had[next(iter(self._had))]

    def convict(self, replicas: Collection[str], key: str) -> None:
        """These replicas were lost with a request of the key, of which the last computed nothing else."""
        for replica in replicas:
            self._had[replica] = {key}

    def charge(self, replica: str, now_s: float) -> str:
        """Count a replica that has ended against the key whose requests alone it had. Returns that key; empty: it
        had requests of several keys, of none, or without a key."""
        keys = self._had.get(replica, set())
        if len(keys) != 1 or "" in keys:
            return ""
        (key,) = keys
        self._losses.setdefault(key, []).append(now_s)
        return key

    def barred(self, limit: int, now_s: float) -> dict[str, float]:
        """The keys with at least so many losses within the window, and until when each has."""
        found: dict[str, float] = {}
        for key, losses in list(self._losses.items()):
            recent = self._losses[key] = [at_s for at_s in losses if at_s > now_s - self._window_s]
            if not recent:
                del self._losses[key]
            elif len(recent) >= limit:
                found[key] = recent[-limit] + self._window_s
        return found

    def lift(self) -> None:
        """Forget all losses, because the model was reloaded."""
        self._losses.clear()
