"""Tool calls in answers of each format."""

from __future__ import annotations

import pytest

from headwater.answer_formats import ToolParser
from headwater_server.lm.text.answer_parts import CallPart
from tests.app.lm.text.answers import read, read_all_ways, reading

ARGUMENTS = '{"city": "Köln \\"{]\\\\", "days": [1, {"a": null}]}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LLAMA_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
OTHER = '{"name": "add-up", "arguments": {}}'
BOTH = [("weather", ARGUMENTS), ("add-up", "{}")]
FIRST, SECOND = BOTH[:1], BOTH[1:]

SOUND: list[tuple[ToolParser, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", FIRST),
    ("hermes", f"So I see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n", "So I see.", BOTH),
    ("hermes", f"a\n<tool_call>{OTHER}</tool_call>\nb\n", "a\nb\n", SECOND),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "weather"}', "", [("weather", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "weather"}</tool_', "", [("weather", "{}")]),
    ("hermes", 'a </tool_call> < "<tool_ca', 'a </tool_call> < "<tool_ca', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', "", [("f", '{"a": "1\\u000a2"}')]),
    ("hermes", " \n ", " \n ", []),
    ("llama3", LLAMA_CALL, "", FIRST),
    ("llama3", f"\n {LLAMA_CALL}; {OTHER}\n", "", BOTH),
    ("llama3", f"<|python_tag|>{LLAMA_CALL};{OTHER}", "", BOTH),
    ("llama3", f"So: <|python_tag|>{CALL}", "So: ", FIRST),
    ("llama3", f"So: {CALL}", f"So: {CALL}", []),
    ("llama3", f"{OTHER}; and more", "; and more", SECOND),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", "", BOTH),
    ("mistral", f"So:\n[TOOL_CALLS] [{CALL},{OTHER}", "So:", BOTH),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add-up[CALL_ID]a1B2c3D4e[ARGS]{{}}", "", BOTH),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}\n[TOOL_CALLS] add-up {{}}", "", BOTH),
    ("mistral", f"[TOOL_CALLS]{OTHER}", "", SECOND),
    (
        "kimi-k2",
        f"So: <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_call_begin|>add-up:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "So: ", BOTH,
    ),
    (
        "deepseek-v3",
        f"So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add-up<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So:", BOTH,
    ),
    (
        "dsml",
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true"> 1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add-up"/>\n</｜DSML｜tool_calls>',
        "", [("weather", '{"city": " 1", "days": [1, 2]}'), ("add-up", "{}")],
    ),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>"a}"<|"|>,days:123456789012345678901,b c:[true,{x:None}]}<tool_call|>.',
        ".", [("weather", '{"city": "\\"a}\\"", "days": 123456789012345678901, "b c": [true, {"x": null}]}')],
    ),
    (
        "functiongemma", "<start_function_call>call:f{a:<escape>{b}<escape>,n:-1.5e3}<end_function_call>", "",
        [("f", '{"a": "{b}", "n": -1.5e3}')],
    ),
    (
        "hy-v3",
        "a\n<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>add-up<tool_sep>\n</tool_call>\n</tool_calls>",
        "a", [("weather", '{"days": 3}'), ("add-up", "{}")],
    ),
    (
        "glm",
        "a\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> 02139\n</arg_value>\n<arg_key>days</arg_key>"
        "<arg_value>123456789012345678901</arg_value></tool_call><tool_call>add-up</tool_call>b",
        "ab", [("weather", '{"city": " 02139\\n", "days": 123456789012345678901}'), ("add-up", "{}")],
    ),
    (
        "seed-oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>true</parameter>\n<parameter=dry>true</parameter>\n"
        "</function>\n</seed:tool_call>",
        "", [("weather", '{"city": "true", "dry": true}')],
    ),
    (
        "qwen-xml",
        "a\n\n<tool_call>\n<function=weather>\n<parameter=city>\n\n</parameter> <function=f> x\n\n</parameter>\n"
        "<parameter=more>\n{'a': None}\n</parameter>\n<parameter=when>\nnull\n</parameter>\n</function>\n</tool_call>",
        "a", [("weather", '{"city": "\\n</parameter> <function=f> x\\n", "more": {"a": null}, "when": null}')],
    ),
    ("qwen-xml", "a\n<function=f>\n</function>\n</tool_call>", "a", [("f", "{}")]),
    ("qwen-xml", "Write <function=f>\n</function>.", "Write <function=f>\n</function>.", []),
    (
        "minimax-m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">a\nb</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        "", [("weather", '{"city": "a\\nb", "days": 3}'), ("f", "{}")],
    ),
    (
        "kimi-k3",
        'a<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="c&amp;d" type="string"<|sep|>1<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        "a", [("weather", '{"c&d": "1", "days": 1}')],
    ),
    (
        "llama4", "[weather(city='a\\'b', days=12345678901234567890), f(_x=[1, ('b',)], y={'a': True})]", "",
        [("weather", '{"city": "a\'b", "days": 12345678901234567890}'), ("f", '{"_x": [1, ["b"]], "y": {"a": true}}')],
    ),
    ("llama4", "[1, 2] is a list", "[1, 2] is a list", []),
    ("llama4", "<|python_start|>[f()]<|python_end|>", "", [("f", "{}")]),
    ("lfm2", 'a <|tool_call_start|>[f(a="x")]<|tool_call_end|>b', "ab", [("f", '{"a": "x"}')]),
    ("olmo3", "<function_calls>\nf(a=null)\nadd-up()\n</function_calls>", "", [("f", '{"a": null}'), ("add-up", "{}")]),
    ("granite3", f"<|tool_call|>[{CALL}, {OTHER}]", "", BOTH),
    ("phi4-mini", f"functools[{CALL}, {OTHER}]", "", BOTH),
    ("jamba", f"a\n<tool_calls>[\n{CALL},\n{OTHER}\n]</tool_calls>", "a", BOTH),
    ("hunyuan-a13b", f"<tool_calls>[{OTHER}]</tool_calls>", "", SECOND),
    ("nemotron", f"<TOOLCALL>[{CALL}, {OTHER}]</TOOLCALL>", "", BOTH),
    ("internlm2", f"a\n<|action_start|><|plugin|>\n{LLAMA_CALL}<|action_end|>\n", "a", FIRST),
    ("xlam", f"[{CALL}, {OTHER}]", "", BOTH),
    ("xlam", f"```json\n[{CALL}]\n```", "", FIRST),
    ("xlam", "```json\n[1]\n```", "```json\n[1]\n```", []),
    (
        "harmony", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ARGUMENTS, "", FIRST,
    ),
]  # fmt: skip
MALFORMED: list[tuple[ToolParser, str]] = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>weather</tool_call>"),
    ("hermes", f"<tool_call>{CALL[:-1]}"),
    ("hermes", f"<tool_call>{CALL} more</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 200 + "1" + "}" * 200 + "}</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather\\'),
    ("hermes", f"`<tool_call>{CALL}</tool_call>`"),
    ("hermes", f"```\n<tool_call>{CALL}</tool_call>\n```"),
    ("llama3", '{"name": "Ada", "parameters": {}}'),
    ("llama3", '{"answer": 42}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("llama3", "{]}; {}"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]no name{}"),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{1}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("glm", "<tool_call>unknown</tool_call>"),
    ("glm", "<tool_call>f<arg_key>a</arg_key>"),
    ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("gemma4", "<|tool_call>call:f{a:<tool_call|>"),
    ("gemma4", "<|tool_call>call:" + "x" * 2000 + "{}<tool_call|>"),
    ("llama4", "[f(1)]"),
    ("llama4", "[f(a=b)]"),
    ("lfm2", "<|tool_call_start|>[f(a=" + "[" * 200 + "]" * 200 + ")]<|tool_call_end|>"),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="f'),
    ("dsml", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="unknown">'),
]  # fmt: skip


@pytest.mark.parametrize(("format", "answer", "content", "calls"), SOUND)
def test_calls_are_found(format: ToolParser, answer: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read_all_ways(reading(format), answer) == (content, "", calls)


@pytest.mark.parametrize(("format", "answer"), MALFORMED)
def test_what_is_no_call_is_content(format: ToolParser, answer: str) -> None:
    way = read if len(answer) > 300 else read_all_ways
    assert way(reading(format), answer) == (answer, "", [])
    assert read(reading(format), *answer) == (answer, "", [])


@pytest.mark.parametrize(("format", "answer", "content", "calls"), [row for row in SOUND if row[3]])
def test_a_call_that_the_limit_cut_is_neither_call_nor_content(
    format: ToolParser, answer: str, content: str, calls: list[tuple[str, str]]
) -> None:
    if content not in answer:
        content = ""
    begin = answer.index(content) + len(content) if answer.startswith(content) else 0
    for end in range(begin, len(answer)):
        cut = read(reading(format), answer[:end], finish="length")
        assert cut.calls == calls[: len(cut.calls)]


@pytest.mark.parametrize("cut", ["<tool_call>", "<tool_call>\n{", f"<tool_call>{CALL}\n</tool_c", "<tool_call>not"])
def test_what_stands_before_a_cut_call_stays(cut: str) -> None:
    whole = f"<tool_call>{OTHER}</tool_call>\n"
    expected = "<tool_call>not" if cut.endswith("not") else ""
    assert read_all_ways(reading("hermes"), f"So.\n{cut}", "length").content == "So." + (expected and f"\n{expected}")
    assert read(reading("hermes"), whole + cut, finish="length").calls == SECOND


def test_a_mark_that_is_a_token_is_no_mark_where_it_is_spelled() -> None:
    spelled = f"<tool_call>{CALL}</tool_call>"
    tokens = spelled.replace("<", "\ud800<")
    way = reading("hermes", has_tokens=True)
    assert read_all_ways(way, spelled) == (spelled, "", [])
    assert read_all_ways(way, tokens) == ("", "", FIRST)
    assert read_all_ways(way, f"```\n{tokens}") == ("```", "", FIRST)
    assert read_all_ways(way, "a \ud800</tool_call>b") == ("a b", "", [])


def test_kimis_own_ids_come_with_the_calls() -> None:
    reader = reading("kimi-k2").reader()
    answer = SOUND[[row[0] for row in SOUND].index("kimi-k2")][1]
    parts = reader.read(answer, "stop")
    assert next(part.id for part in parts if isinstance(part, CallPart) and part.name) == "functions.weather:0"


@pytest.mark.parametrize(
    ("format", "answer"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("llama3", LLAMA_CALL),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    ],
)
def test_arguments_come_as_they_are_written_where_a_grammar_makes_them_sound(format: ToolParser, answer: str) -> None:
    reader = reading(format, is_constrained=True).reader()
    events = [reader.read(character, None) for character in answer]
    begin = answer.index(ARGUMENTS)
    assert [part[:3] for part in events[begin] if isinstance(part, CallPart)] == [(0, "weather", ""), (0, "", "{")]
    assert [event for event in events[begin + 1 :] if event] == [[CallPart(0, "", one)] for one in ARGUMENTS[1:]]
    assert reader.read("", "stop") == []


def test_what_the_length_cut_is_a_part_of_a_call_where_a_grammar_made_it() -> None:
    answer = f"<tool_call>{CALL}</tool_call>"
    for end in range(len(answer) + 1):
        content, _, calls = read(reading("hermes", is_constrained=True), answer[:end], finish="length")
        assert ("".join(call[1] for call in calls)) == ARGUMENTS[: max(end - answer.index(ARGUMENTS), 0)]
        assert content == ""


def test_further_calls_can_be_left_out() -> None:
    answer = f"<tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call>"
    assert read(reading("hermes", only_first=True), answer) == ("", "", FIRST)
