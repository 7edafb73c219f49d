"""Requests whose replica was lost: each is retried alone, so that one that ends replicas is known and refused."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from app.codecs.tensors import InferRequest
from app.dispatch.pending import Part
from app.dispatch.pool import ReplicaCalls
from app.dispatch.queue import Item
from app.errors import RETRY_AFTER_LOST_S, Quarantined, QueueFull, ReplicaLost
from app.telemetry.recorder import DeploymentMeter

__all__ = ["LIMIT", "Losses", "Quarantine", "Retries", "fingerprint"]


LIMIT: Final = 1024
"""So many of each kind are remembered."""

FINGERPRINT_BYTES: Final = 16


def fingerprint(request: InferRequest) -> bytes:
    """What two requests have in common if a model computes the same for both: inputs, parameters and wanted heads."""
    parameters = (sorted(request.batch_parameters.items()), sorted(request.row_parameters.items()))
    digest = hashlib.blake2b(msgspec.json.encode((parameters, request.heads)), digest_size=FINGERPRINT_BYTES)
    for name, tensor in sorted(request.inputs.items()):
        # With their lengths, so that no two tensors can be cut otherwise and be the same.
        digest.update(msgspec.json.encode((name, tensor.datatype, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()


class Quarantine:
    """Of one deployment, by fingerprint. No clock of its own.

    A request is suspected once a replica was lost while it had it, perhaps with others; it should be computed alone. It
    is refused once another was lost while it was alone there.

    Args:
        for_s: how long either is remembered; 0: not at all.
    """

    def __init__(self, for_s: float) -> None:
        self.for_s = for_s
        self._suspected: dict[bytes, float] = {}
        """Until when; the first end first."""
        self._refused: dict[bytes, float] = {}

    def __len__(self) -> int:
        """How many it knows of; while there are none, nobody needs a fingerprint."""
        return len(self._suspected) + len(self._refused)

    def suspect(self, mark: bytes, now_s: float) -> None:
        """A replica was lost with it."""
        self._note(self._suspected, mark, now_s)

    def refuse(self, mark: bytes, now_s: float) -> None:
        """Two were."""
        self._suspected.pop(mark, None)
        self._note(self._refused, mark, now_s)

    def clear(self, mark: bytes) -> None:
        """It was answered: what it was suspected of, another did."""
        self._suspected.pop(mark, None)

    def lift(self) -> None:
        """Forget all: another model is served, or the same one anew."""
        self._suspected.clear()
        self._refused.clear()

    def is_suspected(self, mark: bytes, now_s: float) -> bool:
        """Whether it should be computed alone."""
        _drop_old(self._suspected, now_s)
        return mark in self._suspected

    def refused_s(self, mark: bytes, now_s: float) -> float:
        """For how long it is still refused; 0 if it isn't."""
        _drop_old(self._refused, now_s)
        return self._refused[mark] - now_s if mark in self._refused else 0.0

    def _note(self, kind: dict[bytes, float], mark: bytes, now_s: float) -> None:
        if not self.for_s:
            return
        _drop_old(kind, now_s)
        kind.pop(mark, None)
        kind[mark] = now_s + self.for_s
        if len(kind) > LIMIT:
            del kind[next(iter(kind))]


def _drop_old(kind: dict[bytes, float], now_s: float) -> None:
    while kind:
        first = next(iter(kind))
        if kind[first] > now_s:
            return
        del kind[first]


class Retries:
    """Those of one deployment.

    One replica at a time is set aside for them. It has one call at a time, and batches of others have every second turn
    there, so that neither waits for the other's end.
    """

    def __init__(self) -> None:
        self._waiting: deque[Item] = deque()
        self.aside: ReplicaCalls | None = None
        """The replica that is set aside."""
        self._is_alone = False
        """Whether the replica computes one of them now."""
        self._is_others_turn = False

    def __bool__(self) -> bool:
        """Whether one waits, or a replica is set aside."""
        return bool(self._waiting) or self.aside is not None

    @property
    def rows(self) -> int:
        """Rows waiting."""
        return sum(item.rows for item in self._waiting if not _is_settled(item))

    def push(self, item: Item) -> None:
        """Add one; it was taken from the queue, and doesn't go back there."""
        _part(item).waits = True
        self._waiting.append(item)

    def push_back(self, items: list[Item]) -> None:
        """Put back what `next` gave and no replica has had: `next` gives these before any other."""
        for item in items:
            _part(item).waits = True
        self._waiting.extendleft(reversed(items))

    def remove(self, item: Item) -> None:
        """Take one out that waits, because nobody wants it any more."""
        self._waiting.remove(item)
        _part(item).waits = False

    def drain(self) -> list[Item]:
        """Take out everything."""
        items = list(self._waiting)
        self._waiting.clear()
        for item in items:
            _part(item).waits = False
        return items

    def next(self, replicas: Iterable[ReplicaCalls], *, has_others: bool) -> tuple[ReplicaCalls, Item] | None:
        """What is to be computed now, and where. Sets a replica aside if there is none.

        Args:
            replicas: all.
            has_others: whether other rows wait.
        """
        while self._waiting and _is_settled(self._waiting[0]):
            _part(self._waiting.popleft()).waits = False
        if self.aside is not None and not self.aside.is_eligible:
            self._release()
        if not self._waiting:
            if not self._is_alone:
                self._release()
            return None
        if self.aside is None or (self.aside.calls and not self._is_alone):
            eligible = [one for one in replicas if one.is_eligible]
            best = min(eligible, key=lambda one: (one.calls, one.rows), default=None)
            # Not for less than an idle one: it may be long until a busy one is.
            if best is not None and (self.aside is None or not best.calls):
                self._release()
                self.aside = best
        if self.aside is None or self.aside.calls or (self._is_others_turn and has_others):
            return None
        item = self._waiting.popleft()
        _part(item).waits = False
        self._is_alone = True
        return self.aside, item

    def admits(self, replica: ReplicaCalls) -> bool:
        """Whether a replica may have a batch of others now."""
        return replica is not self.aside or (self._is_others_turn and not replica.calls)

    def note_batch(self, replica: ReplicaCalls) -> None:
        """A replica gets a batch of others."""
        if replica is self.aside:
            self._is_others_turn = False

    def note_end(self, replica: ReplicaCalls) -> None:
        """A call of a replica has ended, and is counted so."""
        if replica is not self.aside:
            return
        self._is_others_turn = self._is_alone
        self._is_alone = False
        if not self._waiting:
            self._release()

    def _release(self) -> None:
        self.aside = None
        self._is_alone = False
        self._is_others_turn = False


def _part(item: Item) -> Part:
    part: Part = item.payload
    return part


def _is_settled(item: Item) -> bool:
    """Whether nobody waits for it any more."""
    return _part(item).pending.collector.is_done


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

    def take(self, part: Part, error: ReplicaLost, *, has_eligible: bool) -> None:
        """A replica was lost with these rows. Another may have those heads that have not answered, once and alone.

        Args:
            part: the rows.
            error: what they fail with, if they do.
            has_eligible: whether there is another replica.
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
        if not has_eligible or not pending.signature.idempotent:
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
