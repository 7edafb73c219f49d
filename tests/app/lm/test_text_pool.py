"""Threads that turn requests into tokens: who gets one, and who waits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from headwater_server.errors import BadRequest, QueueFull
from headwater_server.lm.text_pool import MAX_WAITING_BYTES, SHORT_BYTES, TextPool
from tests.app.lm.stand_in import until

LONG = SHORT_BYTES + 1


class Works:
    """Work that ends when it may, and the names of the pieces of it that have begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end: dict[str, threading.Event] = {}

    def make(self, name: str) -> Callable[[], str]:
        may_end = self._may_end[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert may_end.wait(60)
            return name

        return work

    def end(self, *names: str) -> None:
        for name in names or self._may_end:
            self._may_end[name].set()


def start(pool: TextPool, works: Works, name: str, owner: str, size: int = LONG) -> asyncio.Task[str]:
    return asyncio.get_running_loop().create_task(pool.run(works.make(name), owner, size))


def kept(pool: TextPool) -> tuple[object, object]:
    # private: a client who left and is still in a table is noticed by nobody
    return pool._long._waiting, pool._long._waiting_bytes


async def test_long_prompts_of_one_client_delay_neither_others_nor_short_prompts() -> None:
    pool, works = TextPool(2), Works()
    tasks = [start(pool, works, f"a{n}", "a") for n in range(7)]
    await until(lambda: works.begun == ["a0"])
    tasks.append(start(pool, works, "b0", "b"))
    await until(lambda: works.begun == ["a0", "b0"])
    assert await pool.run(lambda: "short", "a", SHORT_BYTES) == "short"
    works.end()
    assert await asyncio.gather(*tasks) == [f"a{n}" for n in range(7)] + ["b0"]


async def test_clients_take_turns() -> None:
    pool, works = TextPool(2), Works()
    tasks = [start(pool, works, f"{owner}{n}", owner) for owner in "xy" for n in range(1)]
    await until(lambda: len(works.begun) == 2)
    tasks += [start(pool, works, f"{owner}{n}", owner) for owner in "abc" for n in range(2)]
    await asyncio.sleep(0)  # they wait now
    works.end()
    await asyncio.gather(*tasks)
    first = [works.begun.index(name) for name in ("a0", "b0", "c0")]
    assert max(first) < min(works.begun.index(name) for name in ("a1", "b1", "c1")) + 1


async def test_what_nobody_waits_for_any_more_is_not_done() -> None:
    pool, works = TextPool(2), Works()
    first, second, third = (start(pool, works, f"a{n}", "a") for n in range(3))
    await until(lambda: works.begun == ["a0"])
    second.cancel()
    first.cancel()
    works.end()
    assert await third == "a2"
    assert works.begun == ["a0", "a2"]
    assert kept(pool) == ({}, {})


async def test_nothing_is_kept_of_a_client_that_left_before_its_turn() -> None:
    pool, works = TextPool(2), Works()
    first, second, third = (start(pool, works, owner, owner) for owner in "abc")
    await until(lambda: works.begun == ["a", "b"])
    third.cancel()
    works.end("a", "b")
    assert [await first, await second] == ["a", "b"]
    assert works.begun == ["a", "b"]
    assert kept(pool) == ({}, {})


async def test_errors_come_through() -> None:
    def fail() -> None:
        raise BadRequest("wrong")

    with pytest.raises(BadRequest, match="wrong"):
        await TextPool(2).run(fail, "a", 1)


async def test_nothing_is_kept_of_work_that_failed() -> None:
    class Text(str):
        """A client's."""

    async def refuse(pool: TextPool) -> weakref.ref[Text]:
        text = Text("long")

        def fail() -> None:
            raise BadRequest(f"wrong: {text}")

        with contextlib.suppress(BadRequest):
            await pool.run(fail, "a", 1)
        return weakref.ref(text)

    gc.disable()
    try:
        text = await refuse(TextPool(1))
        await until(lambda: text() is None)  # the thread lets go of it after the answer
    finally:
        gc.enable()


async def test_a_client_whose_requests_wait_in_masses_is_told_to_come_back() -> None:
    pool, works = TextPool(2), Works()
    tasks = [start(pool, works, "a0", "a"), start(pool, works, "a1", "a", MAX_WAITING_BYTES)]
    await until(lambda: works.begun == ["a0"])
    with pytest.raises(QueueFull, match="expected at most 67108864 bytes of your requests to wait") as caught:
        await pool.run(works.make("a2"), "a", LONG)
    assert caught.value.retry_after_s
    tasks.append(start(pool, works, "b0", "b"))
    await until(lambda: "b0" in works.begun)
    works.end()
    await asyncio.gather(*tasks)
