"""When a deadline has passed that was moved before."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref

import pytest

from headwater_server.deadline_timer import TIMER_RESOLUTION_S, DeadlineTimer

LONG_S = 60.0


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


class Owner:
    """Has a deadline, and notes when it has passed."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self.loop = asyncio.get_running_loop()
        self.expired_s: asyncio.Future[float] = self.loop.create_future()
        self.timer = DeadlineTimer(lambda: self.deadline_s, self._expire)
        self.move(limit_s)

    def move(self, limit_s: float) -> None:
        self.deadline_s = self.loop.time() + limit_s

    def _expire(self) -> None:
        self.expired_s.set_result(self.loop.time())

    async def expiry(self) -> float:
        """Seconds from the deadline to the call, which must come."""
        return await asyncio.wait_for(self.expired_s, 20) - self.deadline_s


async def pause(delay_s: float) -> None:
    """Let timers of so many seconds fire first."""
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(delay_s, later.set_result, None)
    await later


@pytest.mark.parametrize("limit_s", [-1, 0, 0.0004, 0.0107])
async def test_it_calls_once_the_deadline_has_passed(limit_s: float) -> None:
    owner = Owner(limit_s)
    owner.timer.start()
    owner.timer.start()
    assert await owner.expiry() >= -TIMER_RESOLUTION_S


async def test_a_later_deadline_is_waited_for_without_a_start() -> None:
    owner = Owner(0.005)
    owner.timer.start()
    owner.move(0.02)
    assert await owner.expiry() >= -TIMER_RESOLUTION_S


async def test_an_earlier_deadline_counts_from_a_start() -> None:
    owner = Owner(LONG_S)
    owner.timer.start()
    owner.move(0.005)
    owner.timer.start()
    assert await owner.expiry() >= -TIMER_RESOLUTION_S


async def test_without_a_deadline_it_stops_until_it_is_started() -> None:
    owner = Owner(0.002)
    owner.timer.start()
    owner.move(math.inf)
    await pause(0.01)
    owner.move(0.001)
    await pause(0.01)
    assert not owner.expired_s.done()
    owner.timer.start()
    await owner.expiry()
    owner.expired_s = owner.loop.create_future()
    owner.timer.start()  # after it has expired
    await owner.expiry()


async def test_once_cancelled_it_neither_calls_nor_keeps_its_owner() -> None:
    owner = Owner(0.001)
    owner.timer.start()
    timer, expired_s, gone = owner.timer, owner.expired_s, weakref.ref(owner)
    timer.cancel()
    timer.start()
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    await pause(0.01)
    assert not expired_s.done()
