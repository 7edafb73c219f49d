"""What becomes of requests that a replica was lost with: they are computed once more, alone, or refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from app.errors import Quarantined, QueueFull, ReplicaLost
from app.metrics.recorder import DeploymentMeter
from app.pending import Part
from app.quarantine import Quarantine, fingerprint
from app.retries import Retries
from app.row_errors import RETRY_AFTER_LOST_S
from app.tensors import InferRequest

__all__ = ["Losses"]

logger = logging.getLogger("headwater.dispatch")

RETRY_AFTER_TWICE_S: Final = 60


class Losses:
    """Those of one deployment.

    Args:
        name: the deployment's.
        meter: where to count.
        on_quarantined: called with the fingerprint of a request that took two replicas down.
    """

    def __init__(self, name: str, meter: DeploymentMeter, on_quarantined: Callable[[bytes], None]) -> None:
        self._name = name
        self._meter = meter
        self._on_quarantined = on_quarantined
        self._loop = asyncio.get_running_loop()
        self.retries = Retries()
        self.quarantine = Quarantine(0)

    def take(self, part: Part, error: ReplicaLost, *, has_able: bool) -> None:
        """A replica was lost with these rows. Another may have those heads that have not answered, once and alone.

        Args:
            part: the rows.
            error: what they fail with, if they do.
            has_able: whether there is another replica.
        """
        pending = part.pending
        if pending.collector.is_done or part.awaited.isdisjoint(pending.collector.undecided):
            return
        if pending.signature.streams:
            part.fail(error)
            return
        part.losses += 1
        if not pending.fingerprint:
            pending.fingerprint = fingerprint(pending.request)
        now_s = self._loop.time()
        if part.losses > 1:
            self.quarantine.refuse(pending.fingerprint, now_s)
            self._meter.quarantined.add()
            self._on_quarantined(pending.fingerprint)
            logger.warning("model %s: a request took two replicas down: it is not tried again", self._name)
            text = f"model `{self._name}`: the request took two replicas down, and is not tried again"
            part.fail(ReplicaLost(text, retry_after_s=RETRY_AFTER_TWICE_S))
            return
        self.quarantine.suspect(pending.fingerprint, now_s)
        if not has_able or not pending.signature.idempotent:
            part.fail(error)
            return
        self._meter.retries.add()
        self.retries.push(pending.items[part.index])

    def examine(self, request: InferRequest, most_rows: int) -> bytes:
        """A request's fingerprint, if it must be computed alone; otherwise empty.

        Args:
            request: a new one.
            most_rows: that may wait to be computed alone.

        Raises:
            Quarantined: the same took two replicas down.
            QueueFull: too many wait to be computed alone.
        """
        mark = fingerprint(request)
        now_s = self._loop.time()
        left_s = self.quarantine.refused_s(mark, now_s)
        if left_s:
            raise Quarantined(
                f"model `{self._name}`: the same request took two replicas down, and is refused for another "
                f"{left_s:.0f} s; to lift that, reload the model",
                retry_after_s=int(left_s) + 1,
            )
        if not self.quarantine.is_suspected(mark, now_s):
            return b""
        if self.retries.rows + request.rows > most_rows:
            raise QueueFull(f"model `{self._name}`: too many requests wait to be computed alone", retry_after_s=1)
        return mark

    def refuse(self, mark: bytes) -> None:
        """Another worker saw a request with this fingerprint take two replicas down."""
        self.quarantine.refuse(mark, self._loop.time())

    def fail_waiting(self) -> None:
        """There is no replica any more for what waits to be computed again."""
        for item in self.retries.drain():
            item.payload.fail(
                ReplicaLost("the replica ended while it had the request", retry_after_s=RETRY_AFTER_LOST_S)
            )
