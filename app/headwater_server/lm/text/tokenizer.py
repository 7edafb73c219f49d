"""The tokenizer of a language model's Hugging Face folder, without transformers (which imports torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import tokenizers

from headwater_server.codecs.faults import at
from headwater_server.errors import ConfigError
from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["Tokenizer"]

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _TokenizerFile(msgspec.Struct):
    """The part of ``tokenizer.json`` that this module reads itself, beside the library."""

    decoder: Any = None


class Tokenizer:
    """Converts text to ids and back, like transformers' ``AutoTokenizer``. Threads may share it.

    As in transformers 5, ``tokenizer.json`` decides where special tokens are added, and ``add_bos_token`` of
    ``tokenizer_config.json`` has no effect; decoded text isn't cleaned up (``clean_up_tokenization_spaces=False``).

    Args:
        folder: the model's folder. It must contain ``tokenizer.json``, and may contain ``tokenizer_config.json``,
            ``special_tokens_map.json``, ``chat_template.jinja`` and ``additional_chat_templates/*.jinja``.

    Raises:
        ConfigError: a file is missing, unreadable or wrong; the message names it.
    """

    special_tokens: Final[Mapping[str, str]]
    """The texts of the model's ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` and similar tokens, by these
    names."""
    chat_templates: Final[Mapping[str, str]]
    """Jinja templates by name. A template that has no name in the folder is ``default``. Empty if the model has no
    template."""
    texts: Final[TokenTexts]
    """The text that each id contributes to a decoded text."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        config = _object(folder / "tokenizer_config.json")
        self._tokenizer, decoder = _load(path)
        # The file's settings for truncation and padding are for training. A prompt is never truncated or padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
        tokens = _tokens(folder, config, self._tokenizer.get_added_tokens_decoder())
        self.special_tokens = {name: str(token) for name, token in tokens.named.items()}
        _add(self._tokenizer, tokens)
        self.chat_templates = _chat_templates(folder, config)
        self.texts = TokenTexts(self._tokenizer, decoder, f"{path}: decoder")

    def encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """The text's ids, with or without the special tokens that the model expects around a text.

        Raises:
            BadRequest: the text has a lone surrogate, so it isn't valid Unicode. The error names `field`.
        """
        try:
            # `encode` would hold the interpreter's lock for about a second per megabyte. The batch method releases it.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except TypeError as error:
            raise at(field, None, "expected Unicode text, got text with a lone surrogate") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence. Ids that are not in the vocabulary contribute no text."""
        # The batch method releases the interpreter's lock, as in `encode`.
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def entries(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's entry of each id, such as ``Ġthe``; `None` for ids that are not in the vocabulary."""
        return [self._tokenizer.id_to_token(id) for id in ids]


class _ConfiguredTokens(NamedTuple):
    """The tokens that ``tokenizer_config.json``, or in older folders ``special_tokens_map.json``, declares."""

    added: dict[int, tokenizers.AddedToken]
    """The tokens of ``added_tokens_decoder``, by their ids; without this setting, the added tokens of
    ``tokenizer.json``."""
    named: dict[str, tokenizers.AddedToken | str]
    """Tokens by names such as ``bos_token``."""
    extra: list[tokenizers.AddedToken | str]
    """Further special tokens, without names."""


def _load(path: Path) -> tuple[tokenizers.Tokenizer, object]:
    """Load the library's tokenizer, and the decoder's JSON; None if the file has no decoder.

    Raises:
        ConfigError: the file is missing, unreadable or wrong.
    """
    text = _text(path)
    if text is None:
        raise ConfigError(
            f"{path}: expected the tokenizer in this file, got a folder without it; transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it from a model's older files"
        )
    try:
        decoder = msgspec.json.decode(text, type=_TokenizerFile).decoder
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: expected a tokenizer in JSON, got this: {error}") from error
    try:
        return tokenizers.Tokenizer.from_str(text), decoder
    except Exception as error:  # the library raises plain `Exception`
        raise ConfigError(f"{path}: expected a tokenizer of the `tokenizers` library, got this: {error}") from error


def _text(path: Path) -> str | None:
    """A file's text; `None` if there is no such file.

    Raises:
        ConfigError: the file is unreadable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a readable file in UTF-8, got this: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if there is no such file.

    Raises:
        ConfigError: the file is unreadable, or not a JSON object.
    """
    text = _text(path)
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: expected a JSON object, got this: {error}") from error


def _tokens(
    folder: Path, config: Mapping[str, Any], base_tokens: Mapping[int, tokenizers.AddedToken]
) -> _ConfiguredTokens:
    path = folder / "tokenizer_config.json"
    merged = dict(config)
    added = dict(base_tokens)
    if (listed := config.get("added_tokens_decoder")) is not None:
        added = _listed(listed, f"{path}: added_tokens_decoder")
    else:
        # Folders written by transformers before version 4.34 have no `added_tokens_decoder`.
        merged |= {key: value for key, value in _object(folder / "special_tokens_map.json").items() if value}
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        merged |= extra
        extra = []
    if not isinstance(extra, list):
        raise ConfigError(f"{path}: extra_special_tokens: expected an array or an object, got {extra!r:.80}")
    of_text = {token.content: token for token in added.values()}
    named = {}
    for key in dict.fromkeys((*_NAMED_TOKENS, *merged)):
        # The type check excludes flags such as `add_bos_token`, which aren't tokens.
        if key.endswith("_token") and isinstance(value := merged.get(key), (str, dict)):
            token = _token(value, f"{path}: {key}")
            named[key] = of_text.get(str(token), token)
    return _ConfiguredTokens(added, named, [_token(value, f"{path}: extra_special_tokens") for value in extra])


def _listed(listed: object, name: str) -> dict[int, tokenizers.AddedToken]:
    """The tokens of ``added_tokens_decoder`` by their ids."""
    if not isinstance(listed, dict):
        raise ConfigError(f"{name}: expected an object, got {listed!r:.80}")
    added: dict[int, tokenizers.AddedToken] = {}
    for key, value in listed.items():
        token = _token(value, f"{name}.{key}")
        if not key.isdecimal() or isinstance(token, str):
            expected = "expected an id and an object with the token's 'content'"
            raise ConfigError(f"{name}.{key}: {expected}, got {value!r:.80}")
        added[int(key)] = token
    return added


def _token(value: object, name: str) -> tokenizers.AddedToken | str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ConfigError(f"{name}: expected a token or an object with its 'content', got {value!r:.80}")
    options = {key: value[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in value}
    if not all(isinstance(option, bool) for option in options.values()):
        raise ConfigError(f"{name}: expected {', '.join(options)} to be true or false, got {value!r:.200}")
    return tokenizers.AddedToken(value["content"], **options)


def _add(tokenizer: tokenizers.Tokenizer, tokens: _ConfiguredTokens) -> None:
    """Add the tokens in transformers' order, in which new tokens get new ids. Named tokens, and tokens that are given
    as texts only, become special."""
    ordered: list[tokenizers.AddedToken | str] = [token for _, token in sorted(tokens.added.items())]
    texts = {str(token) for token in (*ordered, *tokenizer.get_added_tokens_decoder().values())}
    for token in (*tokens.named.values(), *tokens.extra):
        if str(token) not in texts:
            texts.add(str(token))
            ordered.append(token)
    names = {str(token) for token in tokens.named.values()}
    for n, token in enumerate(ordered):
        if isinstance(token, str):
            ordered[n] = tokenizers.AddedToken(token, special=True)
        elif token.content in names:
            token.special = True
    tokenizer.add_tokens(ordered)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by name: of files, or, if there are no such files, of ``tokenizer_config.json``.

    Raises:
        ConfigError: a file is unreadable, or the configuration is wrong.
    """
    files = {path.stem: _text(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = _text(folder / "chat_template.jinja") or files.get("default")
    templates = {name: text for name, text in files.items() if text is not None}
    setting = config.get("chat_template")
    if templates or setting is None:
        return templates
    if isinstance(setting, str):
        return {"default": setting}
    if not isinstance(setting, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in setting
    ):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template: expected a template, or an array of objects with "
            f"'name' and 'template', got {setting!r:.80}"
        )
    return {entry["name"]: entry["template"] for entry in setting}
