"""Divides the text of a model's answer into reasoning, content and tool calls, as it arrives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from headwater.answer_formats import ReasoningName, found_reasoning
from headwater_server.lm.text.answer_parts import SPECIAL, AnswerPart, ReasoningPart
from headwater_server.lm.text.call_reader import CallReader
from headwater_server.lm.text.call_source import SPACE, CallSource, CutShort, NoCall, Reading
from headwater_server.lm.text.code_finder import CodeFinder
from headwater_server.lm.text.harmony_reader import HarmonyReader
from headwater_server.lm.text.part_collector import PartCollector
from headwater_server.lm.text.tool_calls import ToolUse, spelled

__all__ = ["REASONING", "AnswerReader", "AnswerReading", "ReasoningFormat", "reasoning_format"]


class ReasoningFormat(NamedTuple):
    """How a model writes its reasoning."""

    name: ReasoningName
    opening: str
    """The mark before the reasoning."""
    closing: str
    """The mark after the reasoning."""
    reply: tuple[str, ...] = ()
    """Marks around the content, which are no content themselves."""
    space: str = "\n"
    """Whitespace that is neither reasoning nor content next to the marks."""
    tokens: tuple[str, ...] = ()
    """Marks that may be special tokens, beyond `opening` and `closing`."""


_CHANNELS: Final = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_K3_REPLY: Final = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
REASONING: Final[Mapping[ReasoningName, ReasoningFormat]] = {
    row.name: row
    for row in (
        ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", (), "", _CHANNELS),
        ReasoningFormat(
            "kimi-k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>", _K3_REPLY, "",
            ("<|open|>", "<|close|>", "<|sep|>"),
        ),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>")),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed-oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("granite", "<think>", "</think>", ("<response>", "</response>")),
        ReasoningFormat("hunyuan", "<think>", "</think>", ("<answer>", "</answer>")),
        ReasoningFormat("think", "<think>", "</think>"),
    )
}  # fmt: skip
"""All formats by their names."""


def reasoning_format(template: str, name: ReasoningName | Literal["none"] | None = None) -> ReasoningFormat | None:
    """The format in which a model writes reasoning; `None` if reasoning is content, or no format is known.

    Args:
        template: the source of the chat template, or of all the model's templates.
        name: the configured name of the format, or ``none``; `None` to detect it.
    """
    found = found_reasoning(template) if name is None else name
    return None if found is None or found == "none" else REASONING[found]


class AnswerReading(NamedTuple):
    """How the answers to a request are read."""

    tools: ToolUse | None = None
    """How content is searched for calls; `None` if it has no calls."""
    reasoning: ReasoningFormat | None = None
    """`None` if the answers have no reasoning."""
    is_open: bool = False
    """Whether the answers begin within the reasoning."""
    specials: frozenset[str] = frozenset()
    """The marks that are tokens of their own. Only as such a token are they marks: elsewhere, they are text."""
    is_shown: bool = True
    """Whether readers return the reasoning. Its tokens are counted in any case."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that may be special tokens. A text that is read must have them, each after `SPECIAL`."""
        marks = () if self.tools is None else self.tools.format.call_marks
        if self.reasoning is not None:
            _, opening, closing, reply, _, tokens = self.reasoning
            marks += tokens or (opening, closing, *reply)
        return marks

    def with_tokens(self, added_id: Callable[[str], int | None]) -> AnswerReading:
        """The reading of answers of a tokenizer.

        Args:
            added_id: the id of a token that the tokenizer has beyond those of its vocabulary; `None` for other texts.
        """
        return self._replace(specials=frozenset(mark for mark in self.marks if added_id(mark) is not None))

    def after(self, prompt: str) -> AnswerReading:
        """The reading of answers to this prompt. Some chat templates begin the model's reasoning at the end of the
        prompt."""
        is_open = self.reasoning is not None and prompt.rstrip(SPACE).endswith(self.reasoning.opening)
        return self._replace(is_open=is_open)

    def reader(self) -> AnswerReader:
        """A new reader for a single answer."""
        return AnswerReader(self)


class AnswerReader:
    """Divides a single answer. The division of the answer into pieces affects only the division into parts."""

    def __init__(self, reading: AnswerReading) -> None:
        use, reasoning, specials = reading.tools, reading.reasoning, reading.specials
        self._is_shown = reading.is_shown
        self._source = CallSource()
        self._parts = PartCollector(use)
        self._held: list[tuple[str, tuple[str, ...] | None]] | None = None
        """Reasoning from the first call on that is made if the reasoning has no end: texts, and `None`; or the
        call that the text is, which is empty for a mark after calls."""
        self._is_pending = False
        """Whether a call within the reasoning is being read."""
        self._is_inside = False
        self._begins: deque[int] = deque()
        """Where tokens begin of which it isn't known whether they are reasoning."""
        self._last_end = 0
        self.reasoning_tokens = 0
        """Number of tokens of the reasoning so far, including its marks."""
        format = None if use is None else use.format.spelled(specials)
        self._calls = None if use is None or format is None else CallReader(self._source, use, format, self._add_call)
        self._openings = () if self._calls is None else self._calls.openings
        self._bare = "" if format is None else format.bare
        self._may_be_bare = bool(self._bare)
        self._opening = self._closing = self._reply = self._thought_space = ""
        dropped = [SPECIAL + mark for mark in specials] + list(() if format is None else format.reply)
        if reasoning is not None:
            self._opening, self._closing = spelled(reasoning.opening, specials), spelled(reasoning.closing, specials)
            self._thought_space = reasoning.space
            reply = [spelled(mark, specials) for mark in reasoning.reply]
            self._reply = reply[0] if reply else ""
            dropped += [self._opening, *reply]
        self._marks = tuple(dict.fromkeys((*self._openings, *dropped)))
        """The marks that end content. Those that begin neither calls nor reasoning are dropped."""
        self._code = CodeFinder()
        is_harmony = (format.kind if format is not None else reasoning and reasoning.name) == "harmony"
        harmony = HarmonyReader(self._source, self._parts, self._calls, specials, self._count)
        self._generator = (harmony.read if is_harmony else self._read)(is_open=reading.is_open)
        next(self._generator, None)

    @property
    def has_calls(self) -> bool:
        """Whether the answer has had a call so far."""
        return self._parts.calls > 0

    def read(self, text: str, finish: str | None, ends: Sequence[int] = ()) -> list[AnswerPart]:
        """Add text. Returns the parts that the text completes.

        Args:
            text: the next text.
            finish: why the answer ends with this text, ``stop`` or ``length``; `None` if it goes on.
            ends: for each token of this text, the number of the answer's characters up to the token's end.
        """
        for end in ends:
            self._begins.append(self._last_end)
            self._last_end = end
        self._source.push(text)
        if finish is not None:
            self._source.end(is_cut=finish == "length")
        next(self._generator, None)
        if self._is_inside and self._held is None and not self._is_pending:
            self._count(True)
        parts = self._parts.taken()
        return parts if self._is_shown else [part for part in parts if not isinstance(part, ReasoningPart)]

    def _count(self, is_reasoning: bool) -> None:
        """All tokens up to here that aren't counted are reasoning, or not."""
        place = self._source.offset + self._source.place
        while self._begins and self._begins[0] < place:
            self._begins.popleft()
            self.reasoning_tokens += is_reasoning

    def _read(self, *, is_open: bool) -> Reading[None]:
        source = self._source
        if is_open:
            yield from self._read_reasoning()
        while (mark := (yield from self._find())) is not None:
            if mark and mark == self._opening:
                source.place -= len(mark)
                self._count(False)
                source.place += len(mark)
                yield from self._read_reasoning()
            elif mark in self._openings or not mark:
                yield from self._read_calls(mark)
        self._parts.end()

    def _find(self) -> Reading[str | None]:
        """Read content up to the next mark, and the mark. Returns the mark; an empty string if a call without a mark
        begins here; `None` at the answer's end."""
        source = self._source
        if self._may_be_bare:
            source.begin()
            follows = yield from source.skip_space()
            self._may_be_bare = False
            if follows and source.text[source.place] == self._bare:
                return ""
            self._content(source.taken())
        while mark := (yield from source.pass_until(self._marks, self._content)):
            is_token = SPECIAL in mark
            if is_token or not (self._is_late(mark) if mark == self._opening else self._is_quoted(mark)):
                return mark
            self._content(mark)
        return None

    def _is_late(self, mark: str) -> bool:
        return mark not in self._openings and self._parts.has_content

    def _is_quoted(self, mark: str) -> bool:
        """Whether a mark of calls that isn't a token is code, or stands within a line where only a line's beginning
        is a call."""
        if mark not in self._openings:
            return False
        is_within = self._calls is not None and mark in self._calls.line_openings and not self._code.is_line_start
        return is_within or self._code.is_code()

    def _content(self, text: str) -> None:
        if text:
            self._code.add(text)
            self._parts.content(text)

    def _read_calls(self, mark: str) -> Reading[None]:
        assert self._calls is not None
        try:
            yield from self._calls.read(mark)
        except NoCall as error:
            text = self._source.taken()
            if isinstance(error, CutShort) and (mark or self._calls.begins_call(text)):
                self._parts.drop_space()
            else:
                self._content(text)

    def _read_reasoning(self) -> Reading[None]:
        """Read the rest of the reasoning, and the mark after it. Reasoning without an end extends to the answer's
        end."""
        source = self._source
        if self._reply and (yield from source.follows(self._reply)):
            return
        self._parts.begin_thought(self._thought_space)
        self._is_inside = True
        source.begin()
        source.set_barrier(self._closing, is_word=SPECIAL not in self._closing)
        while mark := (yield from source.pass_until(self._openings, self._think)):
            assert self._calls is not None
            if self._held is None:
                source.place -= len(mark)
                self._count(True)
                source.place += len(mark)
            self._is_pending = True
            try:
                yield from self._calls.read(mark)
            except NoCall:
                self._think(source.taken())
            else:
                self._hold(source.taken())
            self._is_pending = False
        is_closed = source.at_barrier
        if is_closed:
            source.pass_barrier()
        makes_calls = not is_closed and not source.is_cut
        if self._held is None or not makes_calls:
            self._count(True)
        self._release(makes_calls=makes_calls)
        self._is_inside = False
        self._may_be_bare = bool(self._bare) and not self._parts.has_content
        self._parts.end_thought(self._thought_space)

    def _think(self, text: str) -> None:
        if self._held is not None:
            self._held.append((text, None))
        elif text:
            self._parts.thought(text, self._thought_space)

    def _hold(self, text: str, *call: str) -> None:
        """Hold back the text of a call, or of a mark after calls."""
        self._held = [] if self._held is None else self._held
        self._held.append((text, call))

    def _release(self, *, makes_calls: bool) -> None:
        held, self._held = self._held or (), None
        for text, call in held:
            if call is None or not makes_calls:
                self._parts.thought(text, self._thought_space)
            elif call:
                self._parts.call(*call)

    def _add_call(self, name: str, arguments: str, id: str) -> None:
        if self._is_pending:
            self._hold(self._source.taken(), name, arguments, id)
        else:
            self._parts.call(name, arguments, id)
        self._source.begin()
