"""The states of pipelines with deployments as steps, and of deployments with versions, by the states of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from headwater.signature import Signature, TensorSpec
from headwater_server.config.schema import Deployment
from headwater_server.control.route_kinds import GraphKind, TrafficRoute
from headwater_server.control.routing import CacheShare, DeploymentRoute, State, unavailable
from headwater_server.errors import Conflict
from headwater_server.supervisor.states import GraphState, VersionsState

Signatures = Mapping[str, Signature]
SIGNATURE = Signature("c.1", (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), max_batch_size=8)


def signature(inputs: Mapping[str, int], outputs: Mapping[str, int]) -> Signature:
    def specs(widths: Mapping[str, int]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, "FP32", (width,)) for name, width in widths.items())

    return Signature("", specs(inputs), specs(outputs), max_batch_size=8)


SIGNATURES = {
    "trunk": signature({"x": 2}, {"features": 3}),
    "head_a": signature({"features": 3}, {"a": 1}),
    "head_b": signature({"features": 3}, {"b": 1}),
}


def graph(pipeline: Mapping[str, Any] | None = None, **fields: Any) -> GraphState:
    """`trunk`, `head_a` and `head_b`, which is the deployment `shared`."""
    simple = {
        "placement": "graph",
        "trunk": {"model": "m:Trunk"},
        "heads": {"head_a": {"model": "m:HeadA"}, "head_b": {"deployment": "shared"}},
    }
    return GraphState("p", Deployment.model_validate({"pipeline": pipeline or simple, **fields}))


def steps_told(
    state: GraphState, signatures: Signatures = SIGNATURES, /, **steps: State | tuple[State, str]
) -> dict[str, DeploymentRoute]:
    """The deployments' states: READY but for these, and known but for those LOADING or FAILED without having been."""
    deployments = {"other": DeploymentRoute("other", State.FAILED, "none of our business")}
    for step, name in state.deployments.items():
        given = steps.get(step, State.READY)
        one, reason = given if isinstance(given, tuple) else (given, "")
        deployments[name] = DeploymentRoute(name, one, reason, signatures.get(step))
    return deployments


def without(*steps: str) -> Signatures:
    """The signatures, those of some steps not known yet."""
    return {name: one for name, one in SIGNATURES.items() if name not in steps}


def test_it_waits_for_its_steps_and_says_for_which() -> None:
    state = graph()
    assert (state.state, state.signature) == (State.LOADING, None)
    state.update(steps_told(state, without("head_a"), head_a=(State.LOADING, "importing m:HeadA")))
    assert (state.state, state.reason) == (State.LOADING, "step `head_a`: importing m:HeadA")
    assert state.route(1).kind == GraphKind(state.plan, False)


def test_with_all_steps_ready_it_is_ready_and_has_a_signature() -> None:
    state = graph()
    state.update(steps_told(state))
    assert (state.state, state.reason) == (State.READY, "all steps ready")
    assert state.signature is not None
    assert [spec.name for spec in state.signature.outputs] == ["a", "b"]
    assert [head.name for head in state.signature.heads] == ["head_a", "head_b"]


def test_what_gateway_workers_are_told_of_a_graph() -> None:
    state = graph(timeout_s=7, batching={"max_batch_size": 8, "max_queue_size": 9})
    state.update(steps_told(state))
    route = state.route(2)
    assert (route.name, route.kind, route.timeout_s, route.max_queue_size) == ("p", GraphKind(state.plan), 7, 5)
    assert state.plan is not None
    assert route.signature is state.plan.signature
    assert route.signature.max_batch_size == 8
    assert route.replicas == ()


def test_one_whose_answers_can_not_be_kept_has_failed() -> None:
    cache = {"max_bytes": 9}
    state = graph(cache=cache)
    state.update(steps_told(state))
    assert state.route(2).cache == CacheShare(4)
    state = graph(cache=cache)
    effects = msgspec.structs.replace(SIGNATURES["head_a"], idempotent=False)
    state.update(steps_told(state, {**SIGNATURES, "head_a": effects}))
    assert (state.state, state.plan) == (State.FAILED, None)
    assert "expected a model that answers equal requests equally, got `p`, which is not idempotent" in state.reason


def test_a_step_may_be_a_deployment_that_stands_elsewhere() -> None:
    assert graph().deployments == {"trunk": "p.trunk", "head_a": "p.head_a", "head_b": "shared"}


def test_while_a_head_is_away_the_others_are_served_and_the_reason_says_so() -> None:
    state = graph()
    state.update(steps_told(state))
    state.update(steps_told(state, head_b=(State.UNAVAILABLE, "killed by signal 9")))
    assert (state.state, state.reason) == (State.READY, "step `head_b` is UNAVAILABLE: killed by signal 9")
    assert state.route(1).kind == GraphKind(state.plan)
    state.update(steps_told(state))
    assert state.reason == "all steps ready"


def test_without_its_trunk_it_is_unavailable() -> None:
    state = graph()
    state.update(steps_told(state))
    state.update(steps_told(state, trunk=(State.UNAVAILABLE, "hung")))
    assert (state.state, state.reason) == (State.UNAVAILABLE, "step `trunk` is UNAVAILABLE: hung")
    assert state.route(1).kind == GraphKind(state.plan, False)
    assert state.route(1).signature is not None


def test_without_any_head_it_is_unavailable_and_names_them_all() -> None:
    state = graph()
    state.update(steps_told(state, head_a=(State.UNAVAILABLE, "one"), head_b=(State.UNAVAILABLE, "two")))
    assert state.state is State.UNAVAILABLE
    assert state.reason == "step `head_a` is UNAVAILABLE: one; step `head_b` is UNAVAILABLE: two"


def test_a_step_between_concerns_only_the_heads_behind_it() -> None:
    state = graph(
        {
            "placement": "graph",
            "steps": {
                "trunk": {"model": "m:Trunk", "inputs": {"x": "input.x"}},
                "between": {"model": "m:Between"},
                "near": {"model": "m:Near"},
                "far": {"model": "m:Far"},
            },
            "heads": ["near", "far"],
        }
    )
    signatures = {
        "trunk": signature({"x": 2}, {"features": 3}),
        "between": signature({"features": 3}, {"more": 3}),
        "near": signature({"features": 3}, {"n": 1}),
        "far": signature({"more": 3}, {"f": 1}),
    }
    state.update(steps_told(state, signatures, between=(State.UNAVAILABLE, "killed")))
    assert (state.state, state.reason) == (State.READY, "step `between` is UNAVAILABLE: killed")
    state.update(steps_told(state, signatures, between=State.UNAVAILABLE, near=State.UNAVAILABLE))
    assert state.state is State.UNAVAILABLE


@pytest.mark.parametrize("step", ["trunk", "head_a", "head_b"])
def test_a_step_that_never_started_fails_it(step: str) -> None:
    state = graph()
    state.update(steps_told(state, without(step), **{step: (State.FAILED, "no module named m")}))
    assert (state.state, state.reason) == (State.FAILED, f"step `{step}`: no module named m")
    assert state.route(1).kind == GraphKind(state.plan, False)


def test_a_step_that_failed_counts_before_one_that_loads() -> None:
    state = graph()
    state.update(
        steps_told(state, without("trunk", "head_a"), trunk=State.LOADING, head_a=(State.FAILED, "no weights"))
    )
    assert (state.state, state.reason) == (State.FAILED, "step `head_a`: no weights")


def test_a_trunk_that_failed_after_it_served_fails_it() -> None:
    state = graph()
    state.update(steps_told(state))
    state.update(steps_told(state, trunk=(State.FAILED, "started 5 times")))
    assert (state.state, state.reason) == (State.FAILED, "step `trunk` is FAILED: started 5 times")


def test_a_head_that_failed_after_it_served_leaves_the_others() -> None:
    state = graph()
    state.update(steps_told(state))
    found = []
    for other in (State.READY, State.UNAVAILABLE, State.FAILED):
        state.update(steps_told(state, head_a=State.FAILED, head_b=other))
        found.append(state.state)
    assert found == [State.READY, State.UNAVAILABLE, State.FAILED]


NARROW = {**SIGNATURES, "trunk": signature({"x": 2}, {"features": 2})}


def test_steps_that_do_not_fit_fail_it_by_name() -> None:
    state = graph()
    state.update(steps_told(state, NARROW))
    reason = "; ".join(
        f"step `{head}`, input `features`: shape mismatch: expected FP32 [3], got FP32 [2] from `trunk.features`"
        for head in ("head_a", "head_b")
    )
    assert (state.state, state.reason, state.signature) == (State.FAILED, reason, None)
    state.update(steps_told(state, NARROW, head_b=State.UNAVAILABLE))
    assert (state.state, state.reason) == (State.FAILED, reason)


def test_a_new_signature_after_a_restart_makes_a_new_plan() -> None:
    state = graph()
    state.update(steps_told(state))
    before = state.plan
    state.update(steps_told(state))
    assert state.plan is before
    state.update(steps_told(state, {**SIGNATURES, "head_a": signature({"features": 3}, {"a": 5})}))
    assert state.signature is not None
    assert [spec.shape for spec in state.signature.outputs] == [(5,), (1,)]
    state.update(steps_told(state, NARROW))
    # The other step may be about to restart with what fits.
    assert (state.state, state.plan) == (State.UNAVAILABLE, None)
    state.update(steps_told(state))
    assert (state.state, state.plan) == (State.READY, before)


def test_what_an_operator_did_holds_whatever_its_steps_are_in() -> None:
    state = graph()
    state.update(steps_told(state))
    since_s = state.since_s
    state.hold(State.DRAINING, "it is being unloaded")
    state.update(steps_told(state))
    assert (state.state, state.reason, state.is_loaded) == (State.DRAINING, "it is being unloaded", False)
    assert state.since_s >= since_s
    assert state.route(1).kind == GraphKind(state.plan, False)
    state.release()
    state.update(steps_told(state))
    assert (state.state, state.reason, state.route(1).kind) == (State.READY, "all steps ready", GraphKind(state.plan))


def test_clients_are_told_of_a_step_what_its_own_clients_are() -> None:
    state = graph()
    for one, known in (
        (State.FAILED, without("head_a")),
        (State.LOADING, without("head_a")),
        (State.FAILED, SIGNATURES),
    ):
        steps = steps_told(
            state, known, head_a=(one, "OSError: no weights at /srv/m.py:3"), head_b=(State.UNAVAILABLE, "lost")
        )
        name = state.deployments["head_a"]
        state.update({**steps, name: msgspec.structs.replace(steps[name], failure="OSError: no weights")})
        client = unavailable(state.route(1)).message
        assert "OSError: no weights" in client
        assert "/srv" not in client
        assert "/srv" in state.route(1).reason


def config(**fields: Any) -> Deployment:
    return Deployment.model_validate({"model": "m:C", "versions": {"1": {}, "2": {"replicas": 2}}, **fields})


def versions_told(state: VersionsState, **states: State) -> None:
    """Let the versions be in these states, others READY."""
    state.update(
        {
            f"c.{version}": DeploymentRoute(f"c.{version}", states.get(f"v{version}", State.READY), "so", SIGNATURE)
            for version in state.config.versions
        }
    )


def shares(deployment: Deployment) -> tuple[dict[str, float], str]:
    traffic = deployment.shared_traffic
    return traffic.shares, traffic.default


def test_it_is_ready_while_its_default_version_is_and_says_which_other_is_not() -> None:
    state = VersionsState("c", config(traffic={"1": 0.9, "2": 0.1}))
    versions_told(state, v1=State.LOADING)
    assert (state.state, state.reason) == (State.LOADING, "version `1`: so")
    versions_told(state)
    assert (state.state, state.reason) == (State.READY, "all versions ready")
    versions_told(state, v2=State.FAILED)
    assert (state.state, state.reason) == (State.READY, "version `2` is FAILED: so")
    versions_told(state, v1=State.UNAVAILABLE)
    assert state.state is State.UNAVAILABLE


def test_what_gateway_workers_are_told_of_versions() -> None:
    state = VersionsState("c", config(traffic={"2": 1, "sticky": "X-User"}))
    versions_told(state)
    route = state.route(2)
    assert route.traffic == TrafficRoute({"1": 0.0, "2": 1.0}, "2", "X-User")
    state.adopt(config(traffic={"1": 1, "shadow": "2"}))
    told_later = TrafficRoute({"1": 1.0, "2": 0.0}, "1", shadow="2", before={"1": 0.0, "2": 1.0})
    assert state.route(2).traffic == told_later
    assert (route.has_replicas, route.signature is not None and route.signature.name) == (False, "c")


def test_without_traffic_the_first_version_answers_all() -> None:
    assert shares(config()) == ({"1": 1.0, "2": 0.0}, "1")


def test_a_promoted_version_gets_all_and_a_rollback_goes_back_to_what_was_before() -> None:
    state = VersionsState("c", config(traffic={"1": 0.9, "2": 0.1, "sticky": "X-User"}))
    with pytest.raises(Conflict, match="has not changed"):
        state.traffic_before(is_undo=False)
    state.adopt(state.promoted("2"))
    assert shares(state.config) == ({"1": 0.0, "2": 1.0}, "2")
    with pytest.raises(Conflict, match="expected a rollback as the last change"):
        state.traffic_before(is_undo=True)
    state.adopt(state.traffic_before(is_undo=False))
    assert shares(state.config) == ({"1": 0.9, "2": 0.1}, "1")
    assert state.config.shared_traffic.sticky == "X-User"


def test_a_second_rollback_does_not_give_a_failing_version_its_share_back() -> None:
    state = VersionsState("c", config(traffic={"1": 0.9, "2": 0.1}))
    state.adopt(state.default_alone())
    state.rolled_back = "version `2` lost its share by itself: 5 % of its requests failed (it had 10 %)"
    versions_told(state)
    assert state.reason == f"{state.rolled_back}; all versions ready"
    assert state.route(1).traffic.rolled_back == state.rolled_back  # type: ignore[union-attr]
    with pytest.raises(Conflict) as refused:
        state.traffic_before(is_undo=False)
    assert state.rolled_back in refused.value.message
    assert "`headwater rollback c --undo` takes it back and gives 90 % to 1, 10 % to 2" in refused.value.message
    versions_told(state, v1=State.LOADING)
    assert state.reason == f"{state.rolled_back}; version `1`: so"
    state.adopt(state.traffic_before(is_undo=True))
    assert (shares(state.config), state.rolled_back) == (({"1": 0.9, "2": 0.1}, "1"), "")


def test_a_shadow_that_is_promoted_or_gone_is_none_any_more_and_a_rollback_makes_it_one_again() -> None:
    state = VersionsState("c", config(traffic={"1": 1, "shadow": "2"}))
    state.adopt(state.promoted("2"))
    assert (shares(state.config), state.config.shared_traffic.shadow) == (({"1": 0.0, "2": 1.0}, "2"), "")
    state.adopt(state.traffic_before(is_undo=False))
    assert (shares(state.config), state.config.shared_traffic.shadow) == (({"1": 1.0, "2": 0.0}, "1"), "2")
    state.adopt(config(versions={"1": {}}))
    assert state.traffic_before(is_undo=False).shared_traffic.shadow == ""
    assert state.promoted("1").shared_traffic.shadow == ""


def test_what_can_not_be_promoted_or_gone_back_to() -> None:
    state = VersionsState("c", config(traffic={"2": 1}))
    with pytest.raises(Conflict, match="expected one of `1`, `2`, got '3'"):
        state.promoted("3")
    state.adopt(config(versions={"1": {}}))
    with pytest.raises(Conflict, match="version `2`, which had a share of the traffic then, is gone"):
        state.traffic_before(is_undo=False)


def test_a_default_without_a_share_that_is_gone_can_not_be_gone_back_to() -> None:
    state = VersionsState("c", config(traffic={"1": 1, "2": 0, "default": "2"}))
    state.adopt(config(versions={"1": {}}))
    with pytest.raises(Conflict, match="version `2`, which was the default then, is gone"):
        state.traffic_before(is_undo=False)
