"""The formats in which models write tool calls. `headwater_server.lm.text.call_reader` reads them.

Each model writes calls in the format that it was trained on, which its chat template shows.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from headwater.answer_formats import ToolParser, found_tool_parser
from headwater_server.lm.text.answer_parts import SPECIAL
from headwater_server.lm.text.call_source import SPACE

__all__ = ["FORMATS", "CallFormat", "CallKind", "CallTags", "ToolUse", "call_format"]

CallKind: TypeAlias = Literal["objects", "named", "fenced", "mistral", "pairs", "python", "keys", "harmony"]
"""How a call is written: ``objects``: a JSON object of name and arguments, or an array of these; ``named``,
``fenced``, ``mistral``: the name, and a JSON object of arguments; ``pairs``: the name, and each argument between tags;
``python``: calls in Python's syntax; ``keys``: the name, and an object with bare keys; ``harmony``: messages."""


class CallTags(NamedTuple):
    """The marks of a format."""

    section: str = ""
    """The mark before all calls; empty if there is no such mark."""
    section_end: str = ""
    call: str = ""
    """The mark before each call; empty if there is no such mark."""
    name_end: str = ""
    """The mark after the function's name; empty if other marks end it."""
    key: str = ""
    key_end: str = ""
    value: str = ""
    value_end: str = ""
    call_end: str = ""


class CallFormat(NamedTuple):
    """A format of tool calls."""

    name: ToolParser
    kind: CallKind
    tags: tuple[CallTags, ...]
    """The marks, in each variant of the format."""
    tokens: tuple[str, ...] = ()
    """Marks of calls that may be tokens."""
    space: str = SPACE
    """Whitespace that is no content before a call. Models write it where their chat templates do."""
    bare: str = ""
    """The first character of calls that may begin the answer without a mark; empty if calls can't."""
    reply: tuple[str, ...] = ()
    """Marks around content, which are no content themselves."""
    has_lines: bool = False
    """Whether a newline on each side of an argument is no part of it."""
    has_names: bool = False
    """Whether the template writes each call as the opening, the function's name and an object of arguments."""

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Marks of calls that may be special tokens."""
        return self.tokens

    def new_id(self) -> str:
        """A new id for a call. Mistral's templates accept only ids of nine letters and digits."""
        return secrets.token_hex(5)[:9] if self.name == "mistral" else f"call_{secrets.token_hex(12)}"

    @lru_cache(maxsize=256)  # noqa: B019  formats are few
    def spelled(self, specials: frozenset[str]) -> CallFormat:
        """The format with `SPECIAL` before each mark that is a special token."""
        tags = tuple(CallTags(*(spelled(tag, specials) for tag in tags)) for tags in self.tags)
        return self._replace(tags=tags, reply=tuple(spelled(mark, specials) for mark in self.reply))


def spelled(text: str, specials: frozenset[str]) -> str:
    """A text with `SPECIAL` before each special token."""
    for mark in specials:
        text = text.replace(mark, SPECIAL + mark)
    return text


def _dsml(section: str, space: str = "") -> CallTags:
    mark = f"｜DSML｜{space}"
    return CallTags(
        f"<{mark}{section}>", f"</{mark}{section}>", f'<{mark}invoke name="', ">", f'<{mark}parameter name="', ">", "",
        f"</{mark}parameter>", f"</{mark}invoke>",
    )  # fmt: skip


_GLM: Final = CallTags(
    call="<tool_call>", key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>",
    call_end="</tool_call>",
)  # fmt: skip
_QWEN: Final = CallTags(
    "<tool_call>", "</tool_call>", "<function=", ">", "<parameter=", ">", value_end="</parameter>",
    call_end="</function>",
)  # fmt: skip
_K3: Final = CallTags(
    "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", '<|open|>call tool="', "<|sep|>", '<|open|>argument key="',
    "<|sep|>", "", "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
)  # fmt: skip
_K2: Final = CallTags(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", call_end="<|tool_call_end|>",
)  # fmt: skip
_DEEPSEEK: Final = CallTags(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)  # fmt: skip
_MINIMAX: Final = CallTags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', ">", '<parameter name="', ">",
    value_end="</parameter>", call_end="</invoke>",
)  # fmt: skip
_HY: Final = _GLM._replace(section="<tool_calls>", section_end="</tool_calls>", name_end="<tool_sep>")
_HARMONY: Final = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


def _simple(
    name: ToolParser, kind: CallKind, opening: str, closing: str, *, bare: str = "", space: str = SPACE
) -> CallFormat:
    """A format of one mark before calls and perhaps one after them."""
    tokens = tuple(mark for mark in (opening, closing) if mark)
    tags = (CallTags(call=opening, call_end=closing),)
    return CallFormat(name, kind, tags, tokens, space, bare)


_ROWS: Final = (
    CallFormat("harmony", "harmony", (), _HARMONY, ""),
    CallFormat(
        "kimi-k3", "pairs", (_K3,), ("<|open|>", "<|close|>", "<|sep|>"), "",
        reply=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    CallFormat("kimi-k2", "named", (_K2,), tuple(tag for tag in _K2 if tag), ""),
    CallFormat(
        "dsml", "pairs", (_dsml("function_calls"), _dsml("tool_calls"), _dsml("calls", " ")),
        ("｜DSML｜",),
    ),
    CallFormat("deepseek-v3", "fenced", (_DEEPSEEK,), tuple(tag for tag in _DEEPSEEK if tag)),
    CallFormat(
        "gemma4", "keys", (CallTags(call="<|tool_call>", value='<|"|>', call_end="<tool_call|>"),),
        ("<|tool_call>", "<tool_call|>", '<|"|>'), "",
    ),
    CallFormat(
        "functiongemma", "keys",
        (CallTags(call="<start_function_call>", value="<escape>", call_end="<end_function_call>"),),
        ("<start_function_call>", "<end_function_call>", "<escape>"), "",
    ),
    CallFormat(
        "hy-v3", "pairs", (_HY,), tuple(tag for tag in _HY if tag)
    ),
    CallFormat("glm", "pairs", (_GLM,), tuple(tag for tag in _GLM if tag)),
    CallFormat(
        "seed-oss", "pairs", (_QWEN._replace(section="<seed:tool_call>", section_end="</seed:tool_call>"),),
        ("<seed:tool_call>", "</seed:tool_call>"), has_lines=True,
    ),
    CallFormat(
        "qwen-xml", "pairs", (_QWEN,), ("<tool_call>", "</tool_call>"), has_lines=True,
    ),
    CallFormat(
        "minimax-m2", "pairs", (_MINIMAX,), (_MINIMAX.section, _MINIMAX.section_end)
    ),
    _simple("hermes", "objects", "<tool_call>", "</tool_call>"),
    CallFormat(
        "mistral", "mistral", (CallTags(call="[TOOL_CALLS]"),), 
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    _simple(
        "llama4", "python", "<|python_start|>", "<|python_end|>", bare="[", space=""
    ),
    _simple(
        "llama3", "objects", "<|python_tag|>", "", bare="{",
        space="",
    ),
    _simple("lfm2", "python", "<|tool_call_start|>", "<|tool_call_end|>"),
    _simple("olmo3", "python", "<function_calls>", "</function_calls>"),
    _simple("granite3", "objects", "<|tool_call|>", ""),
    _simple("phi4-mini", "objects", "functools", ""),
    _simple("jamba", "objects", "<tool_calls>", "</tool_calls>"),
    _simple("hunyuan-a13b", "objects", "<tool_calls>", "</tool_calls>"),
    _simple("nemotron", "objects", "<TOOLCALL>", "</TOOLCALL>"),
    CallFormat(
        "internlm2", "objects", (CallTags(call="<|action_start|><|plugin|>", call_end="<|action_end|>"),),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    CallFormat("xlam", "objects", (CallTags(call="```json"),), bare="["),
)  # fmt: skip
FORMATS: Final[Mapping[ToolParser, CallFormat]] = {row.name: row for row in _ROWS}
"""All formats by their names."""


def call_format(template: str, parser: ToolParser | None = None) -> CallFormat | None:
    """The format in which a chat template writes calls; `None` if no name is configured, and the template doesn't use
    any known format.

    Args:
        template: the source of the template, or of all the model's templates.
        parser: the configured name of the format; `None` to detect it.
    """
    name = parser or found_tool_parser(template)
    format = None if name is None else FORMATS[name]
    if format is not None and format.name == "mistral":
        return format._replace(has_names="[ARGS]" in template)
    return format


class ToolUse(NamedTuple):
    """How the answers to a request are searched for calls."""

    format: CallFormat
    tools: Mapping[str, Mapping[str, Any]]
    """The JSON schemas of the parameters of functions that may be called, by the functions' names. A call of another
    function is content."""
    is_constrained: bool = False
    """Whether a grammar restricts the model to valid calls. Their arguments can then be streamed before their end, and
    any other text is the rest of a truncated call, and is omitted."""
    only_first: bool = False
    """Whether calls after the first are omitted."""
