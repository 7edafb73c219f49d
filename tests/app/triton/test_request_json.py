"""The JSON of requests for Triton."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.wire.sequence_step import STEP
from headwater_server.errors import BadRequest
from headwater_server.triton.request_json import MAX_OPEN, check_depth, sequence_parameters, with_parameters


class TestDepth:
    @pytest.mark.parametrize("body", [
        b'{"inputs":[{"data":[%b]}]}' % b",".join([b"[1]"] * 5000),
        b'{"x":[%b]}' % b",".join([b"[NaN]"] * 5000),
        b"[" * MAX_OPEN,
        b'{"text":"%b"}' % (b"[" * 100_000),
    ], ids=["rows", "not finite", "few", "in a text"])  # fmt: skip
    def test_what_is_wide_is_not_deep(self, body: bytes) -> None:
        check_depth(body)

    @pytest.mark.parametrize("start", [b"", b'{"a":NaN,"x":', b'{"a":"\t","x":', b'{"a":'])
    @pytest.mark.parametrize("opening", [b"[", b'{"a":'])
    def test_what_is_deep_is_refused(self, start: bytes, opening: bytes) -> None:
        with pytest.raises(BadRequest, match=r"^body: expected JSON"):
            check_depth(start + opening * 100_000)

    @given(st.recursive(st.none() | st.floats(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)))
    def test_json_of_few_levels_passes(self, value: object) -> None:
        text = json.dumps([value] * (MAX_OPEN + 1)).encode()
        check_depth(text)

    @given(st.binary(max_size=50))
    def test_other_bytes_are_no_fault_of_ours(self, text: bytes) -> None:
        with contextlib.suppress(BadRequest):
            check_depth(text + b"[" * (MAX_OPEN + 1))


class TestParameters:
    @pytest.mark.parametrize("are_fields", [False, True])
    @pytest.mark.parametrize(
        "body",
        [
            b'{"inputs":[{"data":[1.50,2]}],"parameters":{"sequence_id":7,"a":1}}',
            b'{"sequence_id":7,"inputs":[]}',
            b'{"inputs":[{"data":[NaN, Infinity]}],"parameters":{"sequence_id":7}}',
            b'{"inputs":[{"data":[18446744073709551616123]}],"parameters":{"sequence_id":7}}',
        ],
    )
    def test_parameters_are_read_and_added(self, body: bytes, are_fields: bool) -> None:
        before = sequence_parameters(body, None, are_fields=are_fields)
        assert before in ({"sequence_id": 7}, {})
        changed, length = with_parameters(body, None, {"sequence_start": True}, are_fields=are_fields)
        assert length is None
        assert sequence_parameters(changed, None, are_fields=are_fields) == {**before, "sequence_start": True}
        for kept in (b"NaN", b"Infinity", b"18446744073709551616123", b"1.50"):
            assert (kept in changed) == (kept in body)

    def test_binary_tensors_stay(self) -> None:
        body = b'{"parameters":{"sequence_id":7}}' + b"\0\1\2"
        changed, length = with_parameters(body, len(body) - 3, {STEP: 2}, are_fields=False)
        assert length is not None
        assert changed[length:] == b"\0\1\2"
        assert changed[:length] == b'{"parameters":{"sequence_id": 7, "headwater_step": 2}}'

    @given(st.binary(max_size=40))
    def test_what_is_no_json_has_no_parameters(self, body: bytes) -> None:
        assert isinstance(sequence_parameters(body, None, are_fields=False), dict)

    @pytest.mark.parametrize("body", [b"", b"[]", b"7", b'{"parameters":7}', b'{"parameters":null}', b"{"])
    def test_other_bodies_have_none(self, body: bytes) -> None:
        assert sequence_parameters(body, None, are_fields=False) == {}
