"""LoRA adapters, loaded and unloaded in replicas that serve: by commands, and in replicas that start meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.signature import Signature, VllmSpec
from headwater_server.config.schema import Deployment
from headwater_server.control.messages import Drained
from headwater_server.supervisor.handle import ReplicaHandle
from tests.app.supervisor.stand_in import Supervisor, settle, until
from tests.app.vllm.stand_in import Exchange, StandIn, error, stand_ins

SPEC = VllmSpec(max_sequences=8, context_length=64, cache_tokens=1000, version="0", max_lora_rank=16)
Answers = Callable[[str, str], bool]
"""Whether a replica does what it is asked: given the action and the adapter."""


class Served(Supervisor):
    """A supervisor with the deployment ``base`` on stand-ins for vLLM."""

    def __init__(self, vllms: dict[str, StandIn], folder: Path, allow_load: str = "any", **fields: Any) -> None:
        self.places = folder
        for name, rank in (("x", 8), ("y", 8), ("z", 8), ("high", 64)):
            (folder / name).mkdir()
            (folder / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
            (folder / name / "adapter_model.safetensors").touch()
        base = {
            "model": "vllm:m",
            "python": "python",
            "drain_timeout_s": 7,
            "options": {"adapters": self.paths("x", "y")},
            **fields,
        }
        super().__init__({"base": base}, allow_load)
        self.vllms = vllms
        self.asked: list[tuple[str, str, str]] = []
        """What replicas were asked for, in order: the replica, the action, the adapter."""
        self.does: Answers = lambda action, adapter: True
        for name, vllm in vllms.items():
            vllm.script = self.script(name)

    def paths(self, *names: str) -> dict[str, str]:
        return {name: str(self.places / name) for name in names}

    def script(self, replica: str) -> Callable[[Exchange], Awaitable[None]]:
        async def answer(exchange: Exchange) -> None:
            action, adapter = (
                exchange.path.removeprefix("/v1/").removesuffix("_lora_adapter"),
                exchange.body["lora_name"],
            )
            self.asked.append((replica, action, adapter))
            if action == "load":
                assert exchange.body["lora_path"] == str(self.places / adapter)
            is_done = self.does(action, adapter)
            exchange.whole(b"Success" if is_done else error("it doesn't fit", 500), 200 if is_done else 500)

        return answer

    def launch(self, name: str, config: Deployment, on_progress: Callable[[str], None], fork: object) -> ReplicaHandle:
        launched = super().launch(name, config, on_progress, fork)
        replica = self.launched[-1]
        replica.adapters = config.adapters
        replica.signature = Signature("base", (), (), vllm=SPEC)
        replica.socket = str(self.vllms[replica.id].path)
        return launched

    async def drain(
        self, name: str, timeout_s: float, replicas: list[str] | None, adapters: Sequence[str] = ()
    ) -> Drained:
        assert not set(adapters) & self.served.keys()
        self.drains.append((name, timeout_s, list(adapters)))
        return self.drained

    @property
    def served(self) -> dict[str, int]:
        """The adapters in the routing table."""
        return self.sets["base"].route(1).adapters


@contextlib.asynccontextmanager
async def serving(folder: Path, *replicas: str, **fields: Any) -> AsyncIterator[Served]:
    before = asyncio.all_tasks()
    async with stand_ins(*(replicas or ("base-0",))) as found:
        served = Served(found, folder, **fields)
        try:
            await served.start()
            yield served
        finally:
            for task in asyncio.all_tasks() - before:
                task.cancel()


async def test_one_is_unloaded_after_its_requests_and_loaded_again(tmp_path: Path) -> None:
    async with serving(tmp_path, allow_load="never") as served:
        assert served.served == {"x": 0, "y": 0}
        served.drained = Drained(2, 1)
        answer = await served.do("unload", "x")
        content = answer.content
        assert (answer.status, content["name"], content["state"]) == (200, "x", "UNAVAILABLE")
        assert (content["drained"], content["ended"], content["leftovers"]) == (2, 1, [])
        assert served.drains == [("base", 7, ["x"])]
        assert served.asked == [("base-0", "unload", "x")]
        assert served.served == {"y": 0}
        assert await served.told("unload", "x") == (409, "model `x`: the LoRA adapter is not loaded")
        answer = await served.do("load", "x")
        assert (answer.status, answer.content["state"]) == (200, "READY")
        assert served.asked[1:] == [("base-0", "load", "x")]
        assert served.served == {"y": 0, "x": 1}
        assert await served.told("load", "x") == (409, "model `x`: the LoRA adapter is already loaded")
        assert len(served.launched) == 1


async def test_other_commands_are_the_base_models(tmp_path: Path) -> None:
    async with serving(tmp_path, "base-0", "base-1") as served:
        for action, config in (("reload", None), ("scale", None), ("load", {"timeout_s": 1})):
            status, text = await served.told(action, "x", config)
            assert status == 409
            assert "it is a LoRA adapter of `base`: expected load or unload" in text
        assert (await served.do("unload", "base")).status == 200
        assert (await served.told("unload", "x"))[0] == 409
        assert (await served.do("load", "base")).status == 200
        assert served.asked == []


async def test_a_configuration_with_other_adapters_restarts_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, "base-0", "base-1", replicas=2) as served:
        answer = await served.do("reload", "base", {"options": {"adapters": {**served.paths("z"), "x": None}}})
        assert (answer.status, answer.content["state"]) == (200, "READY")
        assert sorted(served.asked[:2]) == [("base-0", "load", "z"), ("base-1", "load", "z")]
        assert sorted(served.asked[2:]) == [("base-0", "unload", "x"), ("base-1", "unload", "x")]
        assert served.served == {"y": 0, "z": 1}
        assert (await served.do("reload", "base", {})).status == 200
        assert served.served == {"x": 1, "y": 0}
        assert len(served.launched) == 2


@pytest.mark.parametrize("change", ["none", "more", "folder", "rank"])
async def test_what_replicas_that_serve_cannot_do_takes_other_replicas(tmp_path: Path, change: str) -> None:
    async with serving(tmp_path, "base-0", "base-1") as served:
        configs: dict[str, dict[str, Any]] = {
            "none": {"options": {"adapters": {}}},
            "more": {"timeout_s": 3, "options": {"adapters": served.paths("z")}},
            "folder": {"options": {"adapters": {"x": str(tmp_path / "z")}}},
            "rank": {"options": {"adapters": served.paths("high")}},
        }
        assert (await served.do("reload", "base", configs[change])).status == 200
        assert served.asked == []
        assert len(served.launched) == 2
        assert served.launched[1].adapters == served.sets["base"].config.adapters


async def test_if_one_replica_refuses_all_have_what_they_had(tmp_path: Path) -> None:
    async with serving(tmp_path, "base-0", "base-1", replicas=2) as served:
        served.does = lambda action, adapter: adapter != "z"
        wanted = {"options": {"adapters": served.paths("high", "z")}}
        served.places.joinpath("high", "adapter_config.json").write_text('{"r": 16}')
        status, text = await served.told("reload", "base", wanted)
        assert (status, "did not load adapter `z`: it doesn't fit; the previous" in text) == (
            500,
            True,
        )
        for name in ("base-0", "base-1"):
            actions = [one[1:] for one in served.asked if one[0] == name]
            assert actions == [("load", "high"), ("load", "z"), ("unload", "high")]
        assert served.served == {"x": 0, "y": 0}
        served.vllms["base-1"].close()
        served.does = lambda action, adapter: True
        status, text = await served.told("reload", "base", {"options": {"adapters": served.paths("z")}})
        assert (status, "replica base-1 did not load adapter `z`" in text) == (500, True)
        status, text = await served.told("reload", "base", {"options": {"adapters": {"no": str(tmp_path / "no")}}})
        assert (status, text.startswith("adapters.no: there is no folder")) == (500, True)
        assert served.launched[0].adapters == served.paths("x", "y")
        assert served.served == {"x": 0, "y": 0}


async def test_a_replica_that_was_starting_gets_the_present_ones_before_it_serves(tmp_path: Path) -> None:
    async with serving(tmp_path, "base-0", "base-1", "base-2", replicas=2) as served:
        served.auto_ready = False
        served.launched[1].end("killed")
        await until(lambda: len(served.launched) == 3)
        assert (
            await served.do("reload", "base", {"options": {"adapters": {**served.paths("z"), "x": None}}})
        ).status == 200
        assert [one[0] for one in served.asked] == ["base-0", "base-0"]
        served.launched[2].get_ready()
        await until(lambda: len(served.sets["base"].ready) == 2)
        assert served.asked[2:] == [("base-2", "unload", "x"), ("base-2", "load", "z")]


async def test_a_replica_that_does_not_take_them_never_serves(tmp_path: Path) -> None:
    async with serving(tmp_path, "base-0", "base-1", "base-2", "base-3", replicas=2) as served:
        served.auto_ready = False
        served.launched[1].end("killed")
        await until(lambda: len(served.launched) == 3)
        assert (await served.do("unload", "x")).status == 200
        served.does = lambda action, adapter: False
        served.launched[2].get_ready()
        await until(lambda: len(served.launched) == 4)
        assert served.launched[2].reason == "replica base-2 did not unload adapter `x`: it doesn't fit"
        assert served.launched[3].adapters == served.paths("y")
        await settle()
