"""Converts values that models write in other syntaxes than JSON into JSON text. Numbers keep their digits."""

from __future__ import annotations

import re
from typing import Final

import orjson

from headwater_server.lm.text.answer_parts import SPECIAL

__all__ = ["NUMBER", "NotLiteral", "bare_key_object", "json_string", "python_arguments", "python_value"]

NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS: Final = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_STRING: Final = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)
_WORD: Final = re.compile(r"[^\W\d]\w*")
_SPACES: Final = re.compile(r"\s*")
_ATOM: Final = re.compile(r"[^,{}\[\]]*")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_SHORT: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "", "\\": "\\", "'": "'",
    '"': '"', "/": "/",
}  # fmt: skip


class NotLiteral(ValueError):
    """The text is no literal."""


def json_string(text: str) -> str:
    """The text as a JSON string, without `SPECIAL`."""
    try:
        return orjson.dumps(text.replace(SPECIAL, "")).decode()
    except TypeError:  # it has a lone surrogate
        raise NotLiteral from None


def python_arguments(text: str) -> str:
    """Python's keyword arguments in parentheses, as a JSON object.

    Raises:
        NotLiteral: the text is something else.
    """
    literals = _Literals(text)
    literals.take("(")
    arguments = literals.arguments()
    literals.end()
    return arguments


def python_value(text: str) -> str:
    """A literal of Python, or of JSON, as JSON.

    Raises:
        NotLiteral: the text is something else.
    """
    literals = _Literals(text)
    value = literals.value()
    literals.end()
    return value


def bare_key_object(text: str, quote: str) -> str:
    """An object with bare keys, whose strings are raw text between two `quote`, as JSON.

    Raises:
        NotLiteral: the text is something else.
    """
    values = _BareKeys(text, quote)
    value = values.value()
    values.end()
    return value


class _LiteralText:
    """A text that is read from its beginning to its end. The caller bounds the nesting depth."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def accept(self, mark: str) -> bool:
        """Skip whitespace, and read this mark if it follows. Returns whether it followed."""
        match = _SPACES.match(self._text, self._place)
        assert match is not None  # the match may be empty
        self._place = match.end()
        is_next = self._text.startswith(mark, self._place)
        self._place += len(mark) * is_next
        return is_next

    def take(self, mark: str) -> None:
        """Skip whitespace, and read this mark."""
        if not self.accept(mark):
            raise NotLiteral

    def end(self) -> None:
        """Skip whitespace up to the end."""
        self.accept("")
        if self._place < len(self._text):
            raise NotLiteral

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what the pattern matches; an empty string if it doesn't match."""
        match = pattern.match(self._text, self._place)
        if match is None:
            return ""
        self._place = match.end()
        return match[0]


class _Literals(_LiteralText):
    def value(self) -> str:
        self.accept("")
        if (string := _STRING.match(self._text, self._place)) is not None:
            self._place = string.end()
            return json_string(_unescaped(string[0][1:-1]))
        if number := self.match(NUMBER):
            return number
        if self.accept("["):
            return self._array("]")
        if self.accept("("):
            return self._array(")")
        if self.accept("{"):
            return self._object()
        word = _WORDS.get(self.match(_WORD))
        if word is None:
            raise NotLiteral
        return word

    def arguments(self) -> str:
        """The keyword arguments up to the closing parenthesis."""
        items = []
        while not self.accept(")"):
            key = self.match(_WORD)
            self.take("=")
            items.append(f"{json_string(key)}: {self.value()}")
            if not self.accept(","):
                self.take(")")
                break
        return f"{{{', '.join(items)}}}"

    def _array(self, closing: str) -> str:
        items = []
        while not self.accept(closing):
            items.append(self.value())
            if not self.accept(","):
                self.take(closing)
                break
        return f"[{', '.join(items)}]"

    def _object(self) -> str:
        items = []
        while not self.accept("}"):
            key = self.value()
            self.take(":")
            key = key if key.startswith('"') else json_string(key)
            items.append(f"{key}: {self.value()}")
            if not self.accept(","):
                self.take("}")
                break
        return f"{{{', '.join(items)}}}"


class _BareKeys(_LiteralText):
    def __init__(self, text: str, quote: str) -> None:
        super().__init__(text)
        self._quote = quote

    def value(self) -> str:
        if self.accept(self._quote):
            return json_string(self._until(self._quote))
        if self.accept("{"):
            return self._object()
        if self.accept("["):
            return self._array()
        atom = self.match(_ATOM).strip()
        if NUMBER.fullmatch(atom):
            return atom
        return _WORDS.get(atom) or json_string(atom)

    def _object(self) -> str:
        items = []
        while not self.accept("}"):
            if self.accept(self._quote):
                key = self._until(self._quote)
                self.take(":")
            else:
                key = self._until(":").strip()
            items.append(f"{json_string(key)}: {self.value()}")
            if not self.accept(","):
                self.take("}")
                break
        return f"{{{', '.join(items)}}}"

    def _array(self) -> str:
        items = []
        while not self.accept("]"):
            items.append(self.value())
            if not self.accept(","):
                self.take("]")
                break
        return f"[{', '.join(items)}]"

    def _until(self, mark: str) -> str:
        end = self._text.find(mark, self._place)
        if end < 0:
            raise NotLiteral
        text, self._place = self._text[self._place : end], end + len(mark)
        return text


def _unescaped(text: str) -> str:
    """The text of a string literal. Unknown escapes stay as they are."""
    if "\\" not in text:
        return text
    text = _ESCAPE.sub(_character, text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits or match[4]:
        code = int(digits, 16) if digits else int(match[4], 8)
        return chr(code) if code <= 0x10FFFF else match[0]
    return _SHORT.get(match[5], match[0])
