"""The tokenizer and chat template of a language model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headwater.answer_formats import ReasoningName, ToolParser
from headwater.engine import Sampling
from headwater_server.codecs.faults import at
from headwater_server.lm.text.answer_reader import REASONING, reasoning_format
from headwater_server.lm.text.chat_template import ChatTemplate
from headwater_server.lm.text.tokenizer import Tokenizer
from headwater_server.lm.text.tool_calls import call_format

__all__ = ["LanguageText"]


class LanguageText:
    """A model's tokenizer and chat template. Threads may share it; its methods take too long for the event loop.

    Args:
        folder: the model's Hugging Face folder.
        tool_parser: the format of the model's tool calls; `None` to detect it from the chat template.
        reasoning: the format of the model's reasoning, or ``none`` if reasoning is content; `None` to detect it
            from the chat template.
        sampling: defaults for sampling fields that are absent from a request.

    Raises:
        ConfigError: a file is missing or wrong; the message names it.
    """

    def __init__(
        self,
        folder: Path,
        tool_parser: ToolParser | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008  it is immutable
        reasoning: ReasoningName | Literal["none"] | None = None,
    ) -> None:
        self.sampling = sampling
        self.tokenizer = Tokenizer(folder)
        templates = self.tokenizer.chat_templates
        self.template = ChatTemplate(templates, self.tokenizer.special_tokens) if templates else None
        """`None` if the model has no chat template. Conversations are then refused."""
        self.tool_format = call_format("\n".join(templates.values()), tool_parser)
        """The format of the model's tool calls; `None` if it isn't known."""
        self.reasoning_format = reasoning_format("\n".join(templates.values()), reasoning)
        """The format of the model's reasoning; `None` if the model writes no reasoning in a known format."""
        self.tool_reasoning = None if reasoning == "none" else self.reasoning_format or REASONING["think"]
        """The format of reasoning in answers that may have calls, since a call that is only thought of isn't made."""

    def encode_text(self, text: str, field: str = "prompt") -> list[int]:
        """The token ids of a text, with the special tokens that the model wants around it.

        Raises:
            BadRequest: the text isn't valid Unicode. The error names `field`.
        """
        return self.tokenizer.encode(text, add_special_tokens=True, field=field)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continues: bool = False,
    ) -> str:
        """Render a conversation as text, including special tokens.

        Args:
            messages: the result of `headwater_server.lm.text.chat_messages.checked_messages`.
            variables: further variables of the chat template, such as ``enable_thinking``.
            tools: the result of `headwater_server.lm.tools.checked_tools`; `None` if the prompt must not mention tools.
            add_generation_prompt: whether the text ends with the beginning of the model's answer; None: unless
                `continues` is set.
            continues: whether the text ends with the content of the last message, the assistant's.

        Raises:
            BadRequest: the model has no chat template; or the template refuses the messages, can't render them, or
                takes too long or writes too much; or the last message can't be continued.
        """
        if self.template is None:
            reason = "this model has no chat template; send its prompt as text to /v1/completions"
            raise at("messages", None, reason)
        if continues:
            if add_generation_prompt:
                reason = "expected false with continue_final_message, which continues the last message; leave it out"
                raise at("add_generation_prompt", None, reason)
            return self.template.render_continued(messages, tools=tools, variables=variables)
        prompts = add_generation_prompt is not False
        return self.template.render(messages, tools=tools, add_generation_prompt=prompts, variables=variables)

    def encode_chat(self, text: str) -> list[int]:
        """The token ids of a text from `chat_text`, which already includes the special tokens.

        Raises:
            BadRequest: the text isn't valid Unicode. The error names ``messages``.
        """
        return self.tokenizer.encode(text, add_special_tokens=False, field="messages")
