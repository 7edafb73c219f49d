"""Requests and answers of ``POST /tokenize`` and ``POST /detokenize``. The field names are the same as in vLLM."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import orjson
from msgspec import Meta

from headwater.engine import EngineLimits
from headwater_server.codecs.faults import at, read_json
from headwater_server.lm.chat import Continued, GenerationPrompt, Messages, TemplateVariables, checked_variables
from headwater_server.lm.sampling_fields import Flag, checked_ids
from headwater_server.lm.text.chat_messages import checked_messages
from headwater_server.lm.text_plan import bounded_ids, check_size
from headwater_server.lm.tools import TOOLS_SCHEMA, checked_tools

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText

__all__ = ["DetokenizeRequest", "TokenizeRequest"]

MAX_TOKENS: Final = 131_072
"""Maximum number of tokens of a request. For models with a longer context the context length is the maximum."""

_OnlyModel: TypeAlias = Annotated[str, Meta(description="May be left out if there is one language model")]
_Fields = TypeVar("_Fields", bound="_ModelFields")


class _ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: _OnlyModel | None = None

    @classmethod
    def read(cls: type[_Fields], raw: bytes) -> _Fields:
        """Decode a request's body.

        Raises:
            BadRequest: the body is not a valid request; the message names the field.
        """
        return read_json(raw, cls)


class TokenizeRequest(_ModelFields, kw_only=True):
    """The body of a request: either a prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Default: true for a prompt, false for messages, since the template has them")]
        | None
    ) = None
    add_generation_prompt: GenerationPrompt = None
    return_token_strs: Flag | None = None
    chat_template_kwargs: TemplateVariables = None
    continue_final_message: Continued = None
    chat_template: None = None
    mm_processor_kwargs: None = None
    tools: Annotated[Any, Meta(extra_json_schema=TOOLS_SCHEMA)] = None

    def answer(self, text: LanguageText, limits: EngineLimits) -> bytes:
        """The answer with the tokens, as JSON. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, the text has too many tokens, or the model has no chat template for messages.
        """
        if (self.prompt is None) == (self.messages is None):
            got = "neither" if self.prompt is None else "both"
            raise at("prompt", None, f"expected either prompt or messages, got {got}")
        if self.continue_final_message and self.messages is None:
            raise at("continue_final_message", None, "expected it with messages only; leave it out")
        tools = checked_tools(self.tools)
        if tools and self.messages is None:
            raise at("tools", None, "expected them with messages only; leave them out")
        field, rendered, has_special = "prompt", self.prompt or "", True
        if self.messages is not None:
            messages = checked_messages(self.messages, limits.context_length)
            variables = checked_variables(self.chat_template_kwargs)
            field, has_special = "messages", False
            rendered = text.chat_text(
                messages, variables, tools or None, add_generation_prompt=self.add_generation_prompt,
                continues=bool(self.continue_final_message),
            )  # fmt: skip
        check_size(field, rendered, limits)
        add_special = has_special if self.add_special_tokens is None else self.add_special_tokens
        max_tokens = max(limits.context_length, MAX_TOKENS)
        ids = bounded_ids(
            rendered, partial(text.tokenizer.encode, add_special_tokens=add_special, field=field), max_tokens
        )
        if ids is None or len(ids) > max_tokens:
            got = "more" if ids is None else str(len(ids))
            raise at(field, None, f"expected at most {max_tokens} tokens, got {got}; send the text in parts")
        strings = text.tokenizer.entries(ids) if self.return_token_strs else None
        limit = limits.context_length
        return orjson.dumps({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


class DetokenizeRequest(_ModelFields, kw_only=True):
    """The body of a request."""

    tokens: Annotated[list[Any], Meta(extra_json_schema={"items": {"type": "integer", "minimum": 0}})]

    def answer(self, text: LanguageText, limits: EngineLimits) -> bytes:
        """The answer with the tokens' text, including special tokens, as JSON. Takes too long for the event loop.

        Raises:
            BadRequest: a token is not an integer or is outside the vocabulary, or there are too many tokens.
        """
        max_tokens = max(limits.context_length, MAX_TOKENS)
        if len(self.tokens) > max_tokens:
            raise at("tokens", None, f"expected at most {max_tokens}, got {len(self.tokens)}; send them in parts")
        ids = checked_ids("tokens", self.tokens, limits.vocab_size)
        return orjson.dumps({"prompt": text.tokenizer.decode(ids, skip_special_tokens=False)})
