"""Hooks of a model that are coroutines: awaited in one loop, and what they raise is raised."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from headwater.model import Model
from headwater.runtime.call_loop import CallLoop


class Noted(Model):
    """A model that notes where its hooks ran."""

    def __init__(self, ran: list[Any]) -> None:
        self.ran = ran


class Awaited(Noted):
    async def load(self, device: str) -> None:
        await asyncio.sleep(0)
        self.ran.append((device, asyncio.get_running_loop()))

    async def unload(self) -> None:
        await asyncio.sleep(0)
        self.ran.append(asyncio.get_running_loop())


class Plain(Noted):
    def load(self, device: str) -> None:
        self.ran.append((device, threading.current_thread()))

    def unload(self) -> None:
        self.ran.append(threading.current_thread())


class Failing(Noted):
    def __init__(self, ran: list[Any], error: BaseException) -> None:
        super().__init__(ran)
        self.error = error

    async def load(self, device: str) -> None:
        raise self.error

    async def unload(self) -> None:
        self.ran.append("failing")
        raise self.error


async def running() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_a_coroutine_is_awaited_where_calls_run_and_anything_else_runs_here() -> None:
    loop, ran = CallLoop(), list[Any]()
    here = threading.current_thread()
    models = [Plain(ran), Awaited(ran)]
    for model in models:
        loop.load(model, "cpu")
    theirs = loop.wait(running())
    assert ran == [("cpu", here), ("cpu", theirs)]
    loop.unload(models)
    assert ran[2:] == [theirs, here]  # the last one first


@pytest.mark.parametrize("error", [ValueError("on purpose"), SystemExit(3), asyncio.CancelledError()], ids=repr)
def test_what_a_hook_raises_is_raised_and_the_loop_goes_on(error: BaseException) -> None:
    loop, ran = CallLoop(), list[Any]()
    with pytest.raises(type(error)) as caught:
        loop.load(Failing(ran, error), "cpu")
    assert caught.value is error
    loop.load(Awaited(ran), "cpu")
    assert len(ran) == 1


def test_all_are_unloaded_even_if_one_raises() -> None:
    loop, ran = CallLoop(), list[Any]()
    with pytest.raises(ValueError, match="on purpose"):
        loop.unload([Awaited(ran), Failing(ran, ValueError("on purpose"))])
    assert ran == ["failing", loop.wait(running())]
