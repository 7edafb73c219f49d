"""Requests of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``.

Source: Anthropic's API reference. A request is converted into the equivalent chat request: for the own engine a
`ChatRequest`, which makes the plan; for vLLM the body of a chat request. `timeout_s` and `chat_template_kwargs` are
extensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, structs

from headwater.engine import EngineLimits, Share
from headwater_server.codecs.faults import at, read_json, shown
from headwater_server.errors import BadRequest, ContextTooLong, ThreadUnsupported
from headwater_server.lm.answer_grammar import ResponseFormat
from headwater_server.lm.chat import ChatRequest, TemplateVariables
from headwater_server.lm.messages_answer import MessagesAnswer
from headwater_server.lm.messages_body import (
    AnswerFormat,
    OfferedTool,
    OutputConfig,
    TextBlock,
    ThinkingConfig,
    ToolUseChoice,
    Turn,
)
from headwater_server.lm.messages_history import ChatHistory, has_later_system
from headwater_server.lm.reasoning_fields import SWITCHES, Thinking
from headwater_server.lm.renamed_fields import own_path, renamed
from headwater_server.lm.sampling_fields import Flag, Seconds, Temperature, TopK
from headwater_server.lm.text.answer_reader import AnswerReading
from headwater_server.lm.text.stop_strings import StopStrings
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.tokenize_body import MAX_TOKENS

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["ChatForm", "CountTokensRequest", "MessagesRequest"]

_Unused = Annotated[Any, Meta(description="Without effect")]
_Fields = TypeVar("_Fields", bound="CountTokensRequest")


class ChatForm(NamedTuple):
    """The equivalent chat request."""

    fields: dict[str, Any]
    """Its fields, without null."""
    names: dict[str, str]
    """Paths of the client's request, by the paths of the chat request's fields."""
    ignored: tuple[str, ...]
    """Paths of the client's fields without effect."""
    image_characters: int = 0
    """Characters of all images' URLs."""


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to count the tokens of a prompt."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[AnswerFormat | None, Meta(description="Older name of `output_config.format`")] = None
    chat_template_kwargs: TemplateVariables = None
    cache_control: _Unused = None
    context_management: _Unused = None
    thread: Annotated[Any, Meta(description="Not supported: send all messages")] = None
    container: Annotated[Any, Meta(description="Not supported")] = None
    mcp_servers: Annotated[Any, Meta(description="Not supported")] = None

    @classmethod
    def read(cls: type[_Fields], raw: bytes) -> _Fields:
        """Decode a request's body.

        Raises:
            BadRequest: the body is not a valid request; the message names the field.
        """
        return read_json(raw, cls)

    @property
    def has_later_system(self) -> bool:
        """Whether the conversation has a system message that isn't its first message."""
        return has_later_system(self.messages, has_first=bool(self.system))

    def chat_form(self, *, is_relayed: bool, folds_system: bool) -> ChatForm:
        """Convert the request into the equivalent chat request.

        Args:
            is_relayed: whether vLLM computes the model, which may take images.
            folds_system: see `ChatHistory`.

        Raises:
            BadRequest: a field is wrong. What the chat request has too, it checks.
        """
        self._check_state()
        history = ChatHistory(takes_images=is_relayed, folds_system=folds_system)
        history.add_system(self.system, "system")
        for n, turn in enumerate(self.messages):
            history.add(turn, f"messages[{n}]")
        tools, tool_names, ignored = self._offered(history.loaded_tools)
        path, format = "output_config.format", None if self.output_config is None else self.output_config.format
        if format is None and self.output_format is not None:
            path, format = "output_format", self.output_format
        schema = None if format is None else {"name": "answer", "schema": format.schema, "strict": True}
        fields = {
            "model": self.model,
            "messages": history.messages,
            "tools": tools or None,
            "tool_choice": self._chat_choice(has_tools=bool(tools)),
            "parallel_tool_calls": False if self._is_single else None,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
            **self._reasoning_fields(is_relayed=is_relayed),
            **self._answer_fields(),
        }
        if self.messages[-1].role == "assistant":
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        if is_relayed and self.thinking is not None and self.thinking.budget_tokens is not None:
            ignored.append("thinking.budget_tokens")
        names = {**_NAMES, **history.names, **tool_names}
        names |= dict.fromkeys(("response_format", "response_format.json_schema"), path)
        present = {name: value for name, value in fields.items() if value is not None}
        return ChatForm(present, names, tuple(ignored), history.image_characters)

    def counted(self, text: LanguageText, limits: EngineLimits) -> int:
        """The number of tokens of the prompt, which may be longer than the model's context. Takes too long for the
        event loop.

        Raises:
            BadRequest: a field is wrong, or the prompt has more than `MAX_TOKENS` tokens and doesn't fit into the
                model's context.
        """
        most = max(limits.context_length, MAX_TOKENS)
        try:
            return self.chat_plan(text, structs.replace(limits, context_length=most, cache_tokens=most)).prompt_tokens
        except ContextTooLong:
            raise at("messages", None, f"expected fewer than {most} tokens to count, got more") from None

    def chat_plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and convert it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or exceeds a limit of the model.
        """
        form = self.chat_form(is_relayed=False, folds_system=False)
        format = form.fields.get("response_format")
        chat = ChatRequest(**{**form.fields, "response_format": format and msgspec.convert(format, ResponseFormat)})
        try:
            plan = chat.plan(text, limits, caps_answer=True)
        except BadRequest as error:
            raise renamed(error, form.names) from None
        for n, spec in enumerate(plan.specs):
            if spec.grammar is not None and spec.grammar.field in form.names:
                grammar = structs.replace(spec.grammar, field=form.names[spec.grammar.field])
                plan.specs[n] = structs.replace(spec, grammar=grammar)
        return plan._replace(ignored=(*form.ignored, *(own_path(name, form.names) for name in plan.ignored)))

    def _check_state(self) -> None:
        if self.thread is not None:
            raise ThreadUnsupported.about("thread", ": this server keeps no conversations; send all messages")
        for name in ("container", "mcp_servers"):
            if getattr(self, name):
                raise at(name, None, f"not supported here; leave it out, got {shown(getattr(self, name))}")
        if not self.messages:
            raise at("messages", None, "expected at least one message, got an empty array")

    def _answer_fields(self) -> dict[str, Any]:
        """The chat request's fields about the answer."""
        return {"max_completion_tokens": 1}

    # Reasoning

    @property
    def _is_thinking(self) -> bool | None:
        """Whether the model has to think; None: the chat template decides."""
        switches = {"enabled": True, "disabled": False}
        return None if self.thinking is None else switches.get(self.thinking.type)

    def _reasoning_fields(self, *, is_relayed: bool) -> dict[str, Any]:
        """The chat request's fields about reasoning."""
        effort = None if self.output_config is None or self._is_thinking is False else self.output_config.effort
        variables = self.chat_template_kwargs
        if is_relayed:  # vLLM passes each variable to the template, which knows one of these or none
            switches = {} if self._is_thinking is None else dict.fromkeys(SWITCHES, self._is_thinking)
            return {"chat_template_kwargs": {**switches, **(variables or {})} or None, "reasoning_effort": effort}
        thinking = None
        if self.thinking is not None:
            thinking = Thinking(type=self.thinking.type, budget_tokens=self.thinking.budget_tokens)
        return {"thinking": thinking, "chat_template_kwargs": variables, "reasoning_effort": effort}

    # Tools

    @property
    def _is_single(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is True

    def _chat_choice(self, *, has_tools: bool) -> object:
        choice = self.tool_choice
        if choice is None or (choice.type in ("auto", "none") and not has_tools):
            return None
        if choice.type == "tool":
            return {"type": "function", "function": {"name": choice.name}}
        return "required" if choice.type == "any" else choice.type

    def _offered(self, loaded: set[str]) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
        """The tools in a chat request's form, their paths in this request by their paths there, and the paths of the
        tools that the model isn't told of.

        Args:
            loaded: the names of the tools with ``defer_loading`` that are offered.

        Raises:
            BadRequest: the model must call a tool that only Anthropic's models know.
        """
        offered: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        ignored: list[str] = []
        choice = self.tool_choice
        for n, tool in enumerate(self.tools or ()):
            path = f"tools[{n}]"
            if tool.type not in (None, "custom"):
                is_named = choice is not None and choice.type == "tool" and choice.name == tool.name
                if is_named or (choice is not None and choice.type == "any"):
                    expected = "expected 'custom' where a tool must be called, since the model knows no other tools"
                    raise at(f"{path}.type", None, f"{expected}, got {shown(tool.type)}")
                ignored.append(path)
            elif not tool.defer_loading or tool.name in loaded:
                place = f"tools[{len(offered)}]"
                names |= {
                    place: path,
                    f"{place}.function": path,
                    f"{place}.function.parameters": f"{path}.input_schema",
                }
                about = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
                function = {"name": tool.name, **{key: value for key, value in about.items() if value is not None}}
                offered.append({"type": "function", "function": function})
        return offered, names, ignored


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of a request for an answer."""

    max_tokens: Annotated[int, Meta(ge=1, description="An answer that the context doesn't hold ends earlier")]
    stream: Flag | None = None
    stop_sequences: StopStrings | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Labels, without effect")] = None
    service_tier: Annotated[str | None, Meta(description="Without effect")] = None
    timeout_s: Seconds | None = None

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """See `chat_plan`."""
        return self.chat_plan(text, limits)

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> MessagesAnswer:
        """The form of the answer to this request. `plan` must come from this request."""
        return self.answer(plan.reading)

    def answer(self, reading: AnswerReading | None = None) -> MessagesAnswer:
        """The form of the answer to this request; ``reading``: see `MessagesAnswer`."""
        hides = self.thinking is not None and self.thinking.display == "omitted"
        return MessagesAnswer(self.model, reading, self.max_tokens, hides_thinking=hides)

    def _answer_fields(self) -> dict[str, Any]:
        return {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            **{name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "timeout_s")},
        }


_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "tool_choice.function": "tool_choice",
}
"""Map from field paths of a chat request to the paths in a messages request."""
