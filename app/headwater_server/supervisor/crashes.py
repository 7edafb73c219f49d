"""Losses of a deployment's serving replicas: which of them count against the model, and which against an API key."""

from __future__ import annotations

import asyncio
import logging
import time

from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import CRASH_WINDOW_S
from headwater_server.security.key_losses import KeyLosses
from headwater_server.supervisor.child_processes import ChildProcesses

__all__ = ["Crashes"]

logger = logging.getLogger("headwater")


class Crashes:
    """The recent losses of a deployment.

    Args:
        name: the deployment's name.
        children: publishes a change of the barred keys.
    """

    def __init__(self, name: str, children: ChildProcesses) -> None:
        self._name = name
        self._children = children
        self._times_s: dict[str, float] = {}
        """The time of each loss that counts against no API key, by replica id."""
        self._key_losses = KeyLosses(CRASH_WINDOW_S)

    def note(self, loss: ReplicaLoss, limit: int) -> None:
        """Note which API keys' requests a lost replica had, or which key a later report convicts, for `count`. The
        replica may have ended already. ``limit`` is the deployment's ``max_crashes``."""
        if loss.convicted:
            self._key_losses.convict([loss.replica, loss.earlier], loss.convicted)
            if loss.earlier in self._times_s:  # the key was not known at that loss
                self._charge(loss.earlier, self._times_s.pop(loss.earlier), limit)
        elif loss.times == 1:  # repeated reports only confirm the first
            self._key_losses.note(loss.replica, loss.keys)

    def count(self, replica: str, limit: int) -> int:
        """Count a replica that served and has ended. Returns the number of losses within `CRASH_WINDOW_S` that count
        against the model, with this loss; 0: this loss counts against an API key."""
        now_s = time.monotonic()
        if self._charge(replica, now_s, limit):
            self._children.on_change()
            return 0
        recent = {id: at_s for id, at_s in self._times_s.items() if at_s >= now_s - CRASH_WINDOW_S}
        self._times_s = {**recent, replica: now_s}
        return len(self._times_s)

    def barred(self, limit: int) -> dict[str, float]:
        """See `headwater_server.control.routing.DeploymentRoute.barred`."""
        now_s, epoch_s = time.monotonic(), time.time()
        barred = self._key_losses.barred(limit, now_s)
        return {key: epoch_s + until_s - now_s for key, until_s in barred.items()}

    def forget(self) -> None:
        """Forget all losses, because the model was loaded or reloaded."""
        self._times_s.clear()
        self._key_losses.lift()

    def _charge(self, replica: str, at_s: float, limit: int) -> bool:
        """Count a lost replica against the API key of its requests. Returns False if its requests did not all have the
        same key, or it had no requests: it then counts against the model."""
        if not (key := self._key_losses.charge(replica, at_s)):
            return False
        barred = self.barred(limit)
        if key in barred:
            text = "%s: requests of the API key `%s` ended %d replicas within %g s, and are refused for now"
            logger.error(text, self._name, key, limit, CRASH_WINDOW_S)
            asyncio.get_running_loop().call_later(barred[key] - time.time(), self._children.on_change)
        return True
