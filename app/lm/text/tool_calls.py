"""Finds tool calls in a model's answer as its text arrives.

A model writes calls as it was trained to; these are the formats that are read here:

- ``hermes`` (Hermes, Qwen): ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, as often as there are calls;
- ``llama3`` (Llama 3.1 and later): ``{"name": "f", "parameters": {...}}`` where an answer begins, or after
  ``<|python_tag|>``; further calls after ``;``;
- ``mistral``: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]``, in later models ``[TOOL_CALLS]f[ARGS]{...}``.

Text outside of calls is the answer's content, and so is whatever only looks like a call.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Mapping
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import orjson

from inference.signature import ToolParser

__all__ = ["FORMATS", "CallFinder", "CallFormat", "CallPart", "ToolUse", "call_format"]

MAX_DEPTH: Final = 128
"""Objects and arrays within each other in a call; one that has more is content."""
_MAX_HEAD: Final = 256
"""Characters between ``[TOOL_CALLS]`` and the arguments."""

_SPACE: Final = " \t\r\n"
_SPACES: Final = re.compile(f"[{_SPACE}]*")
_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\]')
_HEAD: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?", re.ASCII)

_T = TypeVar("_T")
_Reading: TypeAlias = Generator[None, None, _T]
"""Yields whenever it needs more text."""


class CallFormat(NamedTuple):
    """How a model writes calls."""

    name: ToolParser
    opening: str
    """Opens one or more calls wherever it stands; often a special token."""
    marks: tuple[str, ...]
    """What may be special tokens, and must not be left out of the text."""
    is_bare: bool = False
    """Whether a call may also stand at the answer's beginning without the opening."""
    has_names: bool = False
    """Whether the function's name stands before an object of arguments, and each call has an opening."""

    def new_id(self) -> str:
        """An id for a call. Mistral's templates take nine letters and digits, and nothing else."""
        return secrets.token_hex(5)[:9] if self.name == "mistral" else f"call_{secrets.token_hex(12)}"


FORMATS: Final[Mapping[ToolParser, CallFormat]] = {
    "hermes": CallFormat("hermes", "<tool_call>", ("<tool_call>", "</tool_call>")),
    "llama3": CallFormat("llama3", "<|python_tag|>", ("<|python_tag|>",), is_bare=True),
    "mistral": CallFormat("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
}


def call_format(template: str, parser: ToolParser | None = None) -> CallFormat | None:
    """The format that a chat template writes calls in; None if it has none of these.

    Args:
        template: the template's source.
        parser: the format's name, if that is known.
    """
    if parser == "mistral" or (parser is None and "[TOOL_CALLS]" in template):
        return FORMATS["mistral"]._replace(has_names="[ARGS]" in template)
    if parser is not None:
        return FORMATS[parser]
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM have the same tags around XML.
        return None if "<function=" in template or "<arg_key>" in template else FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": dictionary of argument' in template:
        return FORMATS["llama3"]
    return None


class CallPart(NamedTuple):
    """A part of a call."""

    number: int
    """The call's place among those of its answer, from 0."""
    name: str
    """The function's, in a call's first part; in the others empty."""
    arguments: str
    """The next characters of the arguments' JSON; none in the first part."""


class ToolUse(NamedTuple):
    """How the answers to a request are searched for calls."""

    format: CallFormat
    names: frozenset[str]
    """The functions that may be called; a call of another one is content."""
    is_constrained: bool = False
    """Whether a grammar lets the model write nothing but sound calls: their arguments need not wait for their end, and
    all other text is the rest of a call that was cut, and left out."""
    only_first: bool = False
    """Whether further calls are left out."""

    def finder(self) -> CallFinder:
        """For one answer."""
        return CallFinder(self)


class CallFinder:
    """Separates one answer's content and calls. How the answer is cut into pieces affects only how these are cut.

    Whitespace around calls is no content, unless text follows. A call's parts come when it is complete and known to be
    sound, or as the text comes if a grammar makes it so.
    """

    def __init__(self, use: ToolUse) -> None:
        self._source = _Source()
        self._out = _Output(use)
        self._reading = _Reader(self._source, self._out, use).read()
        next(self._reading, None)

    @property
    def has_calls(self) -> bool:
        """Whether there was a call so far."""
        return self._out.calls > 0

    def push(self, text: str) -> list[str | CallPart]:
        """Add text; returns the content and parts of calls that it completes."""
        self._source.text += text
        next(self._reading, None)
        return self._out.taken()

    def read(self, text: str, *, is_last: bool) -> list[str | CallPart]:
        """`push`, and if it is the answer's last text, `finish`."""
        found = self.push(text)
        return found + self.finish() if is_last else found

    def finish(self) -> list[str | CallPart]:
        """End the answer; returns what was held back."""
        self._source.is_done = True
        next(self._reading, None)
        return self._out.taken()


class _NoCall(Exception):
    """What has been read is no call."""


class _Output:
    """Content and calls in order."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._found: list[str | CallPart] = []
        self._space = ""
        self._is_after_call = False
        self.calls = 0

    def taken(self) -> list[str | CallPart]:
        found, self._found = self._found, []
        return found

    def add_content(self, text: str) -> None:
        if self._use.is_constrained:
            return
        content = text.rstrip(_SPACE)
        if content:
            self._found.append(self._space + content)
            self._space = ""
            self._is_after_call = False
        self._space += text[len(content) :]

    def end(self) -> None:
        if self._space and not self._is_after_call:
            self._found.append(self._space)

    def begin_call(self, name: str) -> None:
        self.calls += 1
        self._is_after_call = True
        self._add(name, "")

    def add_arguments(self, text: str) -> None:
        if text:
            self._add("", text)

    def _add(self, name: str, arguments: str) -> None:
        if self.calls == 1 or not self._use.only_first:
            self._found.append(CallPart(self.calls - 1, name, arguments))


class _Source:
    """Text of which more may come, and the place up to which it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.is_done = False

    def wait(self) -> _Reading[None]:
        """Wait for more text.

        Raises:
            _NoCall: there is none.
        """
        if self.is_done:
            raise _NoCall
        yield

    def skip_space(self) -> _Reading[bool]:
        """Whether anything follows the whitespace here."""
        while True:
            found = _SPACES.match(self.text, self.place)
            assert found is not None  # it may be empty
            self.place = found.end()
            if self.place < len(self.text):
                return True
            if self.is_done:
                return False
            yield

    def accept(self, word: str) -> _Reading[bool]:
        """Whether this word is next, after whitespace; if so, it has been read."""
        yield from self.skip_space()
        while not (is_next := self.text.startswith(word, self.place)):
            if self.is_done or not word.startswith(self.text[self.place :]):
                break
            yield
        self.place += len(word) * is_next
        return is_next

    def expect(self, *words: str) -> _Reading[None]:
        """Read one of these words.

        Raises:
            _NoCall: none of them is next.
        """
        for word in words:
            if (yield from self.accept(word)):
                return
        raise _NoCall

    def read_object(self, on_part: Callable[[str], None] | None = None) -> _Reading[str]:
        """The text of a JSON object that is next, after whitespace: up to its last bracket, and not checked further.

        Args:
            on_part: called with each part of it.

        Raises:
            _NoCall: there is none, or it has no end.
        """
        yield from self.expect("{")
        start = passed = self.place - 1
        depth, is_inside = 1, False
        while depth:
            found = (_INSIDE if is_inside else _OUTSIDE).search(self.text, self.place)
            if found is None:
                self.place = max(self.place, len(self.text))  # it may lie behind a backslash that is last
                if on_part is not None:
                    on_part(self.text[passed:])
                    passed = len(self.text)
                if self.is_done:
                    self.place = len(self.text)
                yield from self.wait()
                continue
            self.place = found.end()
            if is_inside:
                is_inside = found[0] != '"'
                self.place += is_inside
            elif found[0] == '"':
                is_inside = True
            else:
                depth += 1 if found[0] in "{[" else -1
                if depth > MAX_DEPTH:
                    raise _NoCall
        if on_part is not None:
            on_part(self.text[passed : self.place])
        return self.text[start : self.place]


class _Call(msgspec.Struct):
    """A call as JSON."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _Reader:
    """Reads an answer in one format."""

    def __init__(self, source: _Source, out: _Output, use: ToolUse) -> None:
        self._source = source
        self._out = out
        self._use = use
        self._begin = 0
        """Where the text begins that has been read, and is neither content nor a call yet."""

    def read(self) -> _Reading[None]:
        source, name = self._source, self._use.format.name
        is_start = self._use.format.is_bare
        while (yield from self._find_opening(is_start)):
            is_start = False
            try:
                if name == "hermes":
                    yield from self._call("</tool_call>")
                elif name == "llama3":
                    yield from self._list(";")
                elif (yield from source.accept("[")):
                    yield from self._list(",")
                    if (yield from source.accept("]")):
                        self._begin = source.place
                else:
                    yield from self._named_call()
            except _NoCall:
                pass
            self._out.add_content(source.text[self._begin : source.place])
        self._out.end()

    def _find_opening(self, is_start: bool) -> _Reading[bool]:
        """Read content up to where calls may begin; False at the answer's end.

        Args:
            is_start: whether an object that is next may be a call without the opening.
        """
        source, opening = self._source, self._use.format.opening
        if is_start and (yield from source.skip_space()) and source.text[source.place] == "{":
            return True
        if is_start:
            source.place = 0
        while (found := source.text.find(opening, source.place)) < 0:
            rest = source.text[source.place :]
            held = 0 if source.is_done else _overlap(rest, opening)
            self._out.add_content(rest[: len(rest) - held])
            source.text, source.place = rest[len(rest) - held :], 0
            if source.is_done:
                return False
            yield
        self._out.add_content(source.text[source.place : found])
        self._begin, source.place = found, found + len(opening)
        return True

    def _list(self, separator: str) -> _Reading[None]:
        yield from self._call()
        while (yield from self._source.accept(separator)):
            yield from self._call()

    def _call(self, closing: str = "") -> _Reading[None]:
        """Read a call in one object."""
        source = self._source
        if self._use.is_constrained:
            name = yield from self._constrained_name()
            yield from self._stream_arguments(name)
            yield from source.accept("}")
            if closing:
                yield from source.accept(closing)
        else:
            try:
                call = msgspec.json.decode((yield from source.read_object()), type=_Call)
            except (msgspec.MsgspecError, RecursionError):
                raise _NoCall from None
            if closing and not (yield from source.accept(closing)):
                if not (source.is_done and closing.startswith(source.text[source.place :])):
                    raise _NoCall
                source.place = len(source.text)
            self._add_call(call.name, bytes(call.arguments or call.parameters).decode() or "{}")
        self._begin = source.place

    def _constrained_name(self) -> _Reading[str]:
        """Read an object up to its arguments, written as a grammar has it."""
        source = self._source
        for word in ("{", '"name"', ":", '"'):
            yield from source.expect(word)
        while (end := source.text.find('"', source.place)) < 0:
            yield from source.wait()
        name = source.text[source.place : end]
        source.place = end + 1
        yield from source.expect(",")
        yield from source.expect('"arguments"', '"parameters"')
        yield from source.expect(":")
        return name

    def _stream_arguments(self, name: str) -> _Reading[None]:
        """Pass a call on while its arguments are being read."""
        source = self._source
        if name not in self._use.names or not (yield from source.skip_space()) or source.text[source.place] != "{":
            raise _NoCall
        self._out.begin_call(name)
        try:
            yield from source.read_object(self._out.add_arguments)
        finally:
            self._begin = source.place

    def _named_call(self) -> _Reading[None]:
        """Read a call as Mistral's later models write it: a name, and an object of arguments."""
        source = self._source
        yield from source.skip_space()
        if source.text.startswith("{", source.place):
            return (yield from self._call())
        while (brace := source.text.find("{", source.place, source.place + _MAX_HEAD)) < 0:
            if len(source.text) >= source.place + _MAX_HEAD:
                raise _NoCall
            yield from source.wait()
        head = _HEAD.fullmatch(source.text, source.place, brace)
        if head is None:
            raise _NoCall
        source.place = brace
        if self._use.is_constrained:
            yield from self._stream_arguments(head[1])
        else:
            self._add_call(head[1], (yield from source.read_object()))
        self._begin = source.place

    def _add_call(self, name: str, arguments: str) -> None:
        """Add a call that is complete.

        Raises:
            _NoCall: there is no such function, or the arguments are no JSON object.
        """
        try:
            is_sound = name in self._use.names and isinstance(orjson.loads(arguments), dict)
        except orjson.JSONDecodeError:
            is_sound = False
        if not is_sound:
            raise _NoCall
        self._out.begin_call(name)
        self._out.add_arguments(arguments)


def _overlap(text: str, word: str) -> int:
    """The most characters at the text's end with which the word begins, but not all of it."""
    start = text.find(word[0], max(0, len(text) - len(word) + 1))
    while start >= 0 and not word.startswith(text[start:]):
        start = text.find(word[0], start + 1)
    return len(text) - start if start >= 0 else 0
