"""Which losses count against the model, and which against an API key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headwater_server.control.messages import Drained, ReplicaLoss
from headwater_server.supervisor import crashes as crashes_module
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.crashes import Crashes
from headwater_server.supervisor.memory_budget import ReplicaMemory
from tests.app.serving import until

LIMIT = 2


def run(scenario: Callable[[Crashes, list[str]], None]) -> None:
    """Run a scenario with a deployment's losses, and a list that gets an entry for each change that is published."""

    async def drain(*_: object) -> Drained:
        return Drained()

    async def main() -> None:
        published: list[str] = []
        children = ChildProcesses(ReplicaMemory(), (), drain, lambda: published.append("change"))
        scenario(Crashes("m", children), published)

    asyncio.run(main())


def note(crashes: Crashes, id: str, **loss: Any) -> None:
    crashes.note(ReplicaLoss("m", id, **loss), LIMIT)


def test_a_loss_counts_against_the_key_of_all_its_requests_or_else_against_the_model() -> None:
    def scenario(crashes: Crashes, published: list[str]) -> None:
        for id in ("m-7", "m-8"):
            note(crashes, id, keys=["a"])
            assert crashes.count(id, LIMIT) == 0
        assert (list(crashes.barred(LIMIT)), len(published)) == (["a"], 2)
        note(crashes, "m-9", keys=["a", "b"])
        assert crashes.count("m-9", LIMIT) == 1
        note(crashes, "m-10", keys=["b"])
        note(crashes, "m-10", convicted="b", earlier="m-9")  # m-9 no longer counts against the model
        assert crashes.count("m-10", LIMIT) == 0
        assert list(crashes.barred(LIMIT)) == ["a", "b"]
        assert (crashes.count("m-11", LIMIT), crashes.count("m-12", LIMIT)) == (1, 2)
        crashes.forget()
        assert (crashes.barred(LIMIT), crashes.count("m-13", LIMIT)) == ({}, 1)

    run(scenario)


def test_a_change_is_published_when_a_key_is_no_longer_barred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashes_module, "CRASH_WINDOW_S", 0.1)

    async def drain(*_: object) -> Drained:
        return Drained()

    async def main() -> None:
        published: list[bool] = []
        children = ChildProcesses(ReplicaMemory(), (), drain, lambda: published.append(bool(crashes.barred(1))))
        crashes = Crashes("m", children)
        note(crashes, "m-1", keys=["a"])
        crashes.note(ReplicaLoss("m", "m-1", keys=["a"]), 1)
        crashes.count("m-1", 1)
        assert published == [True]
        await until(lambda: published == [True, False])

    asyncio.run(main())
