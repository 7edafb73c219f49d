"""Small tokenizers of every family, made in memory, and model folders with one in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import Decoder

CORPUS: Final = [
    "The quick brown fox jumps over the lazy dog, isn't it? It can't be: 3.14 of 42.",
    "größer Straße naïve café; e\u0301te\u0301 a\u030a 漢字かな交じり文 한국어 🙂👍🏽👩‍👩‍👧 \ufffd �",
    "def push(self, ids):\n\treturn [x for x in ids]  # two  spaces\n\n",
] * 3

SPECIAL: Final = ["<s>", "</s>", "<unk>"]


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("é∂ 漢", special=False, normalized=False)])
    return tokenizer


def byte_fallback(decoder: Decoder | None = None) -> Tokenizer:
    """Like Llama 2, whose vocabulary has every byte as a token."""
    words = ["▁", "▁▁", "▁▁▁▁", "▁the", "the", "▁fox", "fo", "x", "a", ",", ".", "\n"]
    others = ["é", "漢", "\u0301", "\ufffd", "<0x41"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *others]
    vocab = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoder or llama_decoder()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def llama_decoder() -> Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def byte_fallback_metaspace() -> Tokenizer:
    """Byte fallback where the word separator is undone last, token by token."""
    return byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def unigram() -> Tokenizer:
    """Like T5: SentencePiece's Unigram with a Metaspace decoder and byte fallback's tokens, but none of its steps."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """Like BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def end_of_word() -> Tokenizer:
    """Like GPT-1: the end of a word is part of its last token, and the last word's isn't decoded to a space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words() -> Tokenizer:
    """No decoder: the tokens are joined with spaces."""
    vocab = {token: n for n, token in enumerate([*SPECIAL, "one", "two", "three", ""])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


FAMILIES: Final[Mapping[str, Tokenizer]] = {
    make.__name__: make()
    for make in (byte_level, byte_fallback, byte_fallback_metaspace, unigram, word_piece, end_of_word, words)
}
FAMILIES_OF_BYTES: Final = ("byte_level", "byte_fallback", "byte_fallback_metaspace")


def decoder_json(tokenizer: Tokenizer) -> Any:
    """The decoder as ``tokenizer.json`` has it."""
    return json.loads(tokenizer.to_str())["decoder"]


def model_folder(folder: Path, tokenizer: Tokenizer | None = None, **files: object) -> Path:
    """A folder as from the Hugging Face hub: ``tokenizer_config={...}`` becomes ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or FAMILIES["byte_level"]
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
