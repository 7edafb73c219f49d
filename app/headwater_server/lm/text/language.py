"""The tokenizer and chat template of a language model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.engine import Sampling
from headwater.signature import ToolParser
from headwater_server.codecs.faults import at
from headwater_server.lm.text.chat_template import ChatTemplate
from headwater_server.lm.text.tokenizer import Tokenizer
from headwater_server.lm.text.tool_calls import call_format

__all__ = ["LanguageText"]


class LanguageText:
    """A model's tokenizer and chat template. Threads may share it; its methods take too long for the event loop.

    Args:
        folder: the model's Hugging Face folder.
        tool_parser: the format of its tool calls; None for that of its chat template.
        sampling: how tokens are chosen where a request doesn't say it.

    Raises:
        ConfigError: a file is missing or wrong; the message names it.
    """

    def __init__(
        self,
        folder: Path,
        tool_parser: ToolParser | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
    ) -> None:
        self.sampling = sampling
        self.tokenizer = Tokenizer(folder)
        templates = self.tokenizer.chat_templates
        self.template = ChatTemplate(templates, self.tokenizer.special_tokens) if templates else None
        """None if the model has none, and so takes no conversations."""
        self.tool_format = call_format("\n".join(templates.values()), tool_parser)
        """How the model writes tool calls; None if that isn't known."""

    def encode_text(self, text: str, field: str = "prompt") -> list[int]:
        """The token ids of a text, with the special tokens that the model wants around it.

        Raises:
            BadRequest: the text, in this field of the request, is no Unicode text.
        """
        return self.tokenizer.encode(text, add_special_tokens=True, field=field)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as text, up to where the model's answer begins.

        Args:
            messages: what `headwater_server.lm.text.messages.checked_messages` returned.
            variables: further variables of the chat template.
            tools: what `headwater_server.lm.tools.checked_tools` returned; None if the model shall not know of any.
            add_generation_prompt: whether it ends with the beginning of the model's answer.

        Raises:
            BadRequest: the model has no chat template, or the template refuses the messages.
        """
        if self.template is None:
            reason = "this model has no chat template; send its prompt as text to /v1/completions"
            raise at("messages", None, reason)
        return self.template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def encode_chat(self, text: str) -> list[int]:
        """The token ids of what `chat_text` returned, which includes the special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False, field="messages")
