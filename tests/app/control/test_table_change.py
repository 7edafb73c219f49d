"""What changes from one routing table to the next."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.control.messages import DOWNWARD, encode_line
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.control.table_change import DeploymentChange, TableChange

replicas = st.builds(ReplicaRoute, st.sampled_from("abcdefgh"), st.sampled_from(["/h", "/other"]), st.just("token"))
lists = st.lists(replicas, max_size=6, unique_by=lambda one: one.id).map(tuple)
deployments = st.builds(
    DeploymentRoute, st.sampled_from("xyz"), st.sampled_from(State), st.just(""), replicas=lists, retiring=lists
)
tables = st.builds(
    RoutingTable,
    st.lists(deployments, max_size=3, unique_by=lambda one: one.name).map(tuple),
    st.booleans(),
    st.booleans(),
    st.just(7),
    st.integers(0, 9),
)


@pytest.mark.slow
@given(tables, tables)
def test_a_change_leads_from_one_table_to_the_other(before: RoutingTable, after: RoutingTable) -> None:
    change = DOWNWARD.decode(encode_line(TableChange.between(before, after)))
    assert isinstance(change, TableChange)
    assert change.follows(before)
    assert change.applied(before) == after


def routes(count: int) -> tuple[ReplicaRoute, ...]:
    return tuple(ReplicaRoute(f"m-{number}", f"/run/m-{number}/h", "token") for number in range(count))


ALL = routes(100)
OTHER_TOKEN = msgspec.structs.replace(ALL[50], token="other")


@pytest.mark.parametrize(
    "after", [ALL[1:], (*ALL, *routes(101)[100:]), (*ALL[:50], OTHER_TOKEN, *ALL[51:])], ids=["gone", "new", "changed"]
)
def test_a_change_has_only_the_replicas_that_changed(after: tuple[ReplicaRoute, ...]) -> None:
    other = DeploymentRoute("other", State.READY)
    before = RoutingTable((DeploymentRoute("m", State.READY, replicas=ALL), other))
    now = RoutingTable((DeploymentRoute("m", State.READY, replicas=after), other), version=1)
    change = TableChange.between(before, now)
    (one,) = change.deployments
    assert (one.name, one.route, change.names) == ("m", None, None)
    assert len(one.replicas.gone) + len(one.replicas.changed) + len(one.replicas.new) == 1
    found = change.applied(before)
    assert found == now
    assert found.deployments[1] is other
    had = {id(one) for one in ALL}
    fresh = [replica for replica in found.deployments[0].replicas if id(replica) not in had]
    assert fresh == [*one.replicas.changed, *one.replicas.new]


def test_a_change_of_a_deployment_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a change of a known deployment, got a change of 'm'"):
        DeploymentChange("m").applied(None)
