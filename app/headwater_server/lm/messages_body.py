"""The content of the requests of ``POST /v1/messages``: turns, blocks and tools.

Source: Anthropic's API reference. Blocks and tools may have further fields, such as ``cache_control``, which have no
effect. All other objects refuse unknown fields, which `headwater_server.lm.known_fields.read_known` leaves out before.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headwater_server.lm.answer_grammar import Schema
from headwater_server.lm.reasoning_fields import Effort

__all__ = [
    "AnswerFormat",
    "Block",
    "ImageBlock",
    "OfferedTool",
    "OutputConfig",
    "RedactedThinkingBlock",
    "TextBlock",
    "ThinkingBlock",
    "ThinkingConfig",
    "ToolReferenceBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "ToolUseChoice",
    "Turn",
]

_BUDGET: Final = {"expected": "at least 1; to think without a limit, leave it out"}


class Base64Source(msgspec.Struct, tag="base64"):
    """An image within the request."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def address(self) -> str:
        """The image as a URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(msgspec.Struct, tag="url"):
    """An image elsewhere."""

    url: str

    @property
    def address(self) -> str:
        """The image's URL."""
        return self.url


class TextBlock(msgspec.Struct, tag="text"):
    """Text."""

    text: str


class ImageBlock(msgspec.Struct, tag="image"):
    """An image."""

    source: Base64Source | UrlSource


class ToolReferenceBlock(msgspec.Struct, tag="tool_reference"):
    """The name of a tool with ``defer_loading`` that the model may call from now on."""

    tool_name: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call. Its ``input`` is kept as text: numbers of any length and the order of keys stay as they are."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})] = msgspec.field(
        default_factory=lambda: msgspec.Raw(b"null")
    )


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """What a call has returned."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """The model's reasoning. Its ``signature`` is not checked."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Reasoning that another server has encrypted: it is dropped."""


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Turn(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None


class OfferedTool(msgspec.Struct):
    """A tool. Tools with another ``type`` than ``custom`` are Anthropic's own."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, Meta(description="JSON schema of an object")] = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, Meta(description="Offered only once a `tool_reference` names it")] = None


class ToolUseChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Meta(description="With the type `tool`")] = None
    disable_parallel_tool_use: Annotated[bool | None, Meta(description="true: at most one call in an answer")] = None


class ThinkingConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``thinking``."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, extra=_BUDGET)] | None = None
    display: Annotated[
        Literal["summarized", "omitted", "updates"] | None, Meta(description="omitted: thinking blocks are empty")
    ] = None


class AnswerFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``output_config``."""

    effort: Effort | None = None
    format: AnswerFormat | None = None
