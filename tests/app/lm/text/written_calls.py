"""Writes tool calls in each format, as the formats' chat templates do, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from headwater.answer_formats import ToolParser
from headwater_server.lm.text.tool_calls import spelled

__all__ = ["HIDDEN", "SINGLE", "WRITERS", "Call", "Digits", "as_json", "written"]

Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""A function's name, and its arguments."""
Writer: TypeAlias = Callable[[Sequence[Call]], str]
HIDDEN: Final = {"<": "㊀", "[": "㊁", "｜": "㊂"}
"""The characters that begin marks, and what stands for them in strings while calls are written."""


class Digits(str):
    """The text of a number."""


def as_json(value: Any) -> str:
    """A value as JSON."""
    return _text(value, lambda text: json.dumps(text, ensure_ascii=False), ("true", "false", "null"))


def _as_python(value: Any) -> str:
    return _text(value, repr, ("True", "False", "None"))


def _as_keys(quote: str) -> Callable[[Any], str]:
    def write(value: Any) -> str:
        return _text(value, lambda text: f"{quote}{text}{quote}", ("true", "false", "null"), str)

    return write


def _text(
    value: Any, quoted: Callable[[str], str], words: tuple[str, str, str], key: Callable[[str], str] | None = None
) -> str:
    """A value in a syntax with these strings, words for true, false and null, and keys."""
    if isinstance(value, Digits):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        items = (f"{(key or quoted)(name)}:{_text(each, quoted, words, key)}" for name, each in value.items())
        return f"{{{','.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_text(each, quoted, words, key) for each in value)}]"
    return words[2] if value is None else words[not value]


def _object(name: str, arguments: Mapping[str, Any], word: str = "arguments") -> str:
    return f'{{"name": "{name}", "{word}": {as_json(arguments)}}}'


def _objects(opening: str, between: str, closing: str, word: str = "arguments") -> Writer:
    return lambda calls: opening + between.join(_object(*call, word) for call in calls) + closing


def _each(write: Callable[[int, str, Mapping[str, Any]], str], opening: str = "", closing: str = "") -> Writer:
    return lambda calls: opening + "".join(write(n, *call) for n, call in enumerate(calls)) + closing


def _pairs(call: str, pair: str, other: str = "", opening: str = "", closing: str = "") -> Writer:
    """A format of arguments one by one. ``call`` has places for the name and the arguments, ``pair`` for the key and
    the value; ``other`` is the pair of values that are no strings, if it differs."""

    def write(n: int, name: str, arguments: Mapping[str, Any]) -> str:
        parts = []
        for key, value in arguments.items():
            is_text = isinstance(value, str) and not isinstance(value, Digits)
            form = pair if is_text else other or pair
            parts.append(form.format(key=key, value=value if is_text else as_json(value), type=_type(value)))
        return call.format(n=n, name=name, pairs="".join(parts))

    return _each(write, opening, closing)


def _type(value: Any) -> str:
    if isinstance(value, Digits):
        return "number"
    kinds = {str: "string", bool: "boolean", dict: "object", list: "array"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "null")


def _python(opening: str, between: str, closing: str, value: Callable[[Any], str] = _as_python) -> Writer:
    def call(name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value(each)}' for key, each in arguments.items())})"

    return lambda calls: opening + between.join(call(*each) for each in calls) + closing


def _keys(opening: str, quote: str, closing: str) -> Writer:
    write = _as_keys(quote)
    return _each(lambda n, name, arguments: f"{opening}call:{name}{write(arguments)}{closing}")


_QWEN: Final = ("<function={name}>\n{pairs}</function>\n", "<parameter={key}>\n{value}\n</parameter>\n")
_GLM_LINES: Final = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
_INVOKE: Final = '<{mark}invoke name="{{name}}">\n{{pairs}}</{mark}invoke>\n'
_PARAMETER: Final = '<{mark}parameter name="{{key}}"{more}>{{value}}</{mark}parameter>\n'


def _dsml(section: str, space: str = "") -> Writer:
    mark = f"｜DSML｜{space}"
    text, other = (_PARAMETER.format(mark=mark, more=f' string="{word}"') for word in ("true", "false"))
    return _pairs(_INVOKE.format(mark=mark), text, other, f"<{mark}{section}>\n", f"</{mark}{section}>")


WRITERS: Final[Mapping[ToolParser, tuple[Writer, ...]]] = {
    "harmony": (
        lambda calls: (
            f"<|channel|>commentary to=functions.{calls[0][0]} <|constrain|>json<|message|>{as_json(calls[0][1])}"
        ),
        lambda calls: f" to=functions.{calls[0][0]}<|channel|>commentary json<|message|>{as_json(calls[0][1])}<|call|>",
    ),
    "kimi-k3": (
        _pairs(
            '<|open|>call tool="{name}" index="{n}"<|sep|>{pairs}<|close|>call<|sep|>',
            '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>', "",
            "<|open|>tools<|sep|>", "<|close|>tools<|sep|><|close|>message<|sep|>",
        ),
    ),
    "kimi-k2": (
        _each(
            lambda n, name, arguments: (
                f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{as_json(arguments)}"
                "<|tool_call_end|>"
            ),
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        ),
    ),
    "dsml": (_dsml("function_calls"), _dsml("tool_calls"), _dsml("calls", " ")),
    "deepseek-v3": (
        _each(
            lambda n, name, arguments: (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```<｜tool▁call▁end｜>"
            ),
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        ),
        _each(
            lambda n, name, arguments: (
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>"
            ),
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        ),
    ),
    "gemma4": (_keys("<|tool_call>", '<|"|>', "<tool_call|>"),),
    "functiongemma": (_keys("<start_function_call>", "<escape>", "<end_function_call>"),),
    "hy-v3": (
        _pairs("<tool_call>{name}<tool_sep>\n{pairs}</tool_call>\n", _GLM_LINES, "", "<tool_calls>\n", "</tool_calls>"),
    ),
    "glm": (
        _pairs("<tool_call>{name}\n{pairs}</tool_call>", _GLM_LINES),
        _pairs("<tool_call>{name}{pairs}</tool_call>", _GLM_LINES.replace("\n", "")),
    ),
    "seed-oss": (
        _pairs(f"<seed:tool_call>\n{_QWEN[0]}</seed:tool_call>\n", _QWEN[1].replace("\n{value}\n", "{value}")),
    ),
    "qwen-xml": (_pairs(f"<tool_call>\n{_QWEN[0]}</tool_call>\n", _QWEN[1]),),
    "minimax-m2": (
        _pairs(
            _INVOKE.format(mark=""), _PARAMETER.format(mark="", more=""), "", "<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
    ),
    "hermes": (_objects("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),),
    "mistral": (
        _objects("[TOOL_CALLS][", ", ", "]"),
        _each(lambda n, name, arguments: f"[TOOL_CALLS]{name}[ARGS]{as_json(arguments)}"),
        _each(lambda n, name, arguments: f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4{n}[ARGS]{as_json(arguments)}"),
    ),
    "llama4": (_python("[", ", ", "]"), _python("<|python_start|>[", ", ", "]<|python_end|>")),
    "llama3": (_objects("", "; ", "", "parameters"), _objects("<|python_tag|>", "; ", "", "parameters")),
    "lfm2": (_python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),),
    "olmo3": (
        _python("<function_calls>\n", "\n", "\n</function_calls>", as_json),
        _python("<function_calls>", "\n", "</function_calls>"),
    ),
    "granite3": (_objects("<|tool_call|>[", ", ", "]"),),
    "phi4-mini": (_objects("functools[", ", ", "]"),),
    "jamba": (_objects("<tool_calls>[\n", ",\n", "\n]</tool_calls>"),),
    "hunyuan-a13b": (_objects("<tool_calls>[", ", ", "]</tool_calls>"),),
    "nemotron": (_objects("<TOOLCALL>[", ", ", "]</TOOLCALL>"),),
    "internlm2": (
        lambda calls: f"<|action_start|><|plugin|>\n{_object(*calls[0], 'parameters')}<|action_end|>\n",
    ),
    "xlam": (_objects("[", ", ", "]"), _objects("```json\n[", ", ", "]\n```")),
}  # fmt: skip
"""By format, how its models write calls, in each variant. `SINGLE` has the formats whose answers have a single call."""
SINGLE: Final = frozenset[ToolParser]({"harmony", "internlm2"})


def written(write: Writer, calls: Sequence[Call], specials: frozenset[str] = frozenset()) -> str:
    """Calls in a format, with `SPECIAL` before each mark that is a special token; strings have no such tokens."""
    text = spelled(write([(name, _hidden(arguments)) for name, arguments in calls]), specials)
    for character, hidden in HIDDEN.items():
        text = text.replace(hidden, character)
    return text


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_hidden(key): _hidden(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_hidden(each) for each in value]
    return value.translate({ord(mark): hidden for mark, hidden in HIDDEN.items()}) if type(value) is str else value
