"""The turns of a request of ``POST /v1/messages``, as the messages of the equivalent chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import orjson

from headwater_server.codecs.faults import at, shown
from headwater_server.lm.messages_body import (
    Block,
    ImageBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)

__all__ = ["ChatHistory", "has_later_system"]

_Part: TypeAlias = tuple[dict[str, Any], str]
"""A part of a chat message's content, and the path of its block."""


def has_later_system(turns: Sequence[Turn], *, has_first: bool) -> bool:
    """Whether a conversation has a system message that isn't its first message. ``has_first``: whether the request has
    a system message before the turns."""
    return any(turn.role == "system" for turn in turns[0 if has_first else 1 :])


class ChatHistory:
    """Chat messages, made of turns one after the other.

    Args:
        takes_images: whether the model takes images.
        folds_system: whether a system message that isn't the first joins the user's message before it, because the
            model's chat template doesn't keep it.
    """

    def __init__(self, *, takes_images: bool, folds_system: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        """Paths of the client's request, by the paths of the chat request's fields."""
        self.loaded_tools: set[str] = set()
        """The names in `ToolReferenceBlock`s."""
        self.image_characters = 0
        """Characters of all images' URLs."""
        self._takes_images = takes_images
        self._folds = folds_system
        self._call_ids: set[str] = set()

    def add_system(self, content: str | Sequence[Block] | None, path: str) -> None:
        """Add a system message, unless it is empty. Raises `BadRequest` as `add`; ``path``: the content's."""
        if not content:
            return
        is_first = not self.messages or self.messages[-1]["role"] == "system"
        role = "system" if is_first or not self._folds else "user"
        if isinstance(content, str):
            self._add_content(role, content, path)
        else:
            parts = [self._part(block, f"{path}[{n}]", TextBlock) for n, block in enumerate(content)]
            self._add_content(role, parts, path)

    def add(self, turn: Turn, path: str) -> None:
        """Add a turn. ``path``: the turn's path in the request.

        Raises:
            BadRequest: a block is none of those that the turn's role may have; a user's turn is empty; a result has no
                call before it; a call's input is no object; or there is an image, and the model takes none.
        """
        if turn.role == "system":
            self.add_system(turn.content, f"{path}.content")
        elif turn.role == "assistant":
            self._add_assistant(turn, path)
        elif isinstance(turn.content, str) and turn.content:
            self._add_content("user", turn.content, path)
        elif turn.content:
            self._add_blocks(turn.content, path)
        else:
            raise at(f"{path}.content", None, "expected text, or at least one block, got none; leave the message out")

    def _add_blocks(self, blocks: str | Sequence[Block], path: str) -> None:
        """Add a user's blocks: the results first, since chat has them as messages of their own; then the images of
        results, and the other blocks."""
        images: list[_Part] = []
        others: list[_Part] = []
        for n, block in enumerate(blocks):
            place = f"{path}.content[{n}]"
            if isinstance(block, ToolResultBlock):
                images += self._add_result(block, place)
            else:
                others.append(self._part(block, place, TextBlock, ImageBlock, also=(ToolResultBlock,)))
        if images or others:
            self._add_content("user", [*images, *others], path)

    def _add_content(self, role: str, content: str | Sequence[_Part], path: str) -> None:
        """Add content of a system or user message: a message of its own, or, where messages are folded, the rest of the
        last message."""
        last = self.messages[-1] if self.messages else None
        if self._folds and last is not None and last["role"] == role:
            if isinstance(last["content"], str):
                last["content"] = [_text_part(last["content"])]
            content = [(_text_part(content), path)] if isinstance(content, str) else content
        else:
            self._append({"role": role, "content": content if isinstance(content, str) else []}, path)
        if isinstance(content, str):
            return
        parts = self.messages[-1]["content"]
        for part, place in content:
            if part["type"] != "text":
                self.names[f"messages[{len(self.messages) - 1}].content[{len(parts)}]"] = place
            parts.append(part)

    def _add_assistant(self, turn: Turn, path: str) -> None:
        blocks: Sequence[Block] = [] if isinstance(turn.content, str) else turn.content or ()
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or ""}
        self._append(message, path)
        parts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for n, block in enumerate(blocks):
            place = f"{path}.content[{n}]"
            if isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                name = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
                self.names[f"{name}.function.arguments"] = f"{place}.input"
                calls.append(self._call(block, place))
            elif not isinstance(block, RedactedThinkingBlock):
                also = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)
                parts.append(self._part(block, place, TextBlock, also=also)[0])
        if blocks:
            message["content"] = parts or (None if calls else "")
        if calls:
            message["tool_calls"] = calls
        if any(thoughts):
            message["reasoning_content"] = message["reasoning"] = "\n".join(thoughts)

    def _call(self, block: ToolUseBlock, path: str) -> dict[str, Any]:
        self._call_ids.add(block.id)
        arguments = bytes(block.input).decode()
        if arguments == "null":
            arguments = "{}"
        elif not arguments.startswith("{"):
            raise at(f"{path}.input", None, f"expected an object, got {shown(orjson.loads(arguments))}")
        return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}

    def _add_result(self, block: ToolResultBlock, path: str) -> list[_Part]:
        """Add a result. Returns its images."""
        if block.tool_use_id not in self._call_ids:
            expected = "expected the id of a tool_use block in a message before it"
            raise at(f"{path}.tool_use_id", None, f"{expected}, got {shown(block.tool_use_id)}")
        texts: list[str] = [block.content] if isinstance(block.content, str) else []
        images: list[_Part] = []
        for n, inner in enumerate([] if isinstance(block.content, str) else block.content or ()):
            if isinstance(inner, TextBlock):
                texts.append(inner.text)
            elif isinstance(inner, ToolReferenceBlock):
                self.loaded_tools.add(inner.tool_name)
                texts.append(f"Tool loaded: {inner.tool_name}")
            else:
                images.append(self._part(inner, f"{path}.content[{n}]", ImageBlock))
        if block.is_error:  # chat templates have no field for it
            texts[:1] = [f"Error: {texts[0]}" if texts else "Error"]
        content = [_text_part(text) for text in texts] if len(texts) > 1 else "".join(texts)
        self._append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content}, path)
        self.names[f"messages[{len(self.messages) - 1}].tool_call_id"] = f"{path}.tool_use_id"
        return images

    def _part(self, block: object, path: str, *kinds: type, also: Sequence[type] = ()) -> _Part:
        """A text or image as a part of a chat message.

        Args:
            block: the block.
            path: its path.
            kinds: the kinds of blocks that become parts here.
            also: further kinds of blocks that the message may have, for the error.
        """
        kinds = kinds if self._takes_images else tuple(kind for kind in kinds if kind is not ImageBlock)
        if not isinstance(block, kinds):
            listed = " or ".join(repr(_tag(kind)) for kind in (*kinds, *also)) or "none of the type 'image'"
            reason = "" if self._takes_images or not isinstance(block, ImageBlock) else ", since the model takes text"
            raise at(f"{path}.type", None, f"expected {listed}{reason}, got {shown(_tag(type(block)))}")
        if isinstance(block, ImageBlock):
            address = block.source.address
            self.image_characters += len(address)
            return {"type": "image_url", "image_url": {"url": address}}, path
        assert isinstance(block, TextBlock)
        return _text_part(block.text), path

    def _append(self, message: dict[str, Any], path: str) -> None:
        self.names[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)
