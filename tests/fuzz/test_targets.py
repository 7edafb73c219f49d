"""The fuzzer's targets without the fuzzer: their seeds, and inputs that Hypothesis makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.draw import RECIPE
from tests.fuzz.targets import TARGETS, WORDS, seeds_of
from tests.fuzz.texts import EventReader

SEEDS = [(name, seed) for name in TARGETS for seed in seeds_of(name)]
RECIPES = st.binary(max_size=80).map(lambda raw: RECIPE + raw)
TEXTS = st.lists(st.sampled_from([*WORDS, ",", ":", "{", "}", "[", "]", " ", "\n", "1", "0.5", '""']), max_size=40)

HUGE: dict[str, bytes] = {
    "a field's name": b'{"%b":1}' % (b"a" * 200_000),
    "many fields": b"{%b}" % b",".join(b'"f%d":[1]' % n for n in range(5_000)),
    "a value": b'{"id":"%b"}' % (b"a" * 200_000),
    "a value within": b'{"parameters":{"config":"%b"},"model":{"a":"%b"}}' % (b"a" * 200_000, b"b" * 20_000),
    "depth": b'{"x":%b%b}' % (b"[" * 30_000, b"]" * 30_000),
    "depth without an end": b'{"parameters":' * 30_000,
    "a number": b'{"n":%b,"priority":1%b}' % (b"9" * 100_000, b"0" * 100_000),
}


@pytest.mark.parametrize(("name", "seed"), SEEDS, ids=[f"{name}/{seed.name}" for name, seed in SEEDS])
def test_seeds(name: str, seed: Path) -> None:
    is_accepted = TARGETS[name](seed.read_bytes())
    assert is_accepted or seed.suffix != ".json", "these are right requests"


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@given(data=RECIPES | st.binary(max_size=300) | TEXTS.map(lambda words: "".join(words).encode()))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_inputs_of_every_kind(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_damaged_seeds(name: str, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(seeds_of(name))).read_bytes()
    begin = data.draw(st.integers(0, len(seed)))
    end = data.draw(st.integers(begin, min(begin + 8, len(seed))))
    TARGETS[name](seed[:begin] + data.draw(st.binary(max_size=8)) + seed[end:])


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("what", HUGE)
def test_what_is_huge_is_told_in_few_words(what: str, name: str) -> None:
    TARGETS[name](HUGE[what])


def test_the_event_reader_reads_as_the_standard_says() -> None:
    raw = b": a comment\ndata: one\ndata:two\n\ndata\n\n\r\ndata: three\r\rdata: lost"
    for size in (1, 2, 7, 100):
        reader = EventReader()
        read = [event for at in range(0, len(raw), size) for event in reader.feed(raw[at : at + size])]
        assert read == ["one\ntwo", "", "three"]
