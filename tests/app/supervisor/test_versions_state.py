"""The state of a deployment with versions, by theirs, and how requests are shared among them."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.signature import Signature, TensorSpec
from headwater_server.config.schema import Deployment
from headwater_server.control.route_kinds import TrafficRoute
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.errors import Conflict
from headwater_server.supervisor.versions_state import VersionsState

SIGNATURE = Signature("c.1", (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), max_batch_size=8)


def config(**fields: Any) -> Deployment:
    return Deployment.model_validate({"model": "m:C", "versions": {"1": {}, "2": {"replicas": 2}}, **fields})


def told(state: VersionsState, **states: State) -> None:
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
    told(state, v1=State.LOADING)
    assert (state.state, state.reason) == (State.LOADING, "version `1`: so")
    told(state)
    assert (state.state, state.reason) == (State.READY, "all versions ready")
    told(state, v2=State.FAILED)
    assert (state.state, state.reason) == (State.READY, "version `2` is FAILED: so")
    told(state, v1=State.UNAVAILABLE)
    assert state.state is State.UNAVAILABLE


def test_what_gateway_workers_are_told() -> None:
    state = VersionsState("c", config(traffic={"2": 1, "sticky": "X-User"}))
    told(state)
    route = state.route(2)
    assert route.traffic == TrafficRoute({"1": 0.0, "2": 1.0}, "2", "X-User")
    state.adopt(config(traffic={"1": 1, "shadow": "2"}))
    told_later = TrafficRoute({"1": 1.0, "2": 0.0}, "1", shadow="2", before={"1": 0.0, "2": 1.0})
    assert state.route(2).traffic == told_later
    assert (route.is_composite, route.signature is not None and route.signature.name) == (True, "c")


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
    told(state)
    assert state.reason == f"{state.rolled_back}; all versions ready"
    assert state.route(1).traffic.rolled_back == state.rolled_back  # type: ignore[union-attr]
    with pytest.raises(Conflict) as refused:
        state.traffic_before(is_undo=False)
    assert state.rolled_back in refused.value.message
    assert "`headwater rollback c --undo` takes it back and gives 90 % to 1, 10 % to 2" in refused.value.message
    told(state, v1=State.LOADING)
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
