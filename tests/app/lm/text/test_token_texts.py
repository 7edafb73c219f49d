"""What each id contributes to a text, and which decoders a stream can be decoded with."""

from __future__ import annotations

import gc
import weakref
from itertools import islice, product
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from headwater_server.errors import ConfigError
from headwater_server.lm.text.detokenizer import Detokenizer
from headwater_server.lm.text.token_texts import TokenTexts
from tests.app.lm.text.tokenizer_files import FAMILIES, decoder_json

TEXT = "größer 🙂 the fox, é漢"


def texts(family: str) -> TokenTexts:
    return TokenTexts(FAMILIES[family], decoder_json(FAMILIES[family]))


def id_of(token: str) -> int:
    id_ = FAMILIES["byte_fallback"].token_to_id(token)
    assert id_ is not None
    return id_


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_it_is_freed_with_its_last_reference_and_not_by_the_collector(family: str) -> None:
    gc.disable()
    try:
        of_family = texts(family)
        detokenizer = Detokenizer(of_family)
        gone = weakref.ref(of_family)
        del of_family
        ids = FAMILIES[family].encode("fox", add_special_tokens=False).ids
        assert detokenizer.push(ids) + detokenizer.finish() == "fox"  # which holds what it needs
        del detokenizer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "byte_fallback_metaspace", "word_piece"])
def test_the_bytes_of_a_texts_tokens_are_the_texts(family: str) -> None:
    tokenizer = FAMILIES[family]
    text = TEXT if family != "word_piece" else "The fox jumps"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    of_family = texts(family)
    assert b"".join(of_family.token_bytes(id_) for id_ in ids).decode().lstrip(" ") == text
    assert b"".join(of_family.token_bytes(id_) for id_ in ids).decode().lstrip(" ") == tokenizer.decode(ids).lstrip(" ")


def test_byte_level_knows_gpt_2s_character_for_every_byte() -> None:
    vocab = {character: n for n, character in enumerate(map(chr, range(0x250)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    of_family = TokenTexts(tokenizer, {"type": "ByteLevel"})
    for first, second in islice(product(range(0x250), range(0xA0, 0x250, 7)), 0, None, 5):
        raw = of_family.token_bytes(first) + of_family.token_bytes(second)
        assert raw.decode(errors="replace") == tokenizer.decode([first, second])


def test_a_token_that_is_a_part_of_a_character_is_shown_by_its_bytes() -> None:
    of_family = texts("byte_level")
    smile = FAMILIES["byte_level"].encode(" 🤖", add_special_tokens=False).ids
    shown = [of_family.shown(id_) for id_ in smile]
    assert b"".join(raw for _, raw in shown) == " 🤖".encode()
    assert any(text.startswith("bytes:") and "\\xf0" in text for text, _ in shown)
    assert texts("byte_fallback").shown(id_of("<0xE2>")) == ("bytes:\\xe2", b"\xe2")


def test_a_whole_token_is_shown_as_its_text() -> None:
    assert texts("byte_fallback").shown(id_of("▁fox")) == (" fox", b" fox")
    assert texts("byte_fallback").shown(id_of("</s>")) == ("</s>", b"</s>")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_id_that_the_vocabulary_lacks_has_no_text(family: str) -> None:
    assert texts(family).shown(FAMILIES[family].get_vocab_size() + 7) == ("", b"")


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BPE = {"type": "BPEDecoder", "suffix": "</w>"}


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ({"type": "CTC"}, "decoder.type: expected a decoder for streams"),
        ({"type": "Sequence", "decoders": [STRIP, {"type": "New"}]}, r"decoder.decoders\[1\].type"),
        ({"type": "Sequence"}, "decoder.decoders: expected an array"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "got ByteFallback"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {**STRIP, "stop": 1}]}, "got Strip"),
        ({"type": "Sequence", "decoders": [BPE, {"type": "ByteLevel"}]}, "BPEDecoder without ByteLevel"),
        (["ByteLevel"], "decoder: expected an object with a 'type'"),
    ],
)
def test_a_decoder_that_cannot_decode_a_stream_is_refused(decoder: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TokenTexts(FAMILIES["words"], decoder)
