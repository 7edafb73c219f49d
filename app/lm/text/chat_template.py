"""A chat request's messages, checked, and rendered by the model's chat template to the text that it was trained on.

The template is the operator's, though often written by others; the messages are the clients'. Jinja's sandbox keeps a
template from everything but the values it is given. It doesn't bound what it does with them, so that is done here:
loops, calls and output count, and a conversation that takes too long, or gets too long, is refused. This is proof
against messages that make an honest template work hard, and against loops that never end; it isn't a jail: a single
call in a template that is out to do harm (``s.replace("", s)``) can still take much memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2

from app.codecs.faults import shown
from app.errors import BadRequest, ConfigError
from app.lm.text.template_environment import Refused, TemplateEnvironment

__all__ = ["ChatTemplate", "plain"]


MAX_CHARACTERS: Final = 16 << 20
"""Of one rendering, with what macros and blocks gather on the way: about four times a context of a million tokens."""

MAX_SECONDS: Final = 10.0
"""Of one rendering, in the thread's own processor time: a busy machine refuses nobody."""

_FAULTS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""All that a template's own expressions raise for messages that it wasn't made for."""

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders conversations as transformers' ``apply_chat_template(..., tokenize=False)`` does. Threads may share it.

    Args:
        templates: Jinja templates by name: ``default``, and perhaps ``tool_use`` for conversations with tools.
        special_tokens: what templates know as ``bos_token``, ``eos_token`` and so on.
        max_characters, max_seconds: what one rendering may take.

    Raises:
        ConfigError: a template isn't Jinja, or there is no ``default``; the message says where.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        max_characters: int = MAX_CHARACTERS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        if "default" not in templates:
            got = ", ".join(sorted(templates)) or "none"
            raise ConfigError(f"chat template: expected one named 'default', got {got}")
        self._environment = TemplateEnvironment(max_characters, max_seconds)
        self._templates = {name: self._environment.compiled(name, source) for name, source in templates.items()}
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation's text; it has its special tokens, so that it is encoded without adding any.

        Args:
            messages: of JSON's types, as `app.lm.text.chat_template.plain` gives them.
            add_generation_prompt: end with what makes the model answer.
            tools: OpenAI's ``tools``.
            variables: what the template takes besides, such as ``enable_thinking``.

        Raises:
            BadRequest: the template refuses the conversation (the message is its own) or can't render it, or this
                takes too much.
        """
        template = self._templates.get("tool_use") if tools is not None else None
        values = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": [_as_templates_want(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._environment.budget:
            try:
                return (template or self._templates["default"]).render(values)
            except Refused as error:
                raise _bad_template(f"the model's chat template refuses the conversation: {error}") from error
            except _FAULTS as error:
                kind = type(error).__name__
                raise _bad_template(
                    f"the model's chat template can't render the conversation: {kind}: {error}"
                ) from error


def _bad_template(message: str) -> BadRequest:
    text = message if len(message) <= 500 else f"{message[:500]}..."
    return BadRequest(f"messages: {text}", field="messages")


def _as_templates_want(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without nulls, which templates would print, and its reasoning under the names that they read."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING_FIELDS if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


_BETWEEN_PARTS: Final = "\n"
"""What stands between a message's text parts: OpenAI doesn't say; vLLM and llama.cpp put a line's end."""


def plain(messages: object) -> list[dict[str, Any]]:
    """OpenAI's ``messages``, each content one text: an array of text parts becomes their texts, one a line.

    Args:
        messages: the request's field, as JSON has it.

    Raises:
        BadRequest: a wrong message; the error names the field: ``messages[0].content[1].type``.
    """
    if not isinstance(messages, list):
        raise _bad("messages", "an array of messages", messages)
    if not messages:
        raise BadRequest("messages: expected at least one message, got an empty array", field="messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(path, "an object with 'role' and 'content'", message)
    if not isinstance(message.get("role"), str):
        raise _bad(f"{path}.role", "a string", message.get("role"))
    content = message.get("content")
    if isinstance(content, list):
        parts = [_part(part, f"{path}.content[{n}]") for n, part in enumerate(content)]
        return {**message, "content": _BETWEEN_PARTS.join(parts)}
    if content is not None and not isinstance(content, str):
        raise _bad(f"{path}.content", "a string or an array of text parts", content)
    return dict(message)


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise _bad(path, 'a content part like {"type": "text", "text": "..."}', part)
    if part.get("type") != "text":
        raise _bad(f"{path}.type", "'text', the only kind of content this model takes", part.get("type"))
    text = part.get("text")
    if not isinstance(text, str):
        raise _bad(f"{path}.text", "a string", text)
    return text


def _bad(path: str, expected: str, value: object) -> BadRequest:
    return BadRequest(f"{path}: expected {expected}, got {shown(value)}", field=path)
