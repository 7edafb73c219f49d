"""Renders conversations with a model's chat template.

The operator chooses the template, though others often wrote it; the messages are the clients'. Jinja's sandbox limits a
template to the values it is given, but not what it does with them. So loops, calls and output are counted here, and a
conversation that takes too long, or gets too long, is refused, and so is a call or filter before it makes a string that
is too long (`headwater_server.lm.text.template_growth`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2

from headwater_server.codecs.faults import at
from headwater_server.errors import BadRequest, ConfigError
from headwater_server.lm.text.template_environment import Refused, TemplateEnvironment

__all__ = ["ChatTemplate"]

MAX_CHARACTERS: Final = 16 << 20
"""The limit of a rendering, macros and blocks included: about four times a context of a million tokens."""
MAX_SECONDS: Final = 10.0
"""The limit of a rendering, in the thread's own CPU time, so that a busy machine refuses nobody."""

_FAULTS: Final = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What a template's expressions raise for messages that it wasn't written for."""

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders conversations as transformers' ``apply_chat_template(..., tokenize=False)`` does. Threads may share it.

    Args:
        templates: Jinja templates by name: ``default``, and perhaps ``tool_use`` for conversations with tools.
        special_tokens: the templates' variables ``bos_token``, ``eos_token`` and so on.
        max_characters, max_seconds: the limits of a rendering.

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
        self._knows_developers = any("developer" in source for source in templates.values())
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation's text, which includes its special tokens.

        Args:
            messages: what `headwater_server.lm.text.messages.checked_messages` returned.
            add_generation_prompt: whether the text ends with the beginning of the model's answer.
            tools: OpenAI's ``tools``.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            BadRequest: the template refuses the conversation (the message is its own) or can't render it, or a limit
                is exceeded.
        """
        template = self._templates.get("tool_use") if tools is not None else None
        values = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": [self._for_template(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._environment.budget:
            try:
                return (template or self._templates["default"]).render(values)
            except Refused as error:
                raise _bad_template(f"the model's chat template refuses the conversation: {error}") from error
            except _FAULTS as error:
                reason = f"{type(error).__name__}: {error}"
                raise _bad_template(f"the model's chat template can't render the conversation: {reason}") from error

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without nulls, which templates would print, and its reasoning under the names that templates use.

        A developer's message is a system's, as OpenAI had it before, for templates that don't know the newer role.
        """
        present = {name: value for name, value in message.items() if value is not None}
        if present["role"] == "developer" and not self._knows_developers:
            present["role"] = "system"
        reasoning = next((present[name] for name in _REASONING_FIELDS if name in present), None)
        return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _bad_template(message: str) -> BadRequest:
    return at("messages", None, message if len(message) <= 500 else f"{message[:500]}...")
