"""Renders conversations with a model's chat template.

The operator chooses the template, which often has another author; the messages come from clients. Jinja's sandbox
restricts a template to the values that it is given, but does not limit its time and memory. So loops, calls and output
are counted here, and a conversation that takes too long to render, or gets too long, is refused. A call or filter whose
result would be too long is refused before it runs (`headwater_server.lm.text.template_growth`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import jinja2

from headwater_server.codecs.faults import at, shown
from headwater_server.errors import BadRequest, ConfigError
from headwater_server.lm.text.call_ids import with_template_ids
from headwater_server.lm.text.system_probe import SYSTEM_PROBE, keeps_system_messages
from headwater_server.lm.text.template_environment import Refused, TemplateEnvironment

__all__ = ["ChatTemplate"]
MAX_CHARACTERS: Final = 16 << 20
"""Maximum number of characters of a rendering, including macros and blocks: about four times a context of a million
tokens."""
MAX_SECONDS: Final = 10.0
"""Maximum duration of a rendering, in CPU time of its thread, so that load on the machine doesn't cause refusals."""

_FAULTS: Final = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that a template's expressions raise for messages that the template wasn't written for."""

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders conversations as transformers' ``apply_chat_template(..., tokenize=False)`` does. Threads may share it.

    Args:
        templates: Jinja templates by name: ``default``, and perhaps ``tool_use`` for conversations with tools.
        special_tokens: the values of the template variables ``bos_token``, ``eos_token`` and so on.
        max_characters, max_seconds: the limits of a rendering.

    Raises:
        ConfigError: a template isn't valid Jinja, or there is no ``default`` template; the message says where.
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
            raise ConfigError(f"chat template: expected a template named 'default', got {got}")
        self._environment = TemplateEnvironment(max_characters, max_seconds)
        self._templates = {name: self._environment.compiled(name, source) for name, source in templates.items()}
        self.variables = frozenset[str]().union(*map(self._environment.variables, templates.values()))
        """The names that the templates read."""
        self.words = frozenset[str]().union(*map(self._environment.words, templates.values()))
        """The texts that the templates compare with, or assign."""
        self._knows_developers = any("developer" in source for source in templates.values())
        self._source = "\n".join(templates.values())
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as text, including special tokens.

        Args:
            messages: the result of `headwater_server.lm.text.chat_messages.checked_messages`. If the template refuses
                system messages after the first message or leaves them out, they join the user's message before them.
            add_generation_prompt: whether the text ends with the beginning of the model's answer.
            tools: OpenAI's ``tools``.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            BadRequest: the template refuses the conversation (the error has the template's message) or can't render it,
                or a limit is exceeded.
        """
        template = (self._templates.get("tool_use") if tools is not None else None) or self._templates["default"]
        present = [self._for_template(message) for message in with_template_ids(messages, self._source)]
        joined = _with_one_system_message(present)
        values = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": present if joined is None or self._keeps_system_messages else joined,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._environment.budget:
            try:
                return template.render(values)
            except Refused as error:
                raise _bad_template(f"the model's chat template refuses the conversation: {error}") from error
            except _FAULTS as error:
                reason = f"{type(error).__name__}: {error}"
                raise _bad_template(f"the model's chat template can't render the conversation: {reason}") from error

    def render_continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation up to the end of its last message's content, as transformers does with
        ``continue_final_message=True``: a mark after the content shows where the rendered content ends.

        Args and raises: see `render`; also `BadRequest` if the last message isn't the assistant's, calls tools, or its
        content doesn't stand in the rendering as it is.
        """
        last = messages[-1]
        path = f"messages[{len(messages) - 1}]"
        expected = "with continue_final_message, which continues the last message"
        if last["role"] != "assistant":
            raise at(f"{path}.role", None, f"expected 'assistant' {expected}, got {shown(last['role'])}")
        if last.get("tool_calls"):
            raise at(f"{path}.tool_calls", None, f"expected no calls {expected}; leave them out")
        content, mark = last["content"], secrets.token_hex(16)
        marked = {**last, "content": f"{content}{mark} "}
        rendered = self.render(
            [*messages[:-1], marked], add_generation_prompt=False, tools=tools, variables=variables
        )  # fmt: skip
        begin, found, rest = rendered.partition(mark)
        if not found or mark in rest or not begin.rstrip().endswith(content.strip()):
            reason = (
                "the model's chat template changes this content or leaves it out, so that no answer can continue it"
            )
            raise at(f"{path}.content", None, f"{reason}; leave out continue_final_message")
        return begin if rest.startswith(" ") else begin.rstrip()  # a template that strips the content has no space

    @cached_property
    def _keeps_system_messages(self) -> bool:
        """Whether the template writes system messages that follow a user's message."""
        values = {"documents": None, **self._special_tokens, "tools": None, "add_generation_prompt": True}
        with self._environment.budget:
            try:
                text = self._templates["default"].render({**values, "messages": SYSTEM_PROBE})
            except (Refused, *_FAULTS):
                return False
        return keeps_system_messages(text)

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Remove nulls from a message, because templates would print them, and set its reasoning under the names that
        templates use.

        If the templates don't mention the role ``developer``, it becomes ``system``, the older name of this role in
        OpenAI's API.
        """
        present = {name: value for name, value in message.items() if value is not None}
        if present["role"] == "developer" and not self._knows_developers:
            present["role"] = "system"
        reasoning = next((present[name] for name in _REASONING_FIELDS if name in present), None)
        return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _with_one_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages without system messages after the first message: each is appended to the last user's message before
    it, or to the first message if there is no such message. `None` if there are no such system messages."""
    if all(message["role"] != "system" for message in messages[1:]):
        return None
    joined: list[dict[str, Any]] = []
    parts: list[list[str]] = []
    """The texts of each message in `joined`."""
    host = 0
    for message in messages:
        if message["role"] == "system" and joined:
            parts[host].append(message["content"])
            continue
        if message["role"] == "user":
            host = len(joined)
        joined.append(message)
        parts.append([message.get("content", "")])
    return [
        {**message, "content": "\n".join(texts)} if len(texts) > 1 else message
        for message, texts in zip(joined, parts, strict=True)
    ]  # fmt: skip


def _bad_template(message: str) -> BadRequest:
    return at("messages", None, message if len(message) <= 500 else f"{message[:500]}...")
