"""Text out of a token stream: the whole decode's, in pieces that are never taken back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headwater_server.lm.text.detokenizer import Detokenizer, offsets_in
from headwater_server.lm.text.token_texts import TokenTexts
from tests.app.lm.text.tokenizer_files import FAMILIES, decoder_json

TEXTS = {name: TokenTexts(tokenizer, decoder_json(tokenizer)) for name, tokenizer in FAMILIES.items()}
every_family = pytest.mark.parametrize("family", FAMILIES)


def ids_of(family: str) -> st.SearchStrategy[list[int]]:
    """Ids of encoded text, bytes and special tokens, in any order, some of which the vocabulary lacks."""
    tokenizer = FAMILIES[family]
    size = tokenizer.get_vocab_size()
    some_text = st.text(st.sampled_from("ab éö\u0301漢字🙂👍🏽\u200d\ufffd ▁<0x41>"), max_size=8)
    encoded = some_text.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    anything = st.lists(st.integers(0, size + 2), max_size=8)
    of_bytes = st.lists(st.sampled_from(range(min(size, 300))), max_size=8)
    chunks = st.lists(encoded | encoded.map(lambda ids: ids[:-1]) | anything | of_bytes, max_size=5)
    return chunks.map(lambda lists: [id_ for ids in lists for id_ in ids])


def expected(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """The whole decode without the prompt's."""
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    of_prompt = tokenizer.decode(list(prompt), skip_special_tokens=skip)
    common = next((n for n, (a, b) in enumerate(zip(whole, of_prompt, strict=False)) if a != b), None)
    return whole[min(len(whole), len(of_prompt)) if common is None else common :]


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(places)] or [ids]


@pytest.mark.slow
@every_family
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_pieces_are_the_whole_decode(family: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(family))
    prompt = data.draw(st.just([]) | ids_of(family))
    skip = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=8))
    detokenizer = Detokenizer(TEXTS[family], prompt, skip_special_tokens=skip)
    pieces = [detokenizer.push(part) for part in split(ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == expected(FAMILIES[family], prompt, ids, skip)


@pytest.mark.slow
@every_family
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_what_was_sent_stays_true_whatever_comes(family: str, data: st.DataObject) -> None:
    ids, more = data.draw(ids_of(family)), data.draw(ids_of(family))
    sent = Detokenizer(TEXTS[family]).push(ids)
    assert FAMILIES[family].decode([*ids, *more]).startswith(sent)


def ids_for(family: str, *tokens: str) -> list[int]:
    found = [FAMILIES[family].token_to_id(token) for token in tokens]
    return [id_ for id_ in found if id_ is not None]


def byte_ids(family: str, raw: bytes) -> list[int]:
    if family == "byte_fallback":
        return ids_for(family, *(f"<0x{byte:02X}>" for byte in raw))
    by_bytes = {TEXTS[family].token_bytes(id_): id_ for id_ in range(FAMILIES[family].get_vocab_size())}
    return [by_bytes[bytes([byte])] for byte in raw]


def pieces(family: str, sequence: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """What comes with each id, and at the end."""
    detokenizer = Detokenizer(TEXTS[family], prompt)
    return [*(detokenizer.push([id_]) for id_ in sequence), detokenizer.finish()]


def test_a_character_comes_when_its_last_byte_does() -> None:
    assert pieces("byte_level", byte_ids("byte_level", "é🙂".encode())) == ["", "é", "", "", "", "🙂", ""]


def test_a_cut_off_character_comes_at_the_end() -> None:
    assert pieces("byte_level", byte_ids("byte_level", "a🙂".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_invalid_bytes_come_as_soon_as_they_are() -> None:
    assert pieces("byte_level", byte_ids("byte_level", b"\xff\xe2a")) == ["\ufffd", "", "\ufffda", ""]


def test_a_true_replacement_character_is_not_held_back() -> None:
    assert pieces("byte_level", byte_ids("byte_level", "\ufffd".encode())) == ["", "", "\ufffd", ""]


def test_a_run_of_byte_tokens_comes_when_it_ends() -> None:
    sequence = [*byte_ids("byte_fallback", "🙂é".encode()), *ids_for("byte_fallback", "x")]
    assert pieces("byte_fallback", sequence) == ["", "", "", "", "", "", "🙂éx", ""]


def test_an_invalid_byte_spoils_its_whole_run_as_in_the_whole_decode() -> None:
    sequence = byte_ids("byte_fallback", "é".encode() + b"\xff")
    assert pieces("byte_fallback", sequence) == ["", "", "", "\ufffd\ufffd\ufffd"]


def test_the_first_words_space_is_there_only_after_a_prompt_with_text() -> None:
    sequence = ids_for("byte_fallback", "▁the", "▁fox")
    assert pieces("byte_fallback", sequence) == ["the", " fox", ""]
    assert pieces("byte_fallback", sequence, ids_for("byte_fallback", "<s>")) == ["the", " fox", ""]
    assert pieces("byte_fallback", sequence, ids_for("byte_fallback", "▁fox", "</s>")) == [" the", " fox", ""]


def test_an_answer_that_ends_a_prompts_character_has_that_character() -> None:
    smile = byte_ids("byte_level", "🙂".encode())
    assert pieces("byte_level", smile[2:], smile[:2]) == ["", "🙂", ""]


def test_a_prompt_that_ends_in_byte_tokens_is_not_repeated() -> None:
    smile = byte_ids("byte_fallback", "🙂".encode())
    assert pieces("byte_fallback", ids_for("byte_fallback", "x"), smile) == ["x", ""]
    assert pieces("byte_fallback", smile, smile) == ["", "", "", "", "🙂"]


@pytest.mark.slow
@every_family
def test_a_long_answer_is_no_more_work_per_token_than_a_short_one(family: str) -> None:
    # With work that grows with the answer, this would take minutes.
    sequence = [id_ % FAMILIES[family].get_vocab_size() for id_ in range(7, 700_000, 7)]
    assert "".join(pieces(family, sequence)) == FAMILIES[family].decode(sequence, skip_special_tokens=True)


@pytest.mark.slow
@every_family
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_each_token_of_a_text_begins_where_the_one_before_it_ends(family: str, data: st.DataObject) -> None:
    ids, skip = data.draw(ids_of(family)), data.draw(st.booleans())
    text = FAMILIES[family].decode(ids, skip_special_tokens=skip)
    offsets = offsets_in(text, ids, TEXTS[family])
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


@every_family
def test_words_begin_at_their_offsets(family: str) -> None:
    tokenizer, texts = FAMILIES[family], TEXTS[family]
    given = tokenizer.decode(tokenizer.encode("one two 漢 three", add_special_tokens=False).ids)
    assert "t" in given
    for special in (True, False):  # special tokens around a text have no text of their own
        ids = tokenizer.encode(given, add_special_tokens=special).ids
        offsets = offsets_in(given, ids, texts)
        for token, begin, end in zip(ids, offsets, [*offsets[1:], len(given)], strict=True):
            shown, _ = texts.shown(token)
            if texts.family == "byte_fallback" and isinstance(texts.pieces[token], int):
                continue  # a run of bytes begins at one place
            if token in texts.special_ids:
                assert begin == end or texts.holds_last
            elif shown and not shown.startswith("bytes:") and begin < end:
                assert shown.strip() == given[begin:end].strip()
