"""Which API key a lost replica counts against."""

from __future__ import annotations

from headwater_server.security.key_losses import REPLICAS, KeyLosses


def test_a_replica_counts_against_the_key_whose_requests_alone_it_had() -> None:
    losses = KeyLosses(10)
    losses.note("m-1", ["a"])
    losses.note("m-2", ["a", "b"])
    losses.note("m-3", ["a"])
    losses.note("m-3", ["b"])  # another worker lost it with requests of another key
    losses.note("m-4", [""])
    found = [losses.charge(replica, 0) for replica in ("m-1", "m-2", "m-3", "m-4", "m-5")]
    assert found == ["a", "", "", "", ""]


def test_a_replica_counts_against_the_key_of_a_request_that_ended_two() -> None:
    losses = KeyLosses(10)
    losses.note("m-1", ["a", "b"])
    losses.convict(["m-1", "m-2"], "a")
    assert [losses.charge(replica, 0) for replica in ("m-1", "m-2")] == ["a", "a"]


def test_a_report_after_the_conviction_changes_nothing() -> None:
    losses = KeyLosses(10)
    losses.convict(["m-1", "m-2"], "a")
    losses.note("m-2", ["b"])
    assert losses.charge("m-2", 0) == "a"


def test_no_more_lost_replicas_are_remembered_than_the_limit() -> None:
    losses = KeyLosses(10)
    for index in range(REPLICAS):
        losses.convict([f"m-{index}"], "a")
    losses.convict(["last"], "a")
    assert [losses.charge(replica, 0) for replica in ("m-0", "m-1", "last")] == ["", "a", "a"]
    losses.note("m-0", ["b"])
    assert losses.charge("m-0", 0) == "b"


def test_a_key_is_barred_while_its_losses_reach_the_limit_within_the_window() -> None:
    losses = KeyLosses(10)
    for index in range(3):
        losses.note(f"m-{index}", ["a"])
        losses.charge(f"m-{index}", index)
    assert losses.barred(4, 2) == {}
    assert losses.barred(3, 2) == {"a": 10}
    assert losses.barred(2, 2) == {"a": 11}
    assert losses.barred(3, 9.9) == {"a": 10}
    assert losses.barred(3, 10) == {}
    losses.lift()
    assert losses.barred(1, 2) == {}
