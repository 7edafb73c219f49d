"""Reads tool calls in the text of a model's answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import msgspec

from headwater_server.lm.text.answer_parts import SPECIAL
from headwater_server.lm.text.call_source import JSON, PYTHON, CallSource, CutShort, NoCall, Reading, quoting
from headwater_server.lm.text.pair_values import loaded, property_schema, repaired, typed
from headwater_server.lm.text.python_literals import NotLiteral, bare_key_object, json_string, python_arguments
from headwater_server.lm.text.tool_calls import CallFormat, CallTags, ToolUse

__all__ = ["CallReader"]

_MAX_HEAD: Final = 1024
"""Maximum number of characters of a function's name and what belongs to it."""
_MISTRAL: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(?:(\w+)\s*)?)?(?:\[ARGS\]\s*)?", re.ASCII)
"""The text between ``[TOOL_CALLS]`` and the arguments, with the function's name and the call's id as its groups."""
_BARE: Final = re.compile(
    r'\s*(?:\[\s*)?(?:\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"|([\w.-]+)\()'
)
"""The beginning of a call without a mark, with the function's name as a group."""
_NAME: Final = re.compile(r"[\w.\s-]*")
_ATTRIBUTES: Final = re.compile(r'([^"]*)"(?: \w+="([^"]*)")?\s*/?')
"""The rest of a tag after the quote that begins its first attribute, with two attributes' values as its groups."""


class _CallObject(msgspec.Struct):
    """The JSON object of a call. Only one of `arguments` and `parameters` is used: `arguments` if it is not empty."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class CallReader:
    """Reads calls from a source. The methods raise `NoCall` if the text is no valid call. Calls that were read before
    stay.

    Args:
        source: the answer's text.
        use: the functions that may be called.
        format: the format of calls as `CallFormat.spelled` returns it.
        add: called with function, arguments and id of each whole call, or with the parts of a call that a grammar makes
            sound: the name first, then parts of the arguments without a name. The id is empty unless the model writes
            ids.
    """

    def __init__(
        self,
        source: CallSource,
        use: ToolUse,
        format: CallFormat,
        add: Callable[[str, str, str], None],
    ) -> None:
        self._source = source
        self._use = use
        self._format = format
        self._add = add
        sections = {tags.section: tags for tags in format.tags if tags.section}
        calls = {tags.call: tags for tags in format.tags if tags.call}
        self._tags = {**calls, **sections}
        self.openings = tuple(self._tags)
        """The marks before calls. No other text can be a call, but see `CallFormat.bare`."""

        self.line_openings = frozenset(tags.call for tags in format.tags if tags.section)
        """Those of the openings that are calls only at the beginning of a line, unless they are tokens."""

    def begins_call(self, text: str) -> bool:
        """Whether a text that the limit has cut began a call without a mark."""
        match = _BARE.match(text)
        return match is not None and (match[1] or match[2]) in self._use.tools

    def read(self, opening: str) -> Reading[None]:
        """Read the calls after this mark; an empty mark is that of calls that begin the answer."""
        tags = self._tags[opening] if opening else self._format.tags[0]
        if opening != tags.section or not tags.section:
            yield from self._call(tags, opening)
            if tags.section_end:
                yield from self._source.accept(tags.section_end)
            return
        while True:
            _, mark = yield from self._source.until(tags.call, tags.section_end)
            if mark == tags.section_end:
                return
            yield from self._call(tags, mark)

    def read_arguments(self, name: str) -> Reading[None]:
        """Read a JSON object of arguments."""
        if name not in self._use.tools:
            raise NoCall
        yield from self._arguments(name, "")

    def _call(self, tags: CallTags, opening: str) -> Reading[None]:
        try:
            yield from self._call_of_kind(tags, opening)
        except NotLiteral:
            raise NoCall from None

    def _call_of_kind(self, tags: CallTags, opening: str) -> Reading[None]:
        kind = self._format.kind
        if kind == "objects":
            yield from self._objects(tags, opening)
        elif kind == "mistral":
            yield from self._mistral()
        elif kind == "pairs":
            yield from self._pairs(tags)
        elif kind == "python":
            yield from self._python(tags)
        elif kind == "keys":
            yield from self._keys(tags)
        else:
            yield from self._named(tags)

    # Calls as JSON

    def _objects(self, tags: CallTags, opening: str) -> Reading[None]:
        source = self._source
        if (yield from source.accept("[")):
            yield from self._list(",")
            yield from source.accept("]")
        elif self._format.name == "llama3":
            yield from self._list(";")
        else:
            yield from self._object(tags.call_end if self._format.name == "hermes" else "")
        if self._format.name == "xlam":
            yield from source.accept("```" if opening else "")
        elif tags.call_end and self._format.name != "hermes":
            yield from source.accept(tags.call_end)

    def _list(self, separator: str) -> Reading[None]:
        yield from self._object()
        while (yield from self._source.accept(separator)):
            yield from self._object()

    def _object(self, closing: str = "") -> Reading[None]:
        """Read a call that is a single object, and the mark `closing` after it. If the model stops before the end of
        this mark, the call is valid, too."""
        source = self._source
        if self._use.is_constrained:
            name = yield from self._constrained_name()
            yield from self._arguments(name, "")
            yield from source.accept("}")
            if closing:
                yield from source.accept(closing)
            return
        text = (yield from source.read_value()).replace(SPECIAL, "")
        try:
            call = _call_object(text)
        except (msgspec.MsgspecError, RecursionError):
            raise NoCall from None
        if closing and not (yield from source.accept(closing)):
            if not closing.startswith(source.text[source.place : source.limit]) or source.is_cut or source.at_barrier:
                yield from source.expect(closing)
            source.place = source.limit
        self._add_whole(call.name, bytes(call.arguments or call.parameters).decode() or "{}")

    def _constrained_name(self) -> Reading[str]:
        """Read an object up to its arguments, as the grammar lets the model write it. Returns the function's name."""
        source = self._source
        for word in ("{", '"name"', ":", '"'):
            yield from source.expect(word)
        name, _ = yield from source.until('"')
        yield from source.expect(",")
        yield from source.expect('"arguments"', '"parameters"')
        yield from source.expect(":")
        return name

    def _arguments(self, name: str, id: str) -> Reading[None]:
        """Read the object of a call's arguments. If a grammar makes them sound, they are added as they arrive: a call
        whose text ends early, or is nested too deeply, stays, incomplete."""
        source = self._source
        if not self._use.is_constrained:
            text = yield from source.read_value()
            return self._add_whole(name, text.replace(SPECIAL, ""), id)
        if name not in self._use.tools or not (yield from source.skip_space()) or source.text[source.place] != "{":
            raise NoCall
        self._add(name, "", id)
        try:
            yield from source.read_value("{", JSON, lambda part: self._add("", part.replace(SPECIAL, ""), ""))
        finally:
            source.begin()

    # A name and JSON

    def _mistral(self) -> Reading[None]:
        """Read calls as Mistral's models write them: an array of objects, or a function's name and an object of
        arguments. A single object with name and arguments is a call, too."""
        source = self._source
        if (yield from source.accept("[")):
            yield from self._list(",")
            yield from source.accept("]")
            return
        if (yield from source.follows("{")):
            return (yield from self._object())
        head = _MISTRAL.fullmatch((yield from self._head("{"))[0].replace(SPECIAL, ""))
        source.place -= 1
        if head is None:
            raise NoCall
        yield from self._arguments(head[1], head[2] or "")

    def _named(self, tags: CallTags) -> Reading[None]:
        """Read the name, and a JSON object of arguments, perhaps in a fence after a line with the name."""
        source = self._source
        head = (yield from self._head(tags.name_end))[0].strip()
        id, is_fenced = "", False
        if self._format.kind == "fenced":
            yield from source.skip_space()
            if not (yield from source.follows("{")):
                head = (yield from self._head("\n"))[0].strip()
                yield from source.expect("```")
                yield from source.accept("json")
                is_fenced = True
        else:
            id, head = head, head.removeprefix("functions.")
            name, colon, number = head.rpartition(":")
            head, id = (name, id) if colon and number.isdecimal() else (head, "")
        text = (yield from source.read_value()).replace(SPECIAL, "")
        if is_fenced:
            yield from source.expect("```")
        yield from source.expect(tags.call_end)
        self._add_whole(head, text, id)

    def _head(self, *marks: str, allowed: re.Pattern[str] | None = None) -> Reading[tuple[str, str]]:
        """Read up to the first of these marks, and the mark. Returns the text before it, and the mark.

        Raises:
            NoCall: the text is too long, or isn't allowed.
        """
        return (yield from self._source.until(*marks, most=_MAX_HEAD, allowed=allowed))

    # A name and arguments in tags

    def _pairs(self, tags: CallTags) -> Reading[None]:
        """Read the name, and each argument with its name, between tags."""
        source, items, keys = self._source, list[str](), set[str]()
        is_quoted = tags.call.endswith('"')
        ends = (tags.name_end,) if is_quoted or self._format.has_lines else (tags.name_end or tags.key, tags.call_end)
        head, mark = yield from self._head(*ends)
        if mark != tags.name_end:
            source.place -= len(mark)
        name = _attributes(head)[0] if is_quoted else head.strip()
        if name not in self._use.tools:
            raise NoCall
        is_end = is_quoted and head.endswith("/")
        next_key: str | None = None
        while not is_end and (next_key is not None or not (yield from source.accept(tags.call_end))):
            if next_key is None:
                yield from source.expect(tags.key)
                next_key, _ = yield from self._head(tags.key_end)
            key, kind = _attributes(next_key) if tags.key.endswith('"') else (next_key, "")
            if tags.value:
                yield from source.expect(tags.value)
            keys.add(key)
            text, next_key, is_end = yield from self._value(tags, self._use.tools[name], keys)
            items.append(f"{json_string(key)}: {self._typed(name, key, kind, text.replace(SPECIAL, ''))}")
        self._add_whole(name, f"{{{', '.join(items)}}}")

    def _value(
        self, tags: CallTags, parameters: Mapping[str, Any], keys: Set[str]
    ) -> Reading[tuple[str, str | None, bool]]:
        """Read an argument and the tag after it. A tag that no other tag of the call follows is text. If the model
        forgot the tag after the argument, also read the next tag. Returns the argument, the next argument's name if it
        has been read, and whether the call's end has been read."""
        source, parts = self._source, list[str]()
        marks = [tags.value_end]
        has_lines = self._format.has_lines and (yield from source.follows("\n"))
        if has_lines:
            source.place += 1
            if not self._use.is_constrained:  # a grammar forgets no tag
                marks += [f"\n{tags.key}", f"\n{tags.call_end}"]
        while True:
            try:
                text, mark = yield from source.until(*marks)
            except CutShort:
                raise
            except NoCall:
                if source.at_barrier or not tags.value:
                    raise
                text, end, rest = source.taken().rpartition(tags.value)[2].rpartition(tags.call_end)
                if not end or rest.strip():
                    raise
                return text, None, True
            parts.append(text)
            if mark == tags.value_end:
                space = yield from source.read_space()
                is_line = not has_lines or "\n" in space or _ends_line(parts)
                if is_line and ((yield from source.follows(tags.key)) or (yield from source.follows(tags.call_end))):
                    text = "".join(parts)
                    return text.removesuffix("\n") if has_lines else text, None, False
                parts += [mark, space]
                if source.is_done and source.place == source.limit:
                    yield from source.wait()
            elif mark.endswith(tags.key):
                key, end = yield from self._head(tags.key_end)
                if key not in keys and key in (parameters.get("properties") or {}):
                    return "".join(parts), key, False
                parts += [mark, key, end]
            else:
                space = yield from source.read_space()
                if (yield from source.follows(tags.section_end)):
                    return "".join(parts), None, True
                parts += [mark, space]

    # Other syntaxes

    def _python(self, tags: CallTags) -> Reading[None]:
        """Read calls in Python's syntax: a list, or one in each line."""
        source, calls = self._source, list[tuple[str, str]]()
        is_list = yield from source.accept("[")
        while not calls or not (yield from source.accept("]" if is_list else tags.call_end)):
            name = (yield from self._head("(", allowed=_NAME))[0].strip()
            source.place -= 1
            if name not in self._use.tools:
                raise NoCall
            calls.append((name, python_arguments((yield from source.read_value("(", PYTHON)))))
            yield from source.accept(",")
        if is_list:
            yield from source.accept(tags.call_end)
        for name, arguments in calls:
            self._add_whole(name, arguments)

    def _keys(self, tags: CallTags) -> Reading[None]:
        """Read the name, and an object with bare keys."""
        source = self._source
        yield from source.expect("call:")
        name, _ = yield from self._head("{")
        source.place -= 1
        text = yield from source.read_value("{", quoting(tags.value))
        yield from source.expect(tags.call_end)
        self._add_whole(name.strip(), bare_key_object(text, tags.value))

    def _typed(self, name: str, key: str, kind: str, text: str) -> str:
        """An argument as JSON, typed by the model or else by the function's schema."""
        if kind in ("string", "true"):
            return json_string(text)
        if kind:
            try:
                loaded(text)
            except (ValueError, RecursionError):
                return json_string(text)
            return text
        parameters = self._use.tools[name]
        return typed(text, property_schema(parameters, key), parameters)

    def _add_whole(self, name: str, arguments: str, id: str = "") -> None:
        """Add a whole call.

        Raises:
            NoCall: this function may not be called, or the arguments are not a JSON object.
        """
        if name not in self._use.tools:
            raise NoCall
        for text in (arguments, repaired(arguments)):
            try:
                is_object = isinstance(loaded(text), dict)
            except (ValueError, RecursionError):
                continue
            if not is_object:
                break
            return self._add(name, text, id)
        raise NoCall


def _call_object(text: str) -> _CallObject:
    """The JSON object of a call, perhaps with raw newlines in its strings."""
    try:
        return msgspec.json.decode(text, type=_CallObject)
    except msgspec.DecodeError:
        return msgspec.json.decode(repaired(text), type=_CallObject)


def _attributes(head: str) -> tuple[str, str]:
    """The values of a tag's first two attributes. The text begins after the quote of the first value."""
    match = _ATTRIBUTES.fullmatch(head)
    if match is None:
        raise NoCall
    return match[1].replace("&quot;", '"').replace("&amp;", "&"), match[2] or ""


def _ends_line(parts: list[str]) -> bool:
    return next((part for part in reversed(parts) if part), "").endswith("\n")
