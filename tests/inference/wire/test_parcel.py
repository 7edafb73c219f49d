"""How the frames of a worker's streams travel together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.wire.parcel import Entry, decode_parcel, encode_parcel

entries = st.lists(st.tuples(st.text(max_size=9), st.none() | st.binary(max_size=40)), max_size=9)


@settings(deadline=None)
@given(entries)
def test_a_parcel_comes_back_as_it_was(said: list[Entry]) -> None:
    array = encode_parcel([(name, None if frame is None else memoryview(frame)) for name, frame in said])
    assert array.dtype == np.uint8
    assert array.shape == (1, array.size)
    assert decode_parcel(array.tobytes()) == said


@settings(deadline=None)
@given(entries.filter(bool), st.data())
def test_a_parcel_that_is_cut_short_is_none(said: list[Entry], data: st.DataObject) -> None:
    raw = encode_parcel(said).tobytes()
    with pytest.raises(ValueError, match="expected a parcel"):
        decode_parcel(raw[: data.draw(st.integers(0, len(raw) - 1))])


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91\x92\xa1\xff\xc0"], ids=repr)
def test_what_is_no_parcel_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="expected a parcel"):
        decode_parcel(raw)
