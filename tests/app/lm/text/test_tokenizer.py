"""A Hugging Face folder's tokenizer: ids and text as transformers has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater_server.errors import BadRequest, ConfigError
from headwater_server.lm.text.detokenizer import Detokenizer
from headwater_server.lm.text.tokenizer import Tokenizer
from tests.app.lm.text.tokenizer_files import FAMILIES, byte_level, model_folder

pytestmark = pytest.mark.heavy
BACKEND = {"tokenizer_class": "TokenizersBackend"}
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "names": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"},
    "asks for bos": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    "object": {"eos_token": {"__type": "AddedToken", "content": "</s>", **PLAIN}},
    "makes special": {"eos_token": "<tool>", "mask_token": None},
    "new names": {"bos_token": "<new>", "pad_token": "<pad>", "unk_token": "a"},
    "new extras": {"additional_special_tokens": ["<x>", {"__type": "AddedToken", "content": "<y>", **PLAIN}]},
    "extras by name": {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"},
    "listed": {
        "added_tokens_decoder": {
            "900": {"content": "<late>", **PLAIN},
            "800": {"content": "<early>", **PLAIN, "special": True},
            "0": {"content": "<s>", **PLAIN, "special": True},
        },
        "eos_token": "<late>",
        "extra_special_tokens": ["<early>", "<x>"],
    },
    "splits": {"bos_token": "<s>", "split_special_tokens": True},
    "cleans up": {"clean_up_tokenization_spaces": True},
}
TEXTS = ["", "the fox , isn 't <s>it</s>", " <tool> <late>x<image> <x><y> é∂ 漢 🙂👍🏽", "a\ufffd\n\n  b<pad><new>"]


def reference_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def check_against(tokenizer: Tokenizer, reference: Any, texts: list[str]) -> None:
    assert sum(entry is not None for entry in tokenizer.entries(range(len(reference) + 1000))) == len(reference)
    assert dict(tokenizer.special_tokens) == reference.special_tokens_map
    some_ids = st.lists(st.integers(0, len(reference) + 2), max_size=12)

    @given(st.sampled_from(texts) | st.text(max_size=20), some_ids, st.booleans())
    @settings(max_examples=60, deadline=None)
    def check(text: str, ids: list[int], flag: bool) -> None:
        encoded = tokenizer.encode(text, add_special_tokens=flag)
        assert encoded == reference.encode(text, add_special_tokens=flag)
        for sequence in (encoded, ids):
            expected = reference.decode(sequence, skip_special_tokens=flag, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(sequence, skip_special_tokens=flag) == expected
            stream = Detokenizer(tokenizer.texts, skip_special_tokens=flag)
            assert stream.push(sequence) + stream.finish() == expected

    check()


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_of_the_configuration_are_known_as_transformers_knows_them(config: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, tokenizer_config={**BACKEND, **CONFIGS[config]})
    check_against(Tokenizer(folder), reference_of(folder), TEXTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_encodes_and_decodes_as_with_transformers(family: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, FAMILIES[family], tokenizer_config={**BACKEND, "eos_token": "</s>"})
    check_against(Tokenizer(folder), reference_of(folder), TEXTS)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("byte_fallback", "LlamaTokenizer"), ("byte_level", "Qwen2Tokenizer"), ("byte_level", "GPT2Tokenizer")],
)
def test_the_models_own_classes_decode_alike(family: str, kind: str, tmp_path: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>", "pad_token": "<s>"}
    if family == "byte_fallback":
        names["unk_token"] = "<unk>"
    folder = model_folder(tmp_path, FAMILIES[family], tokenizer_config={"tokenizer_class": kind, **names})
    tokenizer, reference = Tokenizer(folder), reference_of(folder)
    ids = list(range(0, len(reference), 3))
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_the_shipped_models_tokenizer() -> None:
    from headwater.zoo.text import weights_folder

    folder = weights_folder()
    check_against(Tokenizer(folder), reference_of(folder), TEXTS)


def test_older_folders_have_their_special_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    names = {"bos_token": {"content": "<s>", **PLAIN}, "eos_token": "<tool>", "additional_special_tokens": ["<x>"]}
    folder = model_folder(tmp_path, tokenizer_config=BACKEND, special_tokens_map=names)
    check_against(Tokenizer(folder), reference_of(folder), TEXTS)


def test_a_tokenizer_file_is_enough(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_folder(tmp_path))
    ids = tokenizer.encode("the fox 🙂", add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the fox 🙂"
    assert (dict(tokenizer.chat_templates), dict(tokenizer.special_tokens)) == ({}, {})


def test_a_prompt_is_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    trained = byte_level()
    trained.enable_truncation(2)
    trained.enable_padding(length=50)
    tokenizer = Tokenizer(model_folder(tmp_path, trained))
    assert tokenizer.decode(tokenizer.encode("the quick fox", add_special_tokens=True), skip_special_tokens=False) == (
        "the quick fox"
    )


def test_chat_templates_by_name(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = model_folder(tmp_path, tokenizer_config={"chat_template": listed})
    assert Tokenizer(folder).chat_templates == {"default": "a", "tool_use": "b"}


def test_a_chat_template_in_a_file_stands_before_the_configurations(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, tokenizer_config={**BACKEND, "chat_template": "a"})
    (folder / "chat_template.jinja").write_text("b\n", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("c", encoding="utf-8")
    assert Tokenizer(folder).chat_templates == reference_of(folder).chat_template == {"default": "b\n", "tool_use": "c"}


def test_text_with_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="prompt: expected Unicode text, got text with a lone surrogate"):
        Tokenizer(model_folder(tmp_path)).encode("a\ud800", add_special_tokens=False)


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected the tokenizer in this file.*save_pretrained"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "expected a tokenizer in JSON, got this: "),
        ("tokenizer.json", "{}", "expected a tokenizer of the `tokenizers` library, got this: "),
        ("tokenizer_config.json", "[]", "expected a JSON object, got this: "),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template: expected a template, or an array"),
        ("tokenizer_config.json", '{"eos_token": {"content": 1}}', "eos_token: expected a token or an object"),
        ("tokenizer_config.json", '{"extra_special_tokens": [1]}', "extra_special_tokens: expected a token"),
        ("tokenizer_config.json", '{"extra_special_tokens": 1}', "extra_special_tokens: expected an array"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder: expected an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": "b"}}', "added_tokens_decoder.a: expected an id"),
        ("tokenizer_config.json", '{"eos_token": {"content": "a", "special": 1}}', "expected special to be true"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str, words: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Tokenizer(folder)
    assert str(caught.value).startswith(str(folder / name))
    assert words in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: expected a readable file in UTF-8"):
        Tokenizer(folder)


def test_a_decoder_that_cannot_decode_a_stream_is_refused_when_the_model_loads(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder\.type: expected a decoder for streams"):
        Tokenizer(folder)
