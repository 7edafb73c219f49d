"""Finds tool calls in a model's answer as its text arrives.

Each model writes calls in the format that it was trained on. This module reads these formats:

- ``hermes`` (Hermes, Qwen): ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, repeated for each call;
- ``llama3`` (Llama 3.1 and later): ``{"name": "f", "parameters": {...}}`` at the beginning of an answer, or after
  ``<|python_tag|>``; further calls follow after ``;``;
- ``mistral``: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]``, in later models ``[TOOL_CALLS]f[ARGS]{...}``.

Text outside of calls is the answer's content, including text that only looks like a call; but see
`ToolUse.is_constrained`. A model's reasoning, ``<think>...</think>`` (``[THINK]...[/THINK]`` in some Mistral models),
is content, too. It is separated before the search for calls, because a call within the reasoning is only a thought.
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
from headwater_server.lm.text.answer_parts import CallPart
from headwater_server.lm.text.call_source import SPACE, CallSource, NoCall, Reading

__all__ = ["FORMATS", "CallFinder", "CallFormat", "ToolUse", "call_format"]

_MAX_HEAD: Final = 256
"""Maximum number of characters between ``[TOOL_CALLS]`` and the arguments."""

_HEAD: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(?:\w+\s*)?)?(?:\[ARGS\]\s*)?", re.ASCII)
"""The text between ``[TOOL_CALLS]`` and the arguments, with the function's name as its group."""


class CallFormat(NamedTuple):
    """A format of tool calls."""

    name: ToolParser
    opening: str
    """The mark before one or more calls, anywhere in the answer. Often a special token."""
    call_marks: tuple[str, ...]
    """Marks of calls that may be special tokens, including the opening."""
    is_bare: bool = False
    """Whether a call at the answer's beginning may lack the opening."""
    has_names: bool = False
    """Whether the template writes each call as the opening, the function's name and an object of arguments."""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    """The marks before and after the model's reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that may be special tokens. A text that is searched for calls must not omit them."""
        return self.call_marks + self.reasoning

    def new_id(self) -> str:
        """A new id for a call. Mistral's templates accept only ids of nine letters and digits."""
        return secrets.token_hex(5)[:9] if self.name == "mistral" else f"call_{secrets.token_hex(12)}"


FORMATS: Final[Mapping[ToolParser, CallFormat]] = {
    "hermes": CallFormat("hermes", "<tool_call>", ("<tool_call>", "</tool_call>")),
    "llama3": CallFormat("llama3", "<|python_tag|>", ("<|python_tag|>",), is_bare=True),
    "mistral": CallFormat("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
}


def call_format(template: str, parser: ToolParser | None = None) -> CallFormat | None:
    """The format in which a chat template writes calls; `None` if no name is configured, and the template doesn't use
    any supported format.

    Args:
        template: the source of the template, or of all the model's templates.
        parser: the configured name of the format; `None` to detect it.
    """
    if parser == "mistral" or (parser is None and "[TOOL_CALLS]" in template):
        mistral = FORMATS["mistral"]._replace(has_names="[ARGS]" in template)
        return mistral._replace(reasoning=("[THINK]", "[/THINK]")) if "[THINK]" in template else mistral
    if parser is not None:
        return FORMATS[parser]
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM use the same tags around XML, which is not supported.
        return None if "<function=" in template or "<arg_key>" in template else FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": dictionary of argument' in template:
        return FORMATS["llama3"]
    return None


class ToolUse(NamedTuple):
    """How the answers to a request are searched for calls."""

    format: CallFormat
    names: frozenset[str]
    """The functions that may be called. A call of another function is content."""
    is_constrained: bool = False
    """Whether a grammar restricts the model to valid calls. Their arguments can then be streamed before their end, and
    any other text is the rest of a truncated call, and is omitted."""
    only_first: bool = False
    """Whether calls after the first are omitted."""
    is_reasoning: bool = False
    """Whether answers begin within the model's reasoning."""

    def after(self, prompt: str) -> ToolUse:
        """The tool use for answers to this prompt. Some chat templates begin the model's reasoning at the end of the
        prompt."""
        return self._replace(is_reasoning=prompt.rstrip(SPACE).endswith(self.format.reasoning[0]))

    def finder(self) -> CallFinder:
        """A new finder for a single answer."""
        return CallFinder(self)


class CallFinder:
    """Separates the content and the calls of an answer. The division of the answer into pieces affects only the
    division of content and calls into parts.

    Whitespace around calls is not content, unless text follows. The parts of a call are returned once the call is
    complete and known to be valid, or as the text arrives if a grammar guarantees a valid call. Usage: `push` for each
    text, then `finish`; or only `read`.
    """

    def __init__(self, use: ToolUse) -> None:
        self._source = CallSource()
        self._out = _ParsedOutput(use)
        self._reading = _Reader(self._source, self._out, use).read()
        next(self._reading, None)

    @property
    def has_calls(self) -> bool:
        """Whether the answer has had a valid call so far."""
        return self._out.calls > 0

    def push(self, text: str) -> list[str | CallPart]:
        """Add text. Returns the content and the parts of calls that the text completes."""
        self._source.text += text
        next(self._reading, None)
        return self._out.taken()

    def read(self, text: str, *, is_last: bool) -> list[str | CallPart]:
        """Call `push`, and after the answer's last text also `finish`."""
        parts = self.push(text)
        return parts + self.finish() if is_last else parts

    def finish(self) -> list[str | CallPart]:
        """End the answer. Returns the held-back content and parts of calls."""
        self._source.is_done = True
        next(self._reading, None)
        return self._out.taken()


class _ParsedOutput:
    """Collects content and calls in order."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._found: list[str | CallPart] = []
        self._space = ""
        self._is_after_call = False
        self.calls = 0

    def taken(self) -> list[str | CallPart]:
        parts, self._found = self._found, []
        return parts

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
            id = self._use.format.new_id() if name else ""
            self._found.append(CallPart(self.calls - 1, name, arguments, id))


class _CallObject(msgspec.Struct):
    """The JSON object of a call. Only one of `arguments` and `parameters` is used: `arguments` if it is not empty."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _Reader:
    """Parses an answer in a given format. The methods that read calls raise `NoCall` if the text is no valid call.
    Calls that were read before stay in the output."""

    def __init__(self, source: CallSource, out: _ParsedOutput, use: ToolUse) -> None:
        self._source = source
        self._out = out
        self._use = use
        self._begin = 0
        """Index where the text begins that has been read, but not yet classified as content or a call."""
        marks = (use.format.opening,) if use.is_constrained else (use.format.opening, use.format.reasoning[0])
        self._marks = marks
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._may_be_bare = use.format.is_bare
        """Whether an object that follows may be a call without the opening."""

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
        """Read content up to the mark of calls or reasoning, and read the mark.

        Returns the mark. For a call without an opening, returns the opening; at the answer's end, an empty string.
        """
        source = self._source
        if self._may_be_bare:
            self._begin = source.place
            if (yield from source.skip_space()) and source.text[source.place] == "{":
                return self._use.format.opening
            source.place = self._begin
        while (match := self._mark.search(source.text, source.place)) is None:
            self._pass_on(*self._marks)
            if source.is_done:
                return ""
            yield
        self._add_content(source.text[source.place : match.start()])
        self._begin, source.place = match.span()
        return match[0]

    def _skip_reasoning(self, closing: str) -> Reading[None]:
        """Read the rest of the model's reasoning, which is content. Reasoning without an end extends to the answer's
        end."""
        source = self._source
        may_be_bare = self._may_be_bare
        while (place := source.text.find(closing, source.place)) < 0:
            self._pass_on(closing)
            if source.is_done:
                return
            yield
        end = place + len(closing)
        self._add_content(source.text[source.place : end])
        source.place = end
        self._may_be_bare = may_be_bare

    def _pass_on(self, *marks: str) -> None:
        """Add the unread text as content, except an end of the text that may be the beginning of a mark. Drops the text
        that was read from the source."""
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
        """Read a call that is a single object, and the mark `closing` after it. If the text ends before the end of this
        mark, the call is valid, too."""
        source = self._source
        if self._use.is_constrained:
            name = yield from self._constrained_name()
            yield from self._stream_arguments(name)
            yield from source.accept("}")
            if closing:
                yield from source.accept(closing)
        else:
            try:
                call = msgspec.json.decode((yield from source.read_object()), type=_CallObject)
            except (msgspec.MsgspecError, RecursionError):
                raise NoCall from None
            if closing and not (yield from source.accept(closing)):
                if not (source.is_done and closing.startswith(source.text[source.place :])):
                    raise NoCall
                source.place = len(source.text)
            self._add_call(call.name, bytes(call.arguments or call.parameters).decode() or "{}")
        self._begin = source.place

    def _constrained_name(self) -> Reading[str]:
        """Read an object up to its arguments, as the grammar lets the model write it. Returns the function's name."""
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
        """Add a call to the output while its arguments are being read. A call whose text ends early, or is nested too
        deeply, stays in the output, incomplete."""
        source = self._source
        if name not in self._use.names or not (yield from source.skip_space()) or source.text[source.place] != "{":
            raise NoCall
        self._out.begin_call(name)
        try:
            yield from source.read_object(self._out.add_arguments)
        finally:
            self._begin = source.place

    def _named_call(self) -> Reading[None]:
        """Read a call as Mistral's later models write it: a function's name, and an object of arguments. A single
        object with name and arguments is a call, too."""
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
        """Add a complete call to the output.

        Raises:
            NoCall: this function may not be called, or the arguments are not a JSON object.
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
    """Length of the longest end of `text` that is a beginning of `word`, but not the whole word."""
    start = text.find(word[0], max(0, len(text) - len(word) + 1))
    while start >= 0 and not word.startswith(text[start:]):
        start = text.find(word[0], start + 1)
    return len(text) - start if start >= 0 else 0
