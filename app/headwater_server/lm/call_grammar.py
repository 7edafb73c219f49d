"""The grammar of an answer that calls tools, in llguidance's dialect of Lark.

Sources of the formats: the models' public chat templates and documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from headwater.engine import MAX_GRAMMAR, Grammar
from headwater_server.codecs.faults import at
from headwater_server.lm.held_schemas import held_schema
from headwater_server.lm.lark import marked, quoted
from headwater_server.lm.pair_grammar import can_hold_pairs, pair_rules
from headwater_server.lm.text.tool_calls import FORMATS, CallFormat

__all__ = ["call_grammar", "can_hold_strict", "required_format"]


class _Shape(NamedTuple):
    """How a format writes calls. In its texts ``{name}`` stands for the function's name, ``{arguments}`` for the
    arguments, ``{index}`` for a number, ``{line}`` for a newline or nothing."""

    call: str
    between: str = ""
    """The text between two calls."""
    opening: str = ""
    """The text before all calls."""
    closing: str = ""
    """The text after all calls."""
    pair: str = ""
    """An argument, with ``{key}`` and ``{value}``; empty if the arguments are a JSON object."""
    json_pair: str = ""
    """An argument that is not a string; empty if it is written like a string."""
    is_single: bool = False
    """Whether an answer has a single call."""


def _list(opening: str, closing: str = "]", between: str = ", ") -> tuple[_Shape, ...]:
    """A format that writes calls as an array of objects."""
    return (_Shape('{"name": "{name}", "arguments": {arguments}}', between, opening, closing),)


_GLM: Final = "<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"
_DSML: Final = '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n'
_DSML_PAIR: Final = '<｜DSML｜parameter name="{key}" string="%s">{value}</｜DSML｜parameter>\n'
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_FENCED: Final = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
_SHAPES: Final[Mapping[str, tuple[_Shape, ...]]] = {
    "hermes": (_Shape('<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', "\n"),),
    "llama3": (_Shape('{"name": "{name}", "parameters": {arguments}}', "; "),),
    "mistral": _list("[TOOL_CALLS]["),
    "mistral_args": (_Shape("[TOOL_CALLS]{name}[ARGS]{arguments}"),),
    "kimi-k2": (
        _Shape(
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            opening="<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>",
        ),
    ),
    "deepseek-v3": (
        _Shape(_FENCED, "\n", *_DEEPSEEK),
        _Shape("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>", "", *_DEEPSEEK),
    ),
    "harmony": (
        _Shape("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}", is_single=True),
    ),
    "granite3": _list("<|tool_call|>["),
    "phi4-mini": _list("functools["),
    "hunyuan-a13b": _list("<tool_calls>[", "]</tool_calls>"),
    "jamba": _list("<tool_calls>[\n", "\n]</tool_calls>", ",\n"),
    "nemotron": _list("<TOOLCALL>[", "]</TOOLCALL>"),
    "xlam": _list("["),
    "internlm2": (
        _Shape(
            '<|action_start|><|plugin|>\n{"name": "{name}", "parameters": {arguments}}<|action_end|>', is_single=True
        ),
    ),
    "qwen-xml": (
        _Shape(
            "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", "\n",
            pair="<parameter={key}>\n{value}\n</parameter>\n",
        ),
    ),
    "seed-oss": (
        _Shape(
            "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>", "\n",
            pair="<parameter={key}>{value}</parameter>\n",
        ),
    ),
    "glm": (_Shape("<tool_call>{name}{line}{arguments}</tool_call>", "{line}", pair=_GLM),),
    "hy-v3": (
        _Shape(
            "<tool_call>{name}<tool_sep>{line}{arguments}</tool_call>{line}",
            opening="<tool_calls>{line}", closing="</tool_calls>", pair=_GLM,
        ),
    ),
    "minimax-m2": (
        _Shape(
            '<invoke name="{name}">\n{arguments}</invoke>\n', "", "<minimax:tool_call>\n", "</minimax:tool_call>",
            pair='<parameter name="{key}">{value}</parameter>\n',
        ),
    ),
    "dsml": tuple(
        _Shape(
            _DSML, "", f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>", _DSML_PAIR % "true", _DSML_PAIR % "false"
        )
        for section in ("function_calls", "tool_calls")
    ),
}  # fmt: skip
"""The formats in which required calls are written, each in one or more variants between which the model chooses. Models
with any other format write required calls like ``llama3``: as plain JSON."""
_PLACE: Final = re.compile(r"\{(name|arguments|index|line|key|value)\}")
_TOKEN: Final = re.compile(r"<\[(\d+)\]>")
_CHANNELS: Final = (
    "<|channel|>commentary<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant",
)  # fmt: skip
"""In the format ``harmony``, what the model writes before a text that other messages follow, before the last text, and
between two messages."""
_FREE: Final = {"index": "/[0-9]{1,4}/", "line": r"/\n?/"}


def required_format(format: CallFormat | None, tools: Mapping[int, Mapping[str, Any]]) -> CallFormat:
    """The format in which a model writes calls that a grammar holds: its own format, if a grammar can hold calls of
    these tools in it, else plain JSON, which any model can write.

    Args:
        format: the model's format; `None` if it isn't known.
        tools: see `call_grammar`.
    """
    shapes = () if format is None else _SHAPES.get(format.name, ())
    if format is None or not shapes:
        return FORMATS["llama3"]
    if shapes[0].pair and not all(can_hold_pairs(tool["function"]["parameters"]) for tool in tools.values()):
        return FORMATS["llama3"]
    return format


def can_hold_strict(format: CallFormat | None, token_id: Callable[[str], int | None]) -> bool:
    """Whether a grammar can tell a model's calls from any other text, and so hold them to their schemas: each call
    begins with an added token, and its arguments are a JSON object. Arguments between tags are read as a call even
    where the first tag of the call is missing.

    Args:
        format: the model's format; `None` if it isn't known.
        token_id: see `call_grammar`.
    """
    if format is None or format.name not in _SHAPES:
        return False
    shape = _SHAPES[format.name][0]
    return not shape.pair and _TOKEN.match(marked(shape.opening + shape.call, token_id)) is not None


_FIX: Final = 'leave it out, or let the model choose ("tool_choice": "auto" without "strict"): then it is ignored'


def call_grammar(
    format: CallFormat,
    tools: Mapping[int, Mapping[str, Any]],
    token_id: Callable[[str], int | None],
    *,
    is_single: bool,
    content: Grammar | None = None,
    content_opening: str = "",
    strict: Collection[int] | None = None,
) -> Grammar:
    """The grammar of an answer that has a call of any of these tools, or several calls unless `is_single` is set; with
    `content`, the answer may be JSON of this schema instead; with `strict`, it may have any other text.

    Args:
        format: the result of `required_format`.
        tools: the tools that may be called, in the form that `headwater_server.lm.tools.checked_tools` returns, by
            their places in the request.
        token_id: returns the id of an added token; `None` for any other text.
        is_single: whether the answer has at most a single call.
        content: the JSON schema of an answer without calls; `None` if there is none.
        content_opening: what the model writes before content.
        strict: the places of the tools whose arguments keep to their schemas, if the answer need not call a tool;
            `can_hold_strict` must be true. `None`: the answer must call a tool, and all tools are strict.

    Raises:
        BadRequest: `content` is not JSON; or a tool's schema can't be held (see `held_schema`); or the whole grammar is
            longer than `MAX_GRAMMAR`.
    """
    rules: list[str] = []
    starts: list[str] = []
    schemas = {
        n: _schema(n, tool["function"]["parameters"]) if strict is None or n in strict else {"type": "object"}
        for n, tool in tools.items()
    }
    shapes = _SHAPES["mistral_args" if format.name == "mistral" and format.has_names else format.name]
    for variant, shape in enumerate(shapes):
        functions = []
        for n, tool in tools.items():
            functions.append(f"f{variant}_{n}")
            values = {"name": quoted(tool["function"]["name"]), "arguments": f"a{n}"}
            if shape.pair:
                values["arguments"] = f"p{variant}_{n}"
                rules += pair_rules(values["arguments"], schemas[n], _pairs(shape, token_id), token_id)
            rules.append(f"{functions[-1]}: {_filled(shape.call, values, token_id)}")
        rules.append(f"c{variant}: {' | '.join(functions)}")
        more = "" if is_single or shape.is_single else f"({_filled(shape.between, {}, token_id)} c{variant})*"
        opening, closing = (_filled(part, {}, token_id) for part in (shape.opening, shape.closing))
        starts.append(f"{opening} c{variant} {more} {closing}")
    if not shapes[0].pair:
        rules += [f"a{n}: %json {msgspec.json.encode(schema).decode()}" for n, schema in schemas.items()]
    if content is not None:
        try:
            msgspec.json.decode(content.text)
        except msgspec.DecodeError as error:
            raise at(content.field, None, f"expected a JSON schema, got text that is no JSON: {error}") from error
        starts.append(f"{marked(content_opening, token_id)} content".strip())
        rules.append(f"content: %json {content.text}")
    start = " | ".join(starts)
    if strict is not None:
        marks = (token_id(mark) for mark in format.tokens)
        any_text = f"(<[^{','.join(str(mark) for mark in marks if mark is not None)}]>)*"
        if format.name == "harmony":
            preface, final, end = (marked(part, token_id) for part in _CHANNELS)
            start = f"({preface} {any_text} {end})? ({start} | {final} {any_text})"
        else:
            start = f"{any_text} (({start}) {any_text}){'?' if is_single or shapes[0].is_single else '*'}"
    text = "\n".join([f"start: {start}", *rules])
    if len(text) > MAX_GRAMMAR:
        expected = f"expected schemas that come to a grammar of at most {MAX_GRAMMAR} characters"
        raise at("tools", None, f"{expected}, got {len(text)}; shorten them, or offer fewer")
    return Grammar("lark", text, "tools")


def _schema(place: int, parameters: Any) -> dict[str, Any]:
    return {"type": "object", **held_schema(parameters, f"tools[{place}].function.parameters", _FIX)}


def _pairs(shape: _Shape, token_id: Callable[[str], int | None]) -> Callable[[str, bool], tuple[str, str, str]]:
    """The `pair` of `pair_rules`."""

    def pair(key: str, is_text: bool) -> tuple[str, str, str]:
        before, after = (shape.pair if is_text else shape.json_pair or shape.pair).split("{value}")
        end = after.index(">") + 1
        return _filled(before, {"key": quoted(key)}, token_id), after[:end], _filled(after[end:], {}, token_id)

    return pair


def _filled(text: str, values: Mapping[str, str], token_id: Callable[[str], int | None]) -> str:
    """A text of a shape as Lark."""
    parts = enumerate(_PLACE.split(text))
    filled = [(values.get(part) or _FREE[part]) if n % 2 else marked(part, token_id) for n, part in parts]
    return " ".join(part for part in filled if part) or '""'
