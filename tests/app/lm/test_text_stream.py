"""The text of one sequence: whole or in pieces the same, ended where it should, with the logarithms of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from headwater.engine import PromptLogprob
from headwater_server.lm.sequence import Tokens
from headwater_server.lm.text.detokenizer import offsets_in
from headwater_server.lm.text.stop_automaton import StopAutomaton
from headwater_server.lm.text_stream import TextPiece, TextStream, TokenLogprob
from tests.app.lm.scripted import EOS, ids_of, tiny_text

TEXTS = tiny_text().tokenizer.texts
MIXED = "a🙂👍🏽 e\u0301te\u0301 漢字 \ufffd größer\n"
IDS = st.lists(st.one_of(st.integers(0, 4095), st.integers(3, 260), st.sampled_from(ids_of(MIXED))), max_size=40)
STOPS = st.lists(
    st.one_of(st.text("ab 漢🙂\u0301\ufffd", min_size=1, max_size=4), st.sampled_from(["\n", "e", " "])), max_size=3
)
CUTS = st.lists(st.integers(1, 7), max_size=40)


def grouped(ids: Sequence[int], cuts: Sequence[int], finish: str, *, logprobs: bool = False) -> list[Tokens]:
    """The tokens as they might come."""
    groups: list[list[int]] = []
    rest = list(ids)
    for cut in cuts:
        if rest:
            groups.append(rest[:cut])
            rest = rest[cut:]
    if rest or not groups:
        groups.append(rest)
    pieces = [Tokens(group, [-1.0] * len(group) if logprobs else None) for group in groups]
    pieces[-1].finish = finish
    return pieces


def read(stream: TextStream, news: Sequence[Tokens]) -> list[TextPiece]:
    """The pieces up to the one with which the text ends."""
    pieces = []
    for tokens in news:
        pieces.append(stream.take(tokens))
        if pieces[-1].finish is not None:
            break
    assert pieces[-1].finish is not None
    assert all(piece.finish is None for piece in pieces[:-1])
    return pieces


def text_of(pieces: Sequence[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(IDS, IDS, CUTS, st.booleans(), st.booleans())
@example(ids_of("x = '"), ids_of("🙂"), [1] * 8, True, False)
def test_pieces_make_the_whole_decode(
    prompt: list[int], ids: list[int], cuts: list[int], skips: bool, logprobs: bool
) -> None:
    tokenizer = tiny_text().tokenizer
    stream = TextStream(TEXTS, prompt, skip_special_tokens=skips, logprobs=logprobs)
    pieces = read(stream, grouped(ids, cuts, "length", logprobs=logprobs))
    both = tokenizer.decode([*prompt, *ids], skip_special_tokens=skips)
    alone = tokenizer.decode(prompt, skip_special_tokens=skips)
    if not alone.endswith("\ufffd"):  # it ends within a character, perhaps
        assert alone + text_of(pieces) == both
    assert stream.completion_tokens == len(ids)
    assert pieces[-1].finish == "length"
    assert sum(len(piece.logprobs) for piece in pieces) == (len(ids) if logprobs else 0)


@given(IDS, CUTS, STOPS, st.booleans(), st.booleans())
@example(ids_of("a 漢字 b"), [1] * 20, ["漢字 "], False, True)
def test_grouping_changes_neither_text_nor_count(
    ids: list[int], cuts: list[int], stops: list[str], includes: bool, logprobs: bool
) -> None:
    def run(groups: list[int]) -> tuple[str, int, list[object], str | None]:
        stream = TextStream(TEXTS, [], stops=StopAutomaton(stops), include_stop=includes, logprobs=logprobs)
        pieces = read(stream, grouped(ids, groups, "length", logprobs=logprobs))
        entries: list[object] = [entry for piece in pieces for entry in piece.logprobs]
        return text_of(pieces), stream.completion_tokens, entries, stream.finish

    assert run(cuts) == run([]) == run([1] * len(ids))


@given(IDS, CUTS, STOPS)
def test_a_text_ends_before_its_first_stop_string(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    whole = text_of(read(TextStream(TEXTS, []), grouped(ids, cuts, "length")))
    stream = TextStream(TEXTS, [], stops=StopAutomaton(stops))
    text = text_of(read(stream, grouped(ids, cuts, "length")))
    found = min((place for stop in stops if (place := whole.find(stop)) >= 0), default=None)
    assert text == whole[:found]
    assert stream.finish == ("length" if found is None else "stop")


@given(IDS, CUTS, STOPS)
def test_logarithms_are_those_of_the_tokens_that_begin_in_the_text(
    ids: list[int], cuts: list[int], stops: list[str]
) -> None:
    stream = TextStream(TEXTS, [], stops=StopAutomaton(stops), logprobs=True)
    sent = 0
    for piece in read(stream, grouped(ids, cuts, "length", logprobs=True)):
        sent += len(piece.text)
        is_last_of_all = piece.finish == "length"
        assert all(entry.offset < sent or is_last_of_all for entry in piece.logprobs)
    if stream.finish == "length":
        return
    plain = TextStream(TEXTS, [], logprobs=True)
    offsets = [
        entry.offset for piece in read(plain, grouped(ids, cuts, "length", logprobs=True)) for entry in piece.logprobs
    ]
    again = TextStream(TEXTS, [], stops=StopAutomaton(stops), logprobs=True)
    told = [entry for piece in read(again, grouped(ids, cuts, "length", logprobs=True)) for entry in piece.logprobs]
    assert [entry.offset for entry in told] == [offset for offset in offsets if offset < sent]


def test_a_stop_token_has_no_text_but_counts() -> None:
    for logprobs in (False, True):
        ids = [*ids_of("a = 1"), ids_of("b")[0]]
        stream = TextStream(TEXTS, [], logprobs=logprobs)
        pieces = read(stream, grouped(ids, [], "stop", logprobs=logprobs))
        assert text_of(pieces) == "a = 1"
        assert (stream.completion_tokens, stream.finish) == (len(ids), "stop")
        assert sum(len(piece.logprobs) for piece in pieces) == (len(ids) - 1 if logprobs else 0)


def test_stops_are_shown_if_asked_for() -> None:
    ids = [*ids_of("a = 1"), EOS]
    stream = TextStream(TEXTS, [], include_stop=True, skip_special_tokens=False)
    assert text_of(read(stream, grouped(ids, [], "stop"))) == "a = 1<|im_end|>"
    stream = TextStream(TEXTS, [], stops=StopAutomaton(["= "]), include_stop=True)
    assert text_of(read(stream, grouped(ids, [1] * 9, "stop"))) == "a = "


def test_what_was_held_back_for_a_stop_string_comes_at_the_end() -> None:
    ids = ids_of("a STO")
    stream = TextStream(TEXTS, [], stops=StopAutomaton(["STOP"]))
    pieces = read(stream, grouped(ids, [1] * 9, "length"))
    assert text_of(pieces) == "a STO"
    assert pieces[-1].finish == "length"


def test_a_character_that_is_never_finished_is_told_as_such() -> None:
    ids = ids_of("🙂")[:-1]
    assert len(ids) >= 1
    assert text_of(read(TextStream(TEXTS, []), grouped(ids, [1] * 9, "length"))) == "\ufffd"


def test_no_string_stops_the_first_tokens() -> None:
    ids = ids_of("a = 1\nb = 2\nc = 3\n")
    least = len(ids_of("a = 1\nb"))
    for cuts in ([1] * len(ids), [len(ids)]):
        stream = TextStream(TEXTS, [], stops=StopAutomaton(["\n"]), min_tokens=least)
        assert text_of(read(stream, grouped(ids, cuts, "length"))) == "a = 1\nb = 2"
        assert stream.finish == "stop"


def test_a_prefix_stands_before_the_text_and_is_not_searched() -> None:
    stream = TextStream(TEXTS, [], prefix="STOP ", stops=StopAutomaton(["STOP"]))
    assert text_of(read(stream, grouped(ids_of("go STOP"), [2], "length"))) == "STOP go "
    stream = TextStream(TEXTS, [], prefix="prompt")
    assert stream.take(Tokens([], finish="length")) == TextPiece("prompt", (), "length")


def test_after_the_end_nothing_is_taken() -> None:
    stream = TextStream(TEXTS, [], stops=StopAutomaton(["="]))
    first = stream.take(Tokens(ids_of("a = 1")))
    assert (first.text, first.finish) == ("a ", "stop")
    taken = stream.completion_tokens
    assert stream.take(Tokens(ids_of("more"), finish="length")) == TextPiece("")
    assert stream.completion_tokens == taken


PROMPT = "a größer 漢字 🙂 <|im_end|>b"


def echoing(ids: Sequence[int], text: str) -> TextStream:
    return TextStream(TEXTS, ids, logprobs=True, prefix=text, offsets=offsets_in(text, ids, TEXTS))


def scored(ids: Sequence[int], cuts: Sequence[int]) -> list[Tokens]:
    """The prompt's log probabilities as they might come."""
    entries: list[PromptLogprob] = [(-float(place), ((place, -0.5),)) for place in range(1, len(ids))]
    parts = []
    for cut in [*cuts, len(entries)]:
        if entries:
            parts.append(Tokens([], prompt=entries[:cut]))
            entries = entries[cut:]
    return parts


@given(CUTS, CUTS)
def test_a_prompt_s_tokens_come_with_their_text_however_they_are_grouped(cuts: list[int], more: list[int]) -> None:
    ids, answer = [*ids_of(PROMPT), EOS], ids_of(MIXED)
    stream = echoing(ids, PROMPT)
    entries: list[TokenLogprob] = []
    text = ""
    pieces = read(stream, [*scored(ids, cuts), *grouped(answer, more, "length", logprobs=True)])
    for piece in pieces:
        begin, text = len(text), text + piece.text
        entries += piece.logprobs
        assert all(begin <= entry.offset <= len(text) for entry in piece.logprobs)
    assert text == PROMPT + tiny_text().tokenizer.decode(answer, skip_special_tokens=True)
    assert [entry.token for entry in entries] == [*ids, *answer]
    told = entries[: len(ids)]
    assert [entry.logprob for entry in told] == [None, *(-float(place) for place in range(1, len(ids)))]
    assert [entry.top for entry in told] == [(), *(((place, -0.5),) for place in range(1, len(ids)))]
    shown = [TEXTS.shown(entry.token)[0] for entry in told]
    for entry, following, token in zip(told, entries[1:], shown, strict=False):
        if not token.startswith("bytes:") and entry.offset < following.offset:
            assert text[entry.offset : following.offset] == token
    assert told[-1].offset == len(PROMPT)  # a special token that the text doesn't show
    assert stream.completion_tokens == len(answer)


def test_after_a_prompt_the_token_that_stops_the_answer_is_told_too() -> None:
    ids = ids_of("a b")
    pieces = read(echoing(ids, "a b"), [*scored(ids, []), *grouped([EOS], [], "stop", logprobs=True)])
    assert text_of(pieces) == "a b"
    assert [entry.token for piece in pieces for entry in piece.logprobs] == [*ids, EOS]


def test_a_prompt_of_one_token_has_no_log_probability() -> None:
    (piece,) = read(echoing(ids_of("a"), "a"), [Tokens([], finish="length")])
    assert (piece.text, [tuple(entry) for entry in piece.logprobs]) == ("a", [(*ids_of("a"), None, (), 0)])
