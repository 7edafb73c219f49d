"""All that a language model's folder says about text: its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import BadRequest
from app.lm.text.chat_template import ChatTemplate, plain
from app.lm.text.tokenizer import Tokenizer

__all__ = ["LanguageText"]


class LanguageText:
    """Text to tokens, for one model. Threads may share it; what it does takes too long for the event loop.

    Args:
        folder: the model's Hugging Face folder.

    Raises:
        ConfigError: a file of it is missing or not what it should be; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        templates = self.tokenizer.chat_templates
        self.template = ChatTemplate(templates, self.tokenizer.special_tokens) if templates else None
        """None: the model has none, and takes no conversations."""

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the model wants around it.

        Raises:
            BadRequest: it is no Unicode text.
        """
        return self.tokenizer.encode(text, add_special_tokens=True)

    def chat_text(self, messages: object, variables: Mapping[str, Any] | None) -> str:
        """A conversation as the text that the model was trained on, up to where its answer begins.

        Args:
            messages: OpenAI's ``messages``, as JSON has them.
            variables: what the chat template takes besides.

        Raises:
            BadRequest: the model has no chat template, a message is wrong, or the template refuses them.
        """
        if self.template is None:
            raise BadRequest(
                "messages: this model has no chat template; send its prompt as text to /v1/completions",
                field="messages",
            )
        return self.template.render(plain(messages), variables=variables)

    def encode_chat(self, text: str) -> list[int]:
        """The ids of what `chat_text` gave, which has its special tokens already."""
        return self.tokenizer.encode(text, add_special_tokens=False)
