"""Row reports: what a replica encodes, the gateway reads."""

from __future__ import annotations

import pytest

from headwater.errors import OutputMismatch
from headwater.wire.report import MAX_MESSAGE_BYTES, RowReport, Status, decode_reports, encode_reports

MISMATCH = OutputMismatch("y", 2, "FP32", (2, 0))


@pytest.mark.parametrize("message", ["", "no", "é" * MAX_MESSAGE_BYTES])
def test_an_output_at_fault_comes_as_data_whatever_the_message(message: str) -> None:
    failed = RowReport(Status.BAD_OUTPUT, message, MISMATCH)
    sent = [RowReport(Status.OK), failed, RowReport(Status.RAISED, "ValueError: no")]
    rows = decode_reports(encode_reports(sent, 5).tobytes(), 3).rows
    assert (rows[0], rows[2]) == (sent[0], sent[2])
    assert (rows[1].mismatch, rows[1].message[:900]) == (MISMATCH, message[:900])
    assert decode_reports(encode_reports([failed] * 2, 5).tobytes(), 2).rows[1].mismatch == MISMATCH


def test_a_message_with_zeros_has_no_data() -> None:
    (row,) = decode_reports(encode_reports([RowReport(Status.RAISED, "a\0{}")], 5).tobytes(), 1).rows
    assert row == RowReport(Status.RAISED, "a{}")
