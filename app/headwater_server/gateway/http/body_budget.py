"""The memory budget of bodies: the bytes that all requests of a worker may hold together while their bodies are read,
unpacked, decoded and answered."""

from __future__ import annotations

import threading
from typing import Final

from starlette.types import Scope

from headwater_server.errors import BodyTooLarge, ClientGone, Unavailable

__all__ = ["ALL_BODIES_BYTES", "BodyBudget", "BodyLease", "release_body", "take_for_objects"]

ALL_BODIES_BYTES: Final = 1024 * 1024 * 1024
"""The budget of all workers of a server together, in bytes. A worker's budget is an equal share, but at least twice
``server.max_body_bytes``."""
SMALL_BYTES: Final = 256 * 1024
"""Requests that hold at most this many bytes may use the whole budget, and requests that hold more three quarters of
it, so that large bodies never block the small bodies of ordinary requests."""
RETRY_AFTER_S: Final = 2
"""The ``Retry-After`` in seconds while the budget is used up."""


class BodyBudget:
    """Counts the bytes of bodies, over all requests of this process. Any thread may use it.

    Args:
        limit: the budget in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that are in use."""
        return self._used

    def take(self, size: int, held: int) -> bool:
        """Take ``size`` bytes for a request that already holds ``held`` bytes. Returns False, and takes no bytes, if
        the budget hasn't as many left."""
        limit = self.limit if held + size <= SMALL_BYTES else self.limit - self.limit // 4
        with self._lock:
            if self._used + size > limit:
                return False
            self._used += size
            return True

    def give_back(self, size: int) -> None:
        """Give back bytes."""
        with self._lock:
            self._used -= size


class BodyLease:
    """A request's share of the budget, until `release`. Any thread may use it.

    Args:
        budget: the budget of all requests.
        max_bytes: the limit of a body, and of its unpacked content.
    """

    def __init__(self, budget: BodyBudget, max_bytes: int) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._held = 0
        self._is_over = False
        self._lock = threading.Lock()

    def take(self, size: int, total: int) -> None:
        """Take bytes before they are stored.

        Args:
            size: the number of bytes to take.
            total: the size of the same body, or of the same unpacked content, including these bytes.

        Raises:
            BodyTooLarge: the total is over the limit of a body.
            Unavailable: the bodies of all requests together are over the budget.
            ClientGone: the request has ended.
        """
        if total > self._max_bytes:
            raise BodyTooLarge(
                f"body: expected at most {self._max_bytes} bytes (server.max_body_bytes), got {total} or more"
            )
        self._take(size)

    def take_for_objects(self, size: int) -> None:
        """Take bytes for the objects that a body is decoded to, before it is decoded.

        A request is charged for half of the budget at most, so that the largest body can be decoded where workers have
        small shares. Since large bodies may use three quarters, at most a single request at a time uses more than its
        charge.

        Raises:
            Unavailable: the bodies of all requests together are over the budget.
            ClientGone: the request has ended.
        """
        self._take(max(min(size, self._budget.limit // 2 - self._held), 0))

    def _take(self, size: int) -> None:
        with self._lock:  # a thread may call this while the request ends
            if self._is_over:
                raise ClientGone("the request ended before its body was read")
            if not self._budget.take(size, self._held):
                raise Unavailable(
                    f"body: the bodies of all requests together may hold {self._budget.limit} bytes of memory here, "
                    "which are in use",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._held += size

    def release(self) -> None:
        """Give everything back; the lease can't be used afterwards."""
        with self._lock:
            self._is_over = True
            held, self._held = self._held, 0
        self._budget.give_back(held)


def take_for_objects(scope: Scope, size: int) -> None:
    """Charge a request for the objects that its body is decoded to; see `BodyLease.take_for_objects`."""
    lease: BodyLease | None = scope.get("state", {}).get("body")
    if lease is not None:
        lease.take_for_objects(size)


def release_body(scope: Scope) -> None:
    """Give back the share of the budget of a request that has ended."""
    lease: BodyLease | None = scope["state"].pop("body", None)
    if lease is not None:
        lease.release()
