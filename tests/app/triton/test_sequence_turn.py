"""Which replica has which sequence, over several workers, and what is said of sequences that nobody has."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.wire.sequence_step import MOVED, STEP
from headwater_server.dispatch.sequence_table import SequenceRequest, SequenceTable
from headwater_server.errors import BadRequest, Conflict
from headwater_server.triton.sequence_turn import SequenceTurn, sequence_of

A, B = "models-1", "models-2"
REPLICAS = {A: None, B: None}


def request_of(id: int | str = 7, *, start: bool = False, end: bool = False, state: bool = False) -> SequenceRequest:
    return SequenceRequest("m", id, start, end, state)


def sent(table: SequenceTable, request: SequenceRequest, *replicas: str, among: dict[str, None] = REPLICAS) -> str:
    """Send a request to the replica that must have it, or else to the first of ``replicas``. Returns which got it."""
    turn = SequenceTurn(table, "d", request)
    owner = turn.owner(among)
    turn.note(owner or replicas[0], is_owner=owner is not None)
    turn.end()
    return owner or replicas[0]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"sequence_id": 7}, request_of()),
        ({"sequence_id": "a", "sequence_start": True, "sequence_end": True}, request_of("a", start=True, end=True)),
        ({}, None),
        ({"sequence_id": 0}, None),
        ({"sequence_id": ""}, None),
        ({"sequence_id": True}, None),
        ({"sequence_id": [7]}, None),
        ({"sequence_start": True}, None),
    ],
)
def test_what_a_request_says(parameters: dict[str, object], expected: SequenceRequest | None) -> None:
    assert sequence_of("m", parameters, has_state=False) == expected


class TestTable:
    def test_a_sequence_stays_with_its_replica_for_all_workers(self, tmp_path: Path) -> None:
        workers = [SequenceTable(tmp_path / "sequences") for _ in range(2)]
        assert sent(workers[0], request_of(start=True), B) == B
        assert [sent(worker, request_of(), A) for worker in workers] == [B, B]
        with pytest.raises(BadRequest, match="sequence 8 to model 'm' must specify the START flag"):
            sent(workers[1], request_of(8), A)

    def test_ids_are_of_a_model_and_of_a_type(self) -> None:
        table = SequenceTable()
        sent(table, request_of(7, start=True), A)
        for other in (request_of("7"), request_of(7)._replace(model="n")):
            with pytest.raises(BadRequest, match="must specify the START flag"):
                sent(table, other, A)

    def test_an_end_frees_the_place(self) -> None:
        table = SequenceTable()
        sent(table, request_of(start=True), A)
        sent(table, request_of(end=True), A)
        with pytest.raises(BadRequest, match="must specify the START flag"):
            sent(table, request_of(), A)

    def test_a_lost_sequence_is_said_once(self) -> None:
        table = SequenceTable()
        sent(table, request_of(start=True), A)
        with pytest.raises(
            Conflict, match=r"^sequence 7 of model `m` is lost: .*; begin it again with sequence_start$"
        ):
            sent(table, request_of(), B, among={B: None})
        with pytest.raises(BadRequest, match="must specify the START flag"):
            sent(table, request_of(), B, among={B: None})

    @given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([A, B])), max_size=40))
    def test_a_table_is_a_dictionary(self, requests: list[tuple[int, bool, bool, str]]) -> None:
        table = SequenceTable()
        expected: dict[int, str] = {}
        for id, start, end, replica in requests:
            request = request_of(id, start=start, end=end)
            if not start and id not in expected:
                with pytest.raises(BadRequest):
                    sent(table, request, replica)
                continue
            if start:
                expected[id] = replica
            assert sent(table, request, replica) == expected[id]
            if end:
                del expected[id]


class TestTurns:
    def test_a_request_with_implicit_state_is_numbered(self) -> None:
        table = SequenceTable()
        numbers = []
        for start in (True, False, False):
            turn = SequenceTurn(table, "d", request_of(start=start, state=True))
            owner = turn.owner(REPLICAS)
            turn.note(owner or A, is_owner=owner is not None)
            numbers.append(turn.parameters)
        assert numbers == [{STEP: 1}, {STEP: 2}, {STEP: 3}]

    def test_a_request_that_is_sent_again_keeps_its_number(self) -> None:
        table = SequenceTable()
        sent(table, request_of(start=True, state=True), A)
        turn = SequenceTurn(table, "d", request_of(state=True))
        assert turn.owner(REPLICAS) == A
        turn.note(A, is_owner=True)
        assert turn.owner({B: None}) is None
        turn.note(B, is_owner=False)
        assert turn.parameters == {STEP: 2, MOVED: True, "sequence_start": True}
        assert sent(table, request_of(state=True), A) == B

    def test_a_request_that_was_not_answered_leaves_its_number_to_the_next(self) -> None:
        table = SequenceTable()
        sent(table, request_of(start=True, state=True), A)
        for _ in range(2):
            turn = SequenceTurn(table, "d", request_of(state=True))
            turn.note(A, is_owner=True)
            assert turn.parameters == {STEP: 2}
            turn.give_up()

    def test_a_model_with_its_own_state_gets_nothing_more(self) -> None:
        turn = SequenceTurn(SequenceTable(), "d", request_of(start=True))
        turn.note(A, is_owner=False)
        assert turn.parameters == {}
