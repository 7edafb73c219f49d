"""Finds tool calls in a model's answer as its text arrives.

A model writes calls as it was trained to; these are the formats that are read here:

- ``hermes`` (Hermes, Qwen): ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, as often as there are calls;
- ``llama3`` (Llama 3.1 and later): ``{"name": "f", "parameters": {...}}`` where an answer begins, or after
  ``<|python_tag|>``; further calls after ``;``;
- ``mistral``: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]``, in later models ``[TOOL_CALLS]f[ARGS]{...}``.

Text outside of calls is the answer's content, and so is whatever only looks like a call. A model's reasoning,
``<think>...</think>`` (of some Mistral models ``[THINK]...[/THINK]``), is content, too: it is separated before calls
are looked for, because a call within it is only a thought.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
import orjson

from headwater.signature import ToolParser
from headwater_server.lm.text.call_source import SPACE, CallSource, NoCall, Reading

__all__ = ["FORMATS", "CallFinder", "CallFormat", "CallPart", "ToolUse", "call_format"]

_MAX_HEAD: Final = 256
"""Characters between ``[TOOL_CALLS]`` and the arguments."""

_HEAD: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(?:\w+\s*)?)?(?:\[ARGS\]\s*)?", re.ASCII)


class CallFormat(NamedTuple):
    """How a model writes calls."""

    name: ToolParser
    opening: str
    """Opens one or more calls wherever it stands; often a special token."""
    call_marks: tuple[str, ...]
    """What may be special tokens, and must not be left out of the text."""
    is_bare: bool = False
    """Whether a call may also stand at the answer's beginning without the opening."""
    has_names: bool = False
    """Whether the function's name stands before an object of arguments, and each call has an opening."""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    """What stands before and after the model's reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be special tokens, and must not be left out of a text that is searched for calls."""
        return self.call_marks + self.reasoning

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
        found = FORMATS["mistral"]._replace(has_names="[ARGS]" in template)
        return found._replace(reasoning=("[THINK]", "[/THINK]")) if "[THINK]" in template else found
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
    is_reasoning: bool = False
    """Whether an answer begins within the model's reasoning."""

    def after(self, prompt: str) -> ToolUse:
        """The same for answers to this prompt, at whose end some chat templates begin the model's reasoning."""
        return self._replace(is_reasoning=prompt.rstrip(SPACE).endswith(self.format.reasoning[0]))

    def finder(self) -> CallFinder:
        """For one answer."""
        return CallFinder(self)


class CallFinder:
    """Separates one answer's content and calls. How the answer is cut into pieces affects only how these are cut.

    Whitespace around calls is no content, unless text follows. A call's parts come when it is complete and known to be
    sound, or as the text comes if a grammar makes it so.
    """

    def __init__(self, use: ToolUse) -> None:
        self._source = CallSource()
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
        content = text.rstrip(SPACE)
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


class _Call(msgspec.Struct):
    """A call as JSON."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _Reader:
    """Reads an answer in one format."""

    def __init__(self, source: CallSource, out: _Output, use: ToolUse) -> None:
        self._source = source
        self._out = out
        self._use = use
        self._begin = 0
        """Where the text begins that has been read, and is neither content nor a call yet."""
        marks = (use.format.opening,) if use.is_constrained else (use.format.opening, use.format.reasoning[0])
        self._marks = marks
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._may_be_bare = use.format.is_bare
        """Whether an object that is next may be a call without the opening."""

    def read(self) -> Reading[None]:
        source = self._source
        begin, end = self._use.format.reasoning
        if self._use.is_reasoning:
            yield from self._skip_reasoning(end)
        while mark := (yield from self._find_mark()):
            if mark == begin:
                source.place = self._begin
                yield from self._skip_reasoning(end)
                continue
            self._may_be_bare = False
            with contextlib.suppress(NoCall):
                yield from self._read_calls()
            rest = source.text[self._begin : source.place]
            source.place -= _overlap(rest, begin)
            self._out.add_content(source.text[self._begin : source.place])
            if begin in self._marks and rest.rfind(begin) > rest.rfind(end):
                yield from self._skip_reasoning(end)
        self._out.end()

    def _read_calls(self) -> Reading[None]:
        source, name = self._source, self._use.format.name
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

    def _find_mark(self) -> Reading[str]:
        """Read content up to where calls or reasoning begin, and the mark there.

        Returns the mark: the opening also for a call without it, and an empty string at the answer's end.
        """
        source = self._source
        if self._may_be_bare:
            self._begin = source.place
            if (yield from source.skip_space()) and source.text[source.place] == "{":
                return self._use.format.opening
            source.place = self._begin
        while (found := self._mark.search(source.text, source.place)) is None:
            self._pass_on(*self._marks)
            if source.is_done:
                return ""
            yield
        self._add_content(source.text[source.place : found.start()])
        self._begin, source.place = found.span()
        return found[0]

    def _skip_reasoning(self, closing: str) -> Reading[None]:
        """Read the rest of the model's reasoning, which is content. One without an end takes the whole answer."""
        source = self._source
        may_be_bare = self._may_be_bare
        while (found := source.text.find(closing, source.place)) < 0:
            self._pass_on(closing)
            if source.is_done:
                return
            yield
        end = found + len(closing)
        self._add_content(source.text[source.place : end])
        source.place = end
        self._may_be_bare = may_be_bare

    def _pass_on(self, *marks: str) -> None:
        """Add the unread text as content, up to where one of these marks may begin at its end."""
        source = self._source
        rest = source.text[source.place :]
        held = 0 if source.is_done else max(_overlap(rest, mark) for mark in marks)
        self._add_content(rest[: len(rest) - held])
        source.text, source.place = rest[len(rest) - held :], 0

    def _add_content(self, text: str) -> None:
        self._may_be_bare = self._may_be_bare and not text.strip(SPACE)
        self._out.add_content(text)

    def _list(self, separator: str) -> Reading[None]:
        yield from self._call()
        while (yield from self._source.accept(separator)):
            yield from self._call()

    def _call(self, closing: str = "") -> Reading[None]:
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
                raise NoCall from None
            if closing and not (yield from source.accept(closing)):
                if not (source.is_done and closing.startswith(source.text[source.place :])):
                    raise NoCall
                source.place = len(source.text)
            self._add_call(call.name, bytes(call.arguments or call.parameters).decode() or "{}")
        self._begin = source.place

    def _constrained_name(self) -> Reading[str]:
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

    def _stream_arguments(self, name: str) -> Reading[None]:
        """Pass a call on while its arguments are being read."""
        source = self._source
        if name not in self._use.names or not (yield from source.skip_space()) or source.text[source.place] != "{":
            raise NoCall
        self._out.begin_call(name)
        try:
            yield from source.read_object(self._out.add_arguments)
        finally:
            self._begin = source.place

    def _named_call(self) -> Reading[None]:
        """Read a call as Mistral's later models write it: a name, and an object of arguments."""
        source = self._source
        yield from source.skip_space()
        if source.text.startswith("{", source.place):
            return (yield from self._call())
        while (brace := source.text.find("{", source.place, source.place + _MAX_HEAD)) < 0:
            if len(source.text) >= source.place + _MAX_HEAD:
                raise NoCall
            yield from source.wait()
        head = _HEAD.fullmatch(source.text, source.place, brace)
        if head is None:
            raise NoCall
        source.place = brace
        if self._use.is_constrained:
            yield from self._stream_arguments(head[1])
        else:
            self._add_call(head[1], (yield from source.read_object()))
        self._begin = source.place

    def _add_call(self, name: str, arguments: str) -> None:
        """Add a call that is complete.

        Raises:
            NoCall: there is no such function, or the arguments are no JSON object.
        """
        try:
            is_sound = name in self._use.names and isinstance(orjson.loads(arguments), dict)
        except orjson.JSONDecodeError:
            is_sound = False
        if not is_sound:
            raise NoCall
        self._out.begin_call(name)
        self._out.add_arguments(arguments)


def _overlap(text: str, word: str) -> int:
    """The most characters at the text's end with which the word begins, but not all of it."""
    start = text.find(word[0], max(0, len(text) - len(word) + 1))
    while start >= 0 and not word.startswith(text[start:]):
        start = text.find(word[0], start + 1)
    return len(text) - start if start >= 0 else 0
