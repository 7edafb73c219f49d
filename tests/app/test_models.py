"""What a gateway worker serves, as the routing table says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from app.dispatch import Dispatcher
from app.errors import BadRequest, NotFound, Unavailable
from app.graph import GraphDispatcher
from app.models import Models
from app.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from app.tensors import InferRequest, OutputWish, RawTensor
from inference.pipeline import PipelineSpec, StepSpec, make_plan
from inference.signature import Signature, TensorSpec


class Hanging:
    """A `ReplicaClient` that never answers."""

    async def infer(self, head: bytes, data: Sequence[bytes | memoryview]) -> dict[str, RawTensor]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def close(self) -> None: ...


def signature(name: str, given: str, made: str) -> Signature:
    return Signature(name, (TensorSpec(given, "FP32", (1,)),), (TensorSpec(made, "FP32", (1,)),), max_batch_size=8)


SIGNATURES = {"trunk": signature("abc.trunk", "x", "features"), "head": signature("abc.head", "features", "y")}
PLAN = make_plan(
    PipelineSpec(tuple(StepSpec(name, model="m:M") for name in SIGNATURES), ("head",), "graph", "trunk"),
    SIGNATURES, name="abc", max_batch_size=8,
)  # fmt: skip


def step(name: str) -> DeploymentRoute:
    return DeploymentRoute(
        f"abc.{name}", State.READY, "", SIGNATURES[name], (ReplicaRoute(name, "", ""),), part_of="abc"
    )


PIPELINE = DeploymentRoute("abc", State.READY, signature=PLAN.signature, is_graph=True, plan=PLAN)
PLAIN = DeploymentRoute("plain", State.READY, "", SIGNATURES["head"], (ReplicaRoute("r", "", ""),))
TABLE = RoutingTable((PIPELINE, step("trunk"), step("head"), PLAIN))


def run(scenario: Callable[[Models], Awaitable[None]]) -> None:
    async def main() -> None:
        models = Models(lambda name, route: Hanging())
        models.update(TABLE)
        await asyncio.wait_for(scenario(models), 20)
        models.close()

    asyncio.run(main())


async def settle() -> None:
    """Let everything that is due happen."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_steps_are_found_by_their_name_but_not_listed() -> None:
    async def scenario(models: Models) -> None:
        assert [model.route.name for model in models] == ["abc", "plain"]
        assert [model.route.name for model in models.with_steps()] == ["abc", "abc.trunk", "abc.head", "plain"]
        assert models.get("abc.trunk").route.part_of == "abc"
        with pytest.raises(NotFound, match=r"this server has `abc`, `plain`$"):
            models.get("abc.tail")

    run(scenario)


def test_a_pipeline_finds_its_steps_wherever_the_table_has_them() -> None:
    async def scenario(models: Models) -> None:
        assert isinstance(models.get("abc").dispatcher, GraphDispatcher)
        assert isinstance(models.get("abc.trunk").dispatcher, Dispatcher)
        models.update(RoutingTable((PIPELINE, step("head"))))
        request = InferRequest(
            "", {"x": RawTensor("FP32", (1, 1), bytes(4))}, 1, [OutputWish("y", True)], {}, {}, ("head",)
        )
        with pytest.raises(Unavailable, match="step `trunk`: its deployment is gone"):
            await models.get("abc").dispatcher.infer(request)

    run(scenario)


def test_requests_of_pipelines_are_in_flight_until_they_are_answered() -> None:
    async def scenario(models: Models) -> None:
        assert models.is_idle
        request = InferRequest(
            "", {"x": RawTensor("FP32", (1, 1), bytes(4))}, 1, [OutputWish("y", True)], {}, {}, ("head",)
        )
        task = asyncio.create_task(models.get("abc").dispatcher.infer(request))
        await settle()
        assert [model.dispatcher.in_flight for model in models.with_steps()] == [1, 1, 0, 0]
        assert not models.is_idle
        task.cancel()
        await settle()
        assert models.is_idle

    run(scenario)


def test_while_the_server_drains_every_model_refuses_new_requests() -> None:
    async def scenario(models: Models) -> None:
        models.update(msgspec.structs.replace(TABLE, draining=True))
        for model in models.with_steps():
            with pytest.raises(Unavailable, match="stopping"):
                model.dispatcher.check_ready()

    run(scenario)


def test_codecs_are_made_anew_for_another_signature_only() -> None:
    async def scenario(models: Models) -> None:
        model = models.get("abc")
        before = model.codecs()
        models.update(msgspec.json.decode(msgspec.json.encode(TABLE), type=RoutingTable))
        assert model.codecs() is before
        renamed = msgspec.structs.replace(PLAN.signature, description="another")
        models.update(RoutingTable((msgspec.structs.replace(PIPELINE, signature=renamed),)))
        assert model.codecs() is not before

    run(scenario)


def test_a_model_that_streams_has_no_whole_answer() -> None:
    async def scenario(models: Models) -> None:
        streams = msgspec.structs.replace(SIGNATURES["head"], streams=True)
        models.update(RoutingTable((msgspec.structs.replace(PLAIN, signature=streams),)))
        with pytest.raises(BadRequest, match="/v2/models/plain/generate_stream"):
            models.get("plain").codecs()

    run(scenario)
