"""What a gateway worker serves, as the routing table says."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from headwater.pipeline import PipelineSpec, StepSpec, make_plan
from headwater.signature import Signature, TensorSpec, VllmSpec
from headwater.wire.frame import StepCount
from headwater.wire.lm import Load
from headwater_server.codecs.tensors import Answer, InferRequest, OutputWish, RawTensor
from headwater_server.config.schema import Server
from headwater_server.control.load import LoadReport
from headwater_server.control.messages import Drain, Drained
from headwater_server.control.route_kinds import GraphKind, TrafficRoute, VersionsKind, VllmKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.graph import GraphDispatcher
from headwater_server.dispatch.versions import VersionsDispatcher
from headwater_server.errors import BadRequest, Cancelled, NotFound, Unavailable
from headwater_server.gateway.app import create_app
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.metadata import metadata_routes
from headwater_server.gateway.sampler import LoadSampler
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.telemetry.catalogue import ALL_SERIES, VERSION_TIMES
from headwater_server.telemetry.recorder import leave, recorder, use
from headwater_server.telemetry.store import Store
from headwater_server.transport.segments import RemoteSegment
from tests.app.dispatch.stand_in import settle
from tests.app.lm.stand_in import Replica, event, route_of, spec
from tests.counted import count_from_zero


class Hanging:
    """A `ReplicaClient` that never answers."""

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
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
        f"abc.{name}", State.READY, "", SIGNATURES[name], (ReplicaRoute(name, "unix:", ""),), part_of="abc"
    )


PIPELINE = DeploymentRoute("abc", State.READY, signature=PLAN.signature, kind=GraphKind(PLAN))
PLAIN = DeploymentRoute("plain", State.READY, "", SIGNATURES["head"], (ReplicaRoute("r", "unix:", ""),))
TABLE = RoutingTable((PIPELINE, step("trunk"), step("head"), PLAIN))


@pytest.fixture
def replica() -> Replica:
    """The replica of the language model."""
    return Replica()


@pytest.fixture
async def models(replica: Replica) -> AsyncIterator[Models]:
    models = Models(lambda name, route: replica if route.grpc_address else Hanging())
    models.update(TABLE)
    yield models
    models.close()


async def test_steps_are_found_by_their_name_but_not_listed(models: Models) -> None:
    assert [model.route.name for model in models] == ["abc", "plain"]
    assert [model.route.name for model in models.with_steps()] == ["abc", "abc.trunk", "abc.head", "plain"]
    assert models.get("abc.trunk").route.part_of == "abc"
    with pytest.raises(NotFound, match=r"this server has `abc`, `plain`$"):
        models.get("abc.tail")


async def test_a_pipeline_finds_its_steps_wherever_the_table_has_them(models: Models) -> None:
    assert isinstance(models.get("abc").dispatcher, GraphDispatcher)
    assert isinstance(models.get("abc.trunk").dispatcher, ModelDispatcher)
    models.update(RoutingTable((PIPELINE, step("head"))))
    request = InferRequest(
        "", {"x": RawTensor("FP32", (1, 1), bytes(4))}, 1, [OutputWish("y", True)], {}, {}, ("head",)
    )
    with pytest.raises(Unavailable, match="step `trunk`: its deployment is gone"):
        await models.get("abc").dispatcher.infer(request)


async def test_a_name_that_becomes_another_kind_of_model_gets_another_dispatcher(models: Models) -> None:
    plain = models.get("plain")
    as_graph = msgspec.structs.replace(PIPELINE, name="plain")
    models.update(RoutingTable((PIPELINE, step("trunk"), step("head"), as_graph)))
    assert isinstance(models.get("plain").dispatcher, GraphDispatcher)
    with pytest.raises(Unavailable):  # the old one is closed
        plain.dispatcher.check_ready()
    models.update(TABLE)
    assert isinstance(models.get("plain").dispatcher, ModelDispatcher)
    again = models.get("plain")
    models.update(TABLE)
    assert models.get("plain") is again
    models.update(RoutingTable((PIPELINE, step("trunk"), step("head"))))
    with pytest.raises(NotFound):
        models.get("plain")


async def test_requests_of_pipelines_are_in_flight_until_they_are_answered(models: Models) -> None:
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


async def test_while_the_server_drains_every_model_refuses_new_requests(models: Models) -> None:
    models.update(msgspec.structs.replace(TABLE, draining=True))
    for model in models.with_steps():
        with pytest.raises(Unavailable, match="stopping"):
            model.dispatcher.check_ready()


async def test_a_server_that_is_about_to_stop_is_not_ready_but_answers(models: Models) -> None:
    server = create_app(models, Server(access_log=False))
    models.update(msgspec.structs.replace(TABLE, leaving=True))
    for model in models.with_steps():
        model.dispatcher.check_ready()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
        for path in ("/v2/health/ready", "/health", "/health/ready", "/v2/models/plain/ready"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]) == (503, "the server is stopping")
        assert (await client.get("/v2/health/live")).status_code == 200
        assert (await client.get("/v2/models/plain")).status_code == 200


async def test_codecs_are_made_anew_for_another_signature_only(models: Models) -> None:
    model = models.get("abc")
    before = model.codecs()
    models.update(msgspec.json.decode(msgspec.json.encode(TABLE), type=RoutingTable))
    assert model.codecs() is before
    renamed = msgspec.structs.replace(PLAN.signature, description="another")
    models.update(RoutingTable((msgspec.structs.replace(PIPELINE, signature=renamed),)))
    assert model.codecs() is not before


async def test_a_model_that_streams_has_no_whole_answer(models: Models) -> None:
    streams = msgspec.structs.replace(SIGNATURES["head"], streams=True)
    models.update(RoutingTable((msgspec.structs.replace(PLAIN, signature=streams),)))
    with pytest.raises(BadRequest, match="/v2/models/plain/generate_stream"):
        models.get("plain").codecs()


async def test_openais_routes_know_what_is_ready_and_say_why_another_is_not(models: Models) -> None:
    unloaded = msgspec.structs.replace(PLAIN, name="gone", state=State.UNAVAILABLE, reason="unloaded", replicas=())
    models.update(RoutingTable((msgspec.structs.replace(PLAIN, since_s=1.8e9), unloaded)))
    server = create_app(models, Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
        told = (await client.get("/v1/models")).json()
        (entry,) = told["data"]
        assert (told["object"], entry) == ("list", (await client.get("/v1/models/plain")).json())
        assert entry == {
            "id": "plain", "object": "model", "created": 1_800_000_000, "owned_by": "headwater", "root": "plain",
            "parent": None,
        }  # fmt: skip
        refused = await client.get("/v1/models/gone")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], "retry-after" in refused.headers) == (503, "unavailable", True)
        assert "unloaded" in error["message"]
        assert (await client.get("/v1/models/other")).status_code == 404


async def test_adapters_are_models_with_a_parent(models: Models) -> None:
    spec = VllmSpec(max_sequences=8, context_length=64, cache_tokens=1000, version="0", max_lora_rank=8)
    base = DeploymentRoute("base", State.READY, "", Signature("base", (), (), vllm=spec),
                           (ReplicaRoute("r", "unix:", ""),), since_s=1.8e9,
                           kind=VllmKind({"first": 0, "second": 2}))  # fmt: skip
    models.update(RoutingTable((PLAIN, base)))
    assert models.vllm("second") is models.vllm("base") is models.get("first").dispatcher
    assert (models.get("first").name, models.get("first").route.name) == ("first", "base")
    with pytest.raises(NotFound, match=r"this server has `plain`, `base`, `first`, `second`$"):
        models.get("third")
    server = create_app(models, Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [
            ("plain", None), ("base", None), ("first", "base"), ("second", "base"),
        ]  # fmt: skip
        assert (await client.get("/v1/models/second")).json() == listed[-1]
        names = ("max_model_len", "context_length", "context_window")
        assert [[one.get(name) for name in names] for one in listed] == [[None] * 3, [64] * 3, [64] * 3, [64] * 3]
        for path in ("", "/config"):
            assert (await client.get(f"/v2/models/first{path}")).json()["name"] == "first"
        assert (await client.get("/v2/models/first/ready")).json() == {"name": "first", "ready": True}
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert '"first", "second"' in json.dumps(paths["/v1/completions"])
        index = (await client.get("/v2/repository/index")).json()
        assert [(one["name"], one.get("adapters")) for one in index] == [
            ("plain", None), ("base", ["first", "second"]),
        ]  # fmt: skip
    models.update(RoutingTable((PLAIN, msgspec.structs.replace(base, kind=VllmKind({"second": 2})))))
    assert models.vllm("first") is None
    with pytest.raises(NotFound):
        models.get("first")


@pytest.mark.parametrize("path", ["/v2/health/ready", "/health", "/health/ready"])
async def test_readiness_under_every_name(models: Models, path: str) -> None:
    server = create_app(models, Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
        assert ((await client.get(path)).status_code, (await client.get(path)).json()) == (200, {"ready": True})
        models.update(RoutingTable((msgspec.structs.replace(PLAIN, state=State.LOADING, replicas=()),)))
        assert (await client.get(path)).status_code == 503


@pytest.mark.parametrize("path", ["/v2/health/ready", "/health", "/health/ready"])
async def test_readiness_of_the_models_that_are_named(models: Models, path: str) -> None:
    server = create_app(models, Server(access_log=False))
    loading = msgspec.structs.replace(
        PLAIN, name="late", state=State.LOADING, reason="loading", signature=None, replicas=()
    )
    gone = msgspec.structs.replace(loading, name="gone", state=State.UNAVAILABLE, is_set_aside=True)
    models.update(RoutingTable((*TABLE.deployments, loading, gone)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:

        async def ask(*names: str) -> tuple[int, dict[str, object]]:
            answer = await client.get(path, params=[("model", name) for name in names])
            return answer.status_code, answer.json()

        assert (await ask())[0] == 503
        for names in (["plain"], ["plain", "abc"], ["abc.trunk"]):
            assert await ask(*names) == (200, {"ready": True})
        for names in (["late"], ["plain", "late"]):
            assert await ask(*names) == (503, {"ready": False, "error": "model `late` is LOADING: loading"})
        status, answer = await ask("gone", "late")  # what is named must be there, even if it was unloaded
        assert (status, "`gone` is UNAVAILABLE" in str(answer), "`late` is LOADING" in str(answer)) == (
            503,
            True,
            True,
        )
        status, answer = await ask("plain", "palin")
        assert (status, str(answer["error"]).startswith("model 'palin': unknown; this server has `abc`")) == (
            404,
            True,
        )
        models.update(RoutingTable((PLAIN,), leaving=True))
        assert await ask("plain") == (503, {"ready": False, "error": "the server is stopping"})


async def test_the_models_that_readiness_may_name_are_in_the_schema(models: Models) -> None:
    server = create_app(models, Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    (parameter,) = paths["/v2/health/ready"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("model", "query", False)
    assert (parameter["schema"]["type"], parameter["schema"]["items"]) == ("array", {"type": "string"})


LANGUAGE_MODEL = route_of("lm-0")


async def test_a_language_model_is_found_as_one_and_nothing_else_is(models: Models) -> None:
    loading = msgspec.structs.replace(LANGUAGE_MODEL, state=State.LOADING, signature=None, replicas=())
    models.update(RoutingTable((PLAIN, loading)))
    dispatcher = models.language_model(models.get("lm"))  # before anything is known of it
    assert isinstance(dispatcher, LmDispatcher)
    with pytest.raises(Unavailable):
        models.get("lm").codecs()
    models.update(RoutingTable((PLAIN, LANGUAGE_MODEL)))
    assert models.language_model(models.get("lm", "1")) is dispatcher
    assert dispatcher.check_ready() == LANGUAGE_MODEL.signature
    with pytest.raises(BadRequest, match=r"`plain` is not a language model; language models: `lm`$"):
        models.language_model(models.get("plain"))
    with pytest.raises(NotFound):
        models.language_model(models.get("other"))
    with pytest.raises(NotFound, match="version"):
        models.get("lm", "2")


async def test_who_sends_tensors_to_a_language_model_is_told_where_to_ask(models: Models) -> None:
    models.update(RoutingTable((LANGUAGE_MODEL,)))
    for check in (models.get("lm").codecs, models.get("lm").dispatcher.check_whole):
        with pytest.raises(BadRequest, match=r"/generate, .*/generate_stream or /v1/chat/completions"):
            check()


async def test_requests_of_language_models_are_in_flight_and_cancelled_by_id_and_refused_while_draining(
    models: Models, replica: Replica
) -> None:
    models.update(RoutingTable((PLAIN, LANGUAGE_MODEL)))
    request = models.language_model(models.get("lm")).open("mine", [spec(), spec()])
    assert (models.in_flight, models.is_idle) == (1, False)
    await settle()
    assert await models.cancel_request("other") == 0
    assert await models.cancel_request("mine") == 2
    with pytest.raises(Cancelled):
        await request.news()
    assert models.is_idle
    models.update(RoutingTable((LANGUAGE_MODEL,), draining=True))
    with pytest.raises(Unavailable, match="stopping"):
        models.language_model(models.get("lm")).open("mine", [spec()])
    models.update(RoutingTable((PLAIN,)))
    assert replica.is_closed


async def test_statistics_and_configuration_of_a_language_model(models: Models, replica: Replica) -> None:
    count_from_zero()
    asked = recorder().requests("lm", "generate")
    for outcome in ("ok", "shed", "failed", "timeout", "client_error"):
        asked.accept()
        asked.end(outcome, 5)
    models.update(RoutingTable((LANGUAGE_MODEL,)))
    request = models.language_model(models.get("lm")).open("q", [spec()])
    await settle()
    replica.say(event(0, 0, [1, 2], finish="stop"), load=Load(3, 2, 40))
    assert await request.news()
    assert await request.news() == []
    server = FastAPI()
    server.include_router(metadata_routes(models, BodyReader(1000, 1000)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
        (told,) = (await client.get("/v2/models/lm/stats")).json()["model_stats"]
        metadata = (await client.get("/v2/models/lm")).json()
        config = (await client.get("/v2/models/lm/config")).json()
    assert (told["name"], told["inference_count"], told["execution_count"]) == ("lm", 1, 2)
    assert told["inference_stats"]["success"] == {"count": 1, "ns": 5}
    told = told["language_model"]
    assert told.pop("first_token")["count"] == 1
    assert told == {
        "requests": 1,
        "failures": 2,
        "shed": 1,
        "cancelled": 0,
        "prompt_tokens": 3,
        "cached_prompt_tokens": 0,
        "generated_tokens": 2,
        "contract_violations": 0,
        "sequences": {"active": 3, "waiting": 2},
        "cache_used": 40,
        "limits": {"max_sequences": 4, "max_waiting": 8, "context_length": 64, "cache_tokens": 256},
    }
    assert [tensor["name"] for tensor in metadata["inputs"] + metadata["outputs"]] == ["text_input", "text_output"]
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    assert config["model_transaction_policy"] == {"decoupled": True}


async def test_statistics_are_those_of_all_workers_and_tell_sizes_of_batches(models: Models, tmp_path: Path) -> None:
    try:
        for index, calls in enumerate((1, 2)):
            Store.create(tmp_path / f"worker-{index}.{index}")
            meter = use(Store(tmp_path / f"worker-{index}.{index}")).deployment("plain")
            meter.note_request(3, 50, 20, 1000, 5)
            meter.failures.add()
            meter.note_step(StepCount("trunk", 1, 2, 3))
            for _ in range(calls):
                meter.note_call(3, 8, 1000)
            meter.note_call(12, 16, 4000)
            meter.note_call(5, 16, 4000, is_merged=True)
        Store.create(tmp_path / "supervisor")
        models.update(RoutingTable((PLAIN,)))
        server = FastAPI()
        server.include_router(metadata_routes(models, BodyReader(1000, 1000)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
            (told,) = (await client.get("/v2/models/plain/stats")).json()["model_stats"]
        assert (told["inference_count"], told["execution_count"]) == (6, 5)
        found = {name: (one["count"], one["ns"]) for name, one in told["inference_stats"].items()}
        assert found == {
            "success": (2, 2100), "fail": (2, 0), "queue": (2, 100), "compute_input": (2, 0),
            "compute_infer": (2, 2000), "compute_output": (2, 0),
        }  # fmt: skip
        nothing = {"count": 3, "ns": 0}
        assert told["batch_stats"][0] == {
            "batch_size": 3, "compute_input": nothing, "compute_infer": {"count": 3, "ns": 3000},
            "compute_output": nothing,
        }  # fmt: skip
        assert [one["batch_size"] for one in told["batch_stats"]] == [3, 12]
        assert told["steps"] == {"trunk": {"execution_count": 2, "retries": 4, "compute_ns": 6000}}
    finally:
        count_from_zero()


# Versions


def version(name: str, *, is_ready: bool = True) -> DeploymentRoute:
    replicas = (ReplicaRoute(f"v{name}", "unix:", ""),) if is_ready else ()
    state = State.READY if is_ready else State.LOADING
    return DeploymentRoute(
        f"c.{name}", state, "", signature(f"c.{name}", "x", "y"), replicas, part_of="c", version=name
    )


def shared(
    shares: dict[str, float], *, sticky: str = "", is_watched: bool = False, shadow: str = "", **fields: Any
) -> DeploymentRoute:
    traffic = TrafficRoute(shares, "1", sticky, is_watched, shadow)
    return DeploymentRoute("c", State.READY, "", signature("c", "x", "y"), kind=VersionsKind(traffic), **fields)


def scope_of(request_id: str = "r", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"headers": pairs, "state": {"request_id": request_id}}


async def test_a_request_is_given_a_version_unless_it_names_one(models: Models) -> None:
    models.update(RoutingTable((shared({"1": 0.0, "2": 1.0}), version("1"), version("2"))))
    scope = scope_of()
    chosen = models.choose(scope, "c")
    assert (chosen.route.name, chosen.name, chosen.version, scope["state"]["version"]) == ("c.2", "c", "2", "2")
    assert models.choose(scope_of(), "c", "1").route.name == "c.1"
    assert models.get("c").versions == ["1", "2"]
    with pytest.raises(NotFound, match="expected '1' or '2', got '3'"):
        models.choose(scope_of(), "c", "3")
    plain = scope_of()
    models.update(TABLE)
    assert (models.choose(plain, "plain").name, "version" in plain["state"]) == ("plain", False)


async def test_the_sticky_header_decides_where_it_is_sent(models: Models) -> None:
    models.update(RoutingTable((shared({"1": 0.5, "2": 0.5}, sticky="X-User"), version("1"), version("2"))))
    users = [str(number) for number in range(50)]
    found = [models.choose(scope_of(f"a{user}", x_user=user), "c").version for user in users]
    assert found == [models.choose(scope_of(f"b{user}", x_user=user), "c").version for user in users]
    without = [models.choose(scope_of(f"a{user}"), "c").version for user in users]
    assert set(found) == set(without) == {"1", "2"}
    assert found != without


async def test_the_default_version_answers_in_place_of_one_that_is_not_ready(models: Models) -> None:
    models.update(RoutingTable((shared({"1": 0.0, "2": 1.0}), version("1"), version("2", is_ready=False))))
    assert models.choose(scope_of(), "c").version == "1"
    with pytest.raises(Unavailable, match=r"`c\.2` is LOADING"):
        models.choose(scope_of(), "c", "2").codecs()


async def test_a_shadow_gets_copies_until_it_is_drained_or_the_server_stops(models: Models) -> None:
    def table(**fields: Any) -> RoutingTable:
        both = shared({"1": 1.0, "2": 0.0}, shadow="2")
        return RoutingTable((both, version("1"), version("2")), **fields)

    def copies() -> int:
        one = models.get("c").dispatcher
        assert isinstance(one, VersionsDispatcher)
        return 0 if one.shadow is None else one.shadow.in_flight

    async def offer() -> None:
        found = models.get("c", "1").dispatcher
        assert isinstance(found, ModelDispatcher)
        assert found.shadow is not None
        inputs = {"x": RawTensor("FP32", (1, 1), bytes(4))}
        request = InferRequest("", inputs, 1, [OutputWish("y", True)], {}, {})
        found.shadow.offer(request, Answer({"y": inputs["x"]}), found.check_ready(), 0.1, is_crowded=False)
        await settle()
        assert (copies(), models.get("c.2").dispatcher.in_flight) == (1, 1)

    models.update(table())
    assert [models.is_shadow(models.get("c", one)) for one in ("1", "2")] == [False, True]
    await offer()
    assert await models.drain(Drain(1, "c.2", 10)) == Drained()
    await settle()
    assert copies() == 0
    await offer()
    models.update(table(draining=True))
    await settle()
    assert (copies(), models.is_idle) == (0, True)
    models.update(table())
    await offer()
    models.update(RoutingTable((shared({"1": 1.0, "2": 0.0}), version("1"), version("2"))))
    await settle()
    assert models.is_idle
    assert not models.is_shadow(models.get("c", "2"))


async def test_what_versions_that_are_compared_have_counted_is_reported(models: Models) -> None:
    use(Store())
    models.update(RoutingTable((shared({"1": 0.5, "2": 0.5}, is_watched=True), version("1"), version("2"))))
    for outcome in ("ok", "ok", "failed", "timeout", "client_error", "cancelled", "shed"):
        requests = recorder().requests("c.2", "infer")
        requests.accept()
        leave({"state": {"requests": requests, "outcome": outcome, "version": "2"}}, 200, 700_000)
    sent: list[LoadReport] = []
    LoadSampler(models, sent.append).report()
    one, other = sent[0].tallies
    assert (one.name, one.ended, other.name, other.ended, other.failed) == ("c.1", 0, "c.2", 4, 2)
    assert (other.answered, other.times[bisect_left(ALL_SERIES[VERSION_TIMES].bounds, 700_000)]) == (2, 2)
    use(Store())
