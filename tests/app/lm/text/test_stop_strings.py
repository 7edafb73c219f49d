"""Stop strings: where the text ends, and what is held back meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.codecs.faults import read_json
from headwater_server.errors import BadRequest
from headwater_server.lm.text.stop_automaton import StopAutomaton
from headwater_server.lm.text.stop_strings import Emitted, StopFinder, StopStrings

texts = st.text(st.sampled_from("ab\n🙂"), max_size=30)
some_stops = st.lists(st.text(st.sampled_from("ab\n🙂"), min_size=1, max_size=5), min_size=1, max_size=5)


def expected(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """As `str.find` over the whole text says."""
    found = [(text.find(stop), n) for n, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    place, n = min(found)
    return text[: place + len(stops[n]) * include], stops[n]


def run(finder: StopFinder, pieces: Sequence[str]) -> tuple[str, str | None]:
    sent = [finder.push(piece) for piece in pieces]
    sent.append(finder.finish())
    return "".join(text for text, _ in sent), sent[-1].stop


def test_a_stop_string_across_pieces_ends_the_text_before_it() -> None:
    finder = StopFinder(StopAutomaton(["\n\nUser:"]))
    assert finder.push("Hello.\n") == Emitted("Hello.", None)
    assert finder.push("\nUs") == Emitted("", None)
    assert finder.push("er: and") == Emitted("", "\n\nUser:")
    assert finder.push(" more") == Emitted("", "\n\nUser:")
    assert finder.finish() == Emitted("", "\n\nUser:")


@given(skipped=texts, text=texts, stops=some_stops)
def test_in_skipped_text_a_stop_string_may_begin_but_not_end(skipped: str, text: str, stops: list[str]) -> None:
    whole = skipped + text
    found = min(
        (place, n)
        for n, stop in enumerate([*stops, ""])
        for place in (range(len(whole)) if stop else [len(whole)])
        if whole.startswith(stop, place) and place + len(stop) > len(skipped) - (not stop)
    )
    finder = StopFinder(StopAutomaton(stops))
    sent = "".join(map(finder.skip, skipped))
    rest, stop = run(finder, list(text))
    assert (sent + rest, stop) == (whole[: found[0]], stops[found[1]] if found[1] < len(stops) else None)


def test_what_was_held_back_comes_when_it_is_no_stop_string() -> None:
    finder = StopFinder(StopAutomaton(["END"]))
    assert finder.push("an E") == Emitted("an ", None)
    assert finder.push("N") == Emitted("", None)
    assert finder.push("T") == Emitted("ENT", None)


def test_what_is_held_back_at_the_end_comes_with_finish() -> None:
    finder = StopFinder(StopAutomaton(["END"]))
    assert finder.push("EN") == Emitted("", None)
    assert finder.finish() == Emitted("EN", None)


def test_the_stop_string_itself_on_demand() -> None:
    assert StopFinder(StopAutomaton(["b"]), include_stop=True).push("abc") == Emitted("ab", "b")


def test_of_two_at_one_place_the_one_listed_first() -> None:
    assert run(StopFinder(StopAutomaton(["ab", "abc"])), ["xabc"]) == ("x", "ab")
    assert run(StopFinder(StopAutomaton(["abc", "ab"])), ["xa", "b", "c"]) == ("x", "abc")


def test_one_that_begins_earlier_is_waited_for_until_it_fails() -> None:
    finder = StopFinder(StopAutomaton(["abcd", "bc"]))
    assert finder.push("abc") == Emitted("", None)
    assert finder.push("x") == Emitted("a", "bc")


def test_one_that_began_earlier_but_never_ended_gives_way_at_the_end() -> None:
    finder = StopFinder(StopAutomaton(["abcd", "bc"]))
    assert finder.push("abc") == Emitted("", None)
    assert finder.finish() == Emitted("a", "bc")


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert run(StopFinder(StopAutomaton([])), ["a", "b"]) == ("ab", None)


@given(texts, some_stops, st.booleans(), st.lists(st.integers(0, 30)))
def test_any_text_cut_anywhere_ends_where_the_whole_would(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert run(StopFinder(StopAutomaton(stops), include_stop=include), pieces) == expected(text, stops, include)


@given(texts, some_stops)
def test_only_what_could_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(StopAutomaton(stops))
    sent, stop = finder.push(text)
    if stop is None:
        held = text[len(sent) :]
        assert len(held) < max(map(len, stops))
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop in sent for stop in stops)
        assert finder.finish() == expected(held, stops, False)


def instructions(work: Callable[[], object]) -> int:
    """The bytecode instructions that this takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("tail", ["", "a", "c"])
def test_the_work_for_a_character_does_not_depend_on_what_is_held_back(tail: str) -> None:
    def per_token(length: int) -> float:
        places = [(length // 2 if tail else length - 17) + n for n in range(16)]
        stops = [f"{'a' * place}b{tail * (length - 1 - place)}" for place in places]
        finder = StopFinder(StopAutomaton(stops))
        finder.push("a" * length)
        return instructions(lambda: [finder.push("a") for _ in range(2000)]) / 2000

    assert per_token(1024) <= min(1.2 * per_token(32), 600)


@pytest.mark.slow
def test_many_long_stop_strings_take_linear_time_to_prepare() -> None:
    def per_character(length: int) -> float:
        stops = [f"{'a' * (length - 1)}{chr(98 + n)}" for n in range(16)]
        return instructions(lambda: StopAutomaton(stops)) / (16 * length)

    assert per_character(1024) <= 1.2 * per_character(128)


@pytest.mark.parametrize(
    ("stops", "field", "message"),
    [
        (["a", ""], "stop[1]", "stop[1]: expected 1 to 1024 characters, got an empty string"),
        (["a" * 1025], "stop[0]", "stop[0]: expected 1 to 1024 characters, got 1025 characters"),
        (["a"] * 17, "stop", "stop: expected at most 16 strings, got 17"),
    ],
)
def test_bad_stop_strings_are_named(stops: list[str], field: str, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_json(json.dumps(stops).encode(), StopStrings, "stop")
    assert (caught.value.field, caught.value.message) == (field, message)
