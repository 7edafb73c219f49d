"""The grammars of required calls, compiled by the engine's library: each takes calls as the format's models write them,
and nothing else."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import jsonschema_rs
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from headwater.answer_formats import ReasoningName, ToolParser
from headwater.engine import Grammar
from headwater.lm.grammar_source import compiled, special_texts
from headwater_server.lm.call_grammar import call_grammar, can_hold_strict, required_format
from headwater_server.lm.reasoning_grammar import after_reasoning, content_opening, limited_reasoning
from headwater_server.lm.text.answer_parts import SPECIAL
from headwater_server.lm.text.answer_reader import REASONING, AnswerReading, ReasoningFormat
from headwater_server.lm.text.token_texts import TokenTexts
from headwater_server.lm.text.tool_calls import FORMATS, CallFormat, ToolUse
from tests.app.lm.scripted import FOLDER
from tests.app.lm.text.answers import read

pytestmark = pytest.mark.heavy
MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|channel|>", "<|message|>", "<|constrain|>", "<|tool_call|>", "<|action_start|>", "<|action_end|>", "<|plugin|>",
    "<seed:tool_call>", "</seed:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_sep>",
    "<minimax:tool_call>", "</minimax:tool_call>", "｜DSML｜", "<|end|>", "<|start|>",
]  # fmt: skip
VOCAB_SIZE = 4160
PARAMETERS: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "unit": {"enum": ["c", "f/g"]}, "zip": {"$ref": "#/$defs/zip"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"zip": {"type": "string", "pattern": "^[0-9]{5}/?$"}},
}  # fmt: skip
NOTHING: Any = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = {
    0: {"function": {"name": "weather", "parameters": PARAMETERS}},
    3: {"function": {"name": "no", "parameters": NOTHING}},
}


class Compiler:
    """A tokenizer, perhaps with tokens for all marks, and its grammars."""

    def __init__(self, *, has_marks: bool) -> None:
        model = json.loads((FOLDER / "tokenizer.json").read_text())
        first = model["added_tokens"][0]
        model["added_tokens"] += [
            {**first, "id": 4096 + n, "content": mark, "special": False} for n, mark in enumerate(MARKS * has_marks)
        ]
        self.tokenizer = Tokenizer.from_str(json.dumps(model))
        self.texts = TokenTexts(self.tokenizer, model["decoder"])
        self._library = LLTokenizer(json.dumps(model), VOCAB_SIZE, [0, 2])
        self._special = special_texts(self._library)

    def grammar(self, name: str, tools: Any = TOOLS, **options: Any) -> Grammar:
        return call_grammar(format_of(name), tools, self.texts.added_id, **{"is_single": False, **options})

    def walked(self, grammar: Grammar, random: Random, hints: Sequence[str]) -> list[int] | None:
        """An answer that the grammar takes, of random tokens; where any text may follow, sometimes one of the hints.
        `None` if the answer doesn't end soon."""
        matcher, _ = compiled(self._library, self._special, grammar.kind, grammar.text, grammar.before)
        ids: list[int] = []
        for _ in range(300):
            mask = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
            allowed = numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little"))
            if matcher.is_accepting() and (len(allowed) <= 1 or random.random() < 0.4):
                return ids
            tokens = [int(random.choice(allowed))]
            if len(allowed) > 200 and random.random() < 0.7:
                tokens = self.tokenizer.encode(random.choice(hints), add_special_tokens=False).ids
            if tokens[0] in (0, 2):  # the answer's end
                return ids
            tokens = tokens[: matcher.validate_tokens(tokens)]
            assert matcher.consume_tokens(tokens)
            assert not matcher.get_error()
            ids += tokens
        return None

    def text(self, ids: Sequence[int], reading: AnswerReading) -> str:
        """The text of an answer as its reader gets it."""
        marks = {self.texts.added_id(mark): f"\uf8ff{mark}".encode() for mark in reading.specials}
        text = b"".join(marks.get(id) or self.texts.bytes_of[id] for id in ids).decode(errors="replace")
        return text.replace("\uf8ff", SPECIAL)

    def takes(self, grammar: Grammar, text: str, *, is_whole: bool = True) -> bool:
        """Whether an answer may be this text, or else begin with it."""
        matcher, _ = compiled(self._library, self._special, grammar.kind, grammar.text, grammar.before)
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            if not matcher.compute_bitmask()[token // 8] >> token % 8 & 1:
                return False
            matcher.consume_token(token)
            assert not matcher.get_error()
        return not is_whole or matcher.is_stopped() or matcher.is_accepting()


class Named:
    """A format's name, as far as grammars read it."""

    def __init__(self, name: str) -> None:
        self.name = "mistral" if name == "mistral_args" else name
        self.has_names = name == "mistral_args"


def format_of(name: str) -> Any:
    return Named(name.removesuffix(".1"))


@functools.cache
def compiler(*, has_marks: bool = True) -> Compiler:
    return Compiler(has_marks=has_marks)


OWN: dict[ToolParser, tuple[ReasoningName, ...]] = {
    "harmony": ("harmony",), "mistral": ("mistral", "think"), "seed-oss": ("seed-oss",), "granite3": ("granite",),
    "hunyuan-a13b": ("hunyuan",),
}  # fmt: skip
"""The formats of reasoning of the models that write calls in a format, where it isn't ``think``."""
READ: list[tuple[CallFormat, ReasoningName | None]] = [
    (format, reasoning)
    for row in FORMATS.values()
    for format in ((row, row._replace(has_names=True)) if row.name == "mistral" else (row,))
    for reasoning in (None, *(REASONING if row.name == "llama3" else OWN.get(row.name, ("think",))))
    if (row.name, reasoning) != ("llama3", "harmony")
]
SEVERAL: Any = {
    **TOOLS,
    4: {
        "function": {
            "name": "set-all",
            "parameters": {
                "type": "object",
                "properties": {
                    "on": {"type": "boolean"}, "share": {"type": "number"}, "text": {"type": "string", "maxLength": 9},
                    "either": {"type": ["string", "integer"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
                    "place": {
                        "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                        "additionalProperties": False,
                    },
                },
                "additionalProperties": False,
            },
        }
    },
}  # fmt: skip
HINTS = ["\n", '"', '"}', "}", "]", ",", "a", "7", "\\", "null", " ", "</", "<", "```", "; ", "</think>"]


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize(("format", "reasoning"), READ, ids=lambda part: getattr(part, "name", part))
def test_what_a_grammar_takes_is_read_back(
    format: CallFormat, reasoning: ReasoningName | None, has_marks: bool
) -> None:
    library = compiler(has_marks=has_marks)
    held = required_format(format, SEVERAL)
    calls = grammar = call_grammar(held, SEVERAL, library.texts.added_id, is_single=False)
    thought = REASONING[reasoning] if reasoning else None
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in SEVERAL.values()}
    # Whole tags within a value between the same tags are ambiguous.
    marks = [mark for tags in held.tags for mark in tags if mark] if held.kind != "pairs" else ["</", "</function"]
    hints = [*HINTS, *marks, *(f"\n{mark}" for mark in marks), *([thought.closing] * 3 if thought else [])]
    read_calls = 0
    for seed in range(8):
        is_open = thought is not None and seed % 2 == 1
        if thought is not None:
            grammar = after_reasoning(calls, thought, library.texts, is_open=is_open)
        ids = library.walked(grammar, Random(seed), hints)
        if ids is None:
            continue
        answers = []
        for is_constrained in (True, False):
            way = AnswerReading(ToolUse(held, schemas, is_constrained), thought, is_open=is_open)
            way = way.with_tokens(library.texts.added_id)
            text = library.text(ids, way)
            answers.append(read(way, text))
            assert read(way, *text) == answers[-1]
        assert answers[0] == answers[1], repr(text)
        assert not answers[0].content, repr(text)
        assert answers[0].calls, repr(text)
        for name, arguments in answers[0].calls:
            jsonschema_rs.validate(schemas[name], json.loads(arguments, parse_float=lambda _: 0.5))
        read_calls += len(answers[0].calls)
    assert read_calls > 0


OBJECT = '{"city":"K</x>ö","days":3,"zip":"02139"}'
CALLS = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {OBJECT}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "no", "arguments": {}}\n</tool_call>'
    ),
    "llama3": f'{{"name": "weather", "parameters": {OBJECT}}}; {{"name": "no", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {OBJECT}}}, {{"name": "no", "arguments": {{}}}}]',
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{OBJECT}[TOOL_CALLS]no[ARGS]{{}}",
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{OBJECT}<|tool_call_end|><|tool_call_begin|>functions.no:12<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{OBJECT}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>no\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>no<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OBJECT}",
    "granite3": f'<|tool_call|>[{{"name": "weather", "arguments": {OBJECT}}}]',
    "phi4-mini": f'functools[{{"name": "weather", "arguments": {OBJECT}}}]',
    "hunyuan-a13b": f'<tool_calls>[{{"name": "weather", "arguments": {OBJECT}}}]</tool_calls>',
    "jamba": f'<tool_calls>[\n{{"name": "weather", "arguments": {OBJECT}}}\n]</tool_calls>',
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {OBJECT}}}]</TOOLCALL>',
    "xlam": f'[{{"name": "weather", "arguments": {OBJECT}}}, {{"name": "no", "arguments": {{}}}}]',
    "internlm2": f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {OBJECT}}}<|action_end|>',
    "qwen-xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nK</x>ö\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=unit>\nf/g\n</parameter>\n<parameter=zip>\n02139\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=no>\n</function>\n</tool_call>"
    ),
    "seed-oss": (
        "<seed:tool_call>\n<function=weather>\n<parameter=city>K</x>ö</parameter>\n<parameter=days>3</parameter>\n"
        "<parameter=zip>02139</parameter>\n</function>\n</seed:tool_call>"
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>K</x>ö</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>02139</arg_value>\n</tool_call>\n"
        "<tool_call>no</tool_call>"
    ),
    "hy-v3": (
        "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>K</x>ö</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>zip</arg_key><arg_value>02139</arg_value>"
        "</tool_call>\n</tool_calls>"
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">K</x>ö</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="zip">02139</parameter>\n</invoke>\n'
        '<invoke name="no">\n</invoke>\n</minimax:tool_call>'
    ),
    "dsml": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">K</x>ö'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="zip" string="true">02139</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    ),
}


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_its_format_is_taken_and_no_other(name: str, has_marks: bool) -> None:
    library = compiler(has_marks=has_marks)
    grammar, call = library.grammar(name), CALLS[name]
    assert library.takes(grammar, call)
    assert library.takes(grammar, call.replace("K</x>ö", "日\t🙂 <a & b>" if grammar.text.count("suffix") else "日🙂"))
    place = call.rindex("3")
    wrong = [call.replace("weather", "whether"), call.replace("city", "town"), call.replace("02139", "2139")]
    for text in [*wrong, f"{call[:place]}x{call[place + 1 :]}", call[:-2], f"Well: {call}", call.replace("no", "nn")]:
        if text != call:
            assert not library.takes(grammar, text), text


@pytest.mark.parametrize("name", CALLS)
def test_a_single_call(name: str) -> None:
    library = compiler()
    grammar = library.grammar(name, is_single=True)
    has_two = re.search(r"\bno\b", CALLS[name]) is not None
    assert library.takes(grammar, CALLS[name]) == (not has_two)


@pytest.mark.parametrize("name", ["hermes", "harmony", "qwen-xml"])
def test_content_of_a_schema_may_stand_in_place_of_calls(name: str) -> None:
    content = Grammar("json_schema", '{"type":"integer"}', "response_format")
    opening = content_opening(HARMONY) if name == "harmony" else ""
    library = compiler()
    grammar = library.grammar(name, content=content, content_opening=opening)
    assert library.takes(grammar, CALLS[name])
    assert library.takes(grammar, f"{opening}42")
    assert not library.takes(grammar, f"{opening}x")


HOLDS_STRICT: dict[str, CallFormat] = {
    "hermes": FORMATS["hermes"],
    "mistral": FORMATS["mistral"],
    "mistral_args": FORMATS["mistral"]._replace(has_names=True),
    "kimi-k2": FORMATS["kimi-k2"],
    "deepseek-v3": FORMATS["deepseek-v3"],
    "deepseek-v3.1": FORMATS["deepseek-v3"],
    "harmony": FORMATS["harmony"],
    "granite3": FORMATS["granite3"],
    "internlm2": FORMATS["internlm2"],
}
"""By the names in `CALLS`."""


@pytest.mark.parametrize("name", HOLDS_STRICT)
def test_calls_of_strict_tools_are_held_among_any_text(name: str) -> None:
    library, format, call = compiler(), HOLDS_STRICT[name], CALLS[name]
    assert can_hold_strict(format, library.texts.added_id)
    grammar, single = (
        call_grammar(format, TOOLS, library.texts.added_id, is_single=is_single, strict=[0, 3])
        for is_single in (False, True)
    )
    opening, before = {
        "harmony": (
            "<|channel|>final<|message|>", "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant"
        )
    }.get(name, ("", "I ask:\n"))  # fmt: skip
    for text in ("", "<b>Köln</b> [1] {}", "\n", "```json\n[{}]\n```", "Yes: {}"):
        assert library.takes(grammar, opening + text)
    assert library.takes(grammar, call)
    assert library.takes(grammar, before + call)
    assert library.takes(single, call) == (re.search(r"\bno\b", call) is None)
    for wrong in (call.replace("weather", "whether"), call.replace("city", "town"), call.replace("02139", "2139")):
        assert not library.takes(grammar, wrong), wrong


@pytest.mark.parametrize("name", HOLDS_STRICT)
def test_whatever_a_model_writes_its_calls_of_strict_tools_are_sound(name: str) -> None:
    library, format, call = compiler(), HOLDS_STRICT[name], CALLS[name]
    grammar = call_grammar(format, TOOLS, library.texts.added_id, is_single=False, strict=[0, 3])
    wrong = call.replace("02139", "2139")
    marks = [*format.tokens, *(mark for tags in format.tags for mark in tags if mark)]
    hints = [*HINTS, *marks, call, wrong, *(wrong.replace(mark, "", 1) for mark in marks), "functions.weather:0"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS.values()}
    way = AnswerReading(ToolUse(format, schemas), None).with_tokens(library.texts.added_id)
    found = 0
    for seed in range(20):
        ids = library.walked(grammar, Random(seed), hints)
        for called, arguments in [] if ids is None else read(way, library.text(ids, way)).calls:
            jsonschema_rs.validate(schemas[called], json.loads(arguments))
            found += 1
    assert found > 0


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_tool_that_is_not_strict_takes_any_object(name: str) -> None:
    library, call = compiler(), CALLS[name]
    grammar = call_grammar(HOLDS_STRICT[name], TOOLS, library.texts.added_id, is_single=False, strict=[3])
    assert library.takes(grammar, call.replace("city", "town"))
    assert not library.takes(grammar, call.replace(OBJECT, "[]"))
    assert not library.takes(grammar, call.replace("{}", '{"a": 1}'))


def test_formats_whose_calls_cannot_be_told_from_text() -> None:
    plain, marked = compiler(has_marks=False).texts.added_id, compiler().texts.added_id
    held = {format.name for format in HOLDS_STRICT.values()}
    assert {format.name for format in FORMATS.values() if can_hold_strict(format, marked)} == held
    assert not any(can_hold_strict(format, plain) for format in (None, *FORMATS.values()))


@settings(max_examples=25, deadline=None)
@given(
    st.text(max_size=30).filter(lambda text: not any(mark in text for mark in [*MARKS, "<|"])),
    st.sampled_from(["qwen-xml", "glm", "dsml", "minimax-m2"]),
    st.booleans(),
)
def test_a_string_is_any_text(text: str, name: str, has_marks: bool) -> None:
    library = compiler(has_marks=has_marks)
    assert library.takes(library.grammar(name), CALLS[name].replace("K</x>ö", text))


@pytest.mark.parametrize("name", ["kimi-k3", "gemma4", "functiongemma", "llama4", "lfm2", "olmo3"])
def test_models_of_other_formats_write_plain_json(name: str) -> None:
    for format in (None, format_of(name)):
        assert required_format(format, TOOLS) is FORMATS["llama3"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, {"$ref": "#/$defs/a"}, {"required": ["absent"]},
        {"properties": {'a"b': {}}}, {"properties": {"a>": {}}}, {"properties": {"": {}}},
    ],
)  # fmt: skip
def test_what_pairs_cannot_hold_is_written_as_json(parameters: Any) -> None:
    tools = {0: {"function": {"name": "f", "parameters": parameters}}}
    assert required_format(format_of("glm"), tools) is FORMATS["llama3"]
    assert required_format(format_of("hermes"), tools).name == "hermes"


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ({"type": "string", "maxLength": 3}, "ab\n", "abcd"),
        ({"type": "string", "minLength": 2}, "ab", "a"),
        ({"type": "string", "pattern": "b/"}, "ab/c", "ab"),
        ({"type": "string", "pattern": "^a"}, "abc", "ba"),
        ({"const": "x y"}, "x y", "x"),
        ({"type": ["string", "null"]}, "any", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "any", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "any", None),
        ({}, "any", None),
        (True, "any", None),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", '["a"]'),
        ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, '{"a": 1}', '{"a": 2}'),
        ({"type": "boolean"}, "true", "True"),
        ({"type": ["integer", "null"]}, "null", "x"),
    ],
)
@pytest.mark.parametrize("name", ["qwen-xml", "glm"])
def test_values_between_tags(part: Any, good: str, bad: str | None, name: str) -> None:
    parameters = {"type": "object", "properties": {"k": part}, "required": ["k"]}
    tools = {0: {"function": {"name": "f", "parameters": parameters}}}
    library = compiler()
    grammar = library.grammar(name, tools)
    text = {
        "qwen-xml": "<tool_call>\n<function=f>\n<parameter=k>\n{}\n</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    }[name]
    assert library.takes(grammar, text.format(good))
    assert bad is None or not library.takes(grammar, text.format(bad))
    assert not library.takes(grammar, text.format(good).replace("k", "j", 1))


HARMONY = ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>")
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def test_calls_and_content_after_reasoning_in_channels() -> None:
    library = compiler()
    texts = library.texts
    calls = after_reasoning(library.grammar("harmony"), HARMONY, texts, is_open=False)
    content = Grammar("json_schema", '{"type":"integer"}', "response_format")
    final = after_reasoning(content, HARMONY, texts, is_open=False, opening=content_opening(HARMONY))
    assert library.takes(calls, f"{THOUGHT}{CALLS['harmony']}")
    assert library.takes(calls, CALLS["harmony"])
    for begin in (THOUGHT, ""):
        assert library.takes(final, f"{begin}<|channel|>final<|message|>42")
        assert not library.takes(final, f"{begin}42")


def test_a_budget_of_reasoning_in_channels() -> None:
    library = compiler()
    grammar = limited_reasoning(HARMONY, library.texts, is_open=False, budget=3, field="f")
    assert library.takes(grammar, f"{THOUGHT}<|channel|>final<|message|>Yes, <|end|> anything.")
    assert library.takes(grammar, "<|channel|>final<|message|>analysis, as long as you like")
    assert library.takes(grammar, "<|channel|>commentary to=functions.f<|message|>{}")
    assert not library.takes(grammar, THOUGHT.replace("Hm.", "Hm, let me think"), is_whole=False)
