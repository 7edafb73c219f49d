"""Collects the parts of a model's answer, without the whitespace that belongs to marks."""

from __future__ import annotations

from headwater_server.lm.text.answer_parts import SPECIAL, AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text.call_source import SPACE
from headwater_server.lm.text.tool_calls import ToolUse

__all__ = ["PartCollector"]


class PartCollector:
    """Collects the parts of an answer in order, without the whitespace that belongs to marks."""

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._parts: list[AnswerPart] = []
        self._space = ""
        """Whitespace after the content so far."""
        self._thought_space = ""
        """Markup, or else the beginning of the next reasoning."""
        self._skipped = ""
        """Whitespace that the next content or reasoning begins without."""
        self._is_after_call = False
        self.has_content = False
        """Whether the answer has had content so far."""
        self.calls = 0

    def taken(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        if self._use is not None and self._use.is_constrained:
            return
        text = self._stripped(text)
        content = text.rstrip(SPACE)
        if content:
            self._parts.append(self._space + content)
            self._space = ""
            self._is_after_call, self.has_content = False, True
        self._space += text[len(content) :]

    def _stripped(self, text: str) -> str:
        text = text.replace(SPECIAL, "")
        if self._skipped and text:
            text = text.lstrip(self._skipped)
            if text:
                self._skipped = ""
        return text

    def begin_thought(self, space: str) -> None:
        """Reasoning follows."""
        self._skipped, self._thought_space = space, ""
        self._space = self._space.lstrip(space) if space else self._space

    def thought(self, text: str, space: str) -> None:
        text = self._stripped(text)
        thought = text.rstrip(space) if space else text
        if thought:
            self._parts.append(ReasoningPart(self._thought_space + thought))
            self._thought_space = ""
        self._thought_space += text[len(thought) :]

    def end_thought(self, space: str) -> None:
        """Content follows."""
        self._skipped, self._thought_space = space, ""

    def call(self, name: str, arguments: str, id: str) -> None:
        if not name:
            self._call_part("", arguments, "")
            return
        assert self._use is not None
        if self._space.strip(self._use.format.space) and not self._is_after_call:
            self._parts.append(self._space)
        self._space = ""
        self._is_after_call = True
        self.calls += 1
        self._call_part(name, "", id or self._use.format.new_id())
        self._call_part("", arguments, "")

    def _call_part(self, name: str, arguments: str, id: str) -> None:
        assert self._use is not None
        if (name or arguments) and (self.calls == 1 or not self._use.only_first):
            self._parts.append(CallPart(self.calls - 1, name, arguments, id))

    def drop_space(self) -> None:
        """The limit of the answer's length has cut a call."""
        if self._use is not None and not self._space.strip(self._use.format.space):
            self._space = ""

    def end(self) -> None:
        if self._space and not self._is_after_call:
            self._parts.append(self._space)
