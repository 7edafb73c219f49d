"""Headwater's reader of answers as an engine of canitoolcall.

Marks that are special tokens are known by the ids in the fixtures; all other text is cut into words, since the suite
brings no tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from canitoolcall.adapters.base import Adapter, ReplayInput, Support, ToolSpec
from canitoolcall.results import ParsedToolCall, ParseResult

from headwater.answer_formats import ReasoningName, ToolParser
from headwater_server.lm.text.answer_parts import SPECIAL, AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text.answer_reader import REASONING, AnswerReader, AnswerReading
from headwater_server.lm.text.tool_calls import FORMATS, ToolUse

__all__ = ["HeadwaterAdapter"]


class _Model(NamedTuple):
    parser: ToolParser
    reasoning: ReasoningName | None
    ids: dict[int, str]
    """The marks that are tokens, by their ids."""


def _numbered(first: int, *marks: str) -> dict[int, str]:
    return {first + n: mark for n, mark in enumerate(marks)}


_GLM: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_THINK: Final = ("<think>", "</think>")
_CALL: Final = ("<tool_call>", "</tool_call>")
_K2: Final = {
    **_numbered(163595, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    163598: "<|tool_call_argument_begin|>", 163599: "<|tool_call_end|>", **_numbered(163606, *_THINK),
}  # fmt: skip
_V3: Final = {
    **_numbered(128798, *_THINK),
    **_numbered(
        128806, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    ),
    128814: "<｜tool▁sep｜>",
}
_QWEN3: Final = {**_numbered(151657, *_CALL), **_numbered(151667, *_THINK)}
_QWEN35: Final = {**_numbered(248058, *_CALL), **_numbered(248068, *_THINK)}
_TEKKEN: Final = {9: "[TOOL_CALLS]", **_numbered(32, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")}
_MODELS: Final = {
    "deepseek-ai/DeepSeek-V3-": _Model("deepseek-v3", None, _V3),
    "deepseek-ai/DeepSeek-V3.1": _Model("deepseek-v3", "think", _V3),
    "deepseek-ai/DeepSeek-V3.2": _Model("dsml", "think", {128793: "｜DSML｜", **_numbered(128798, *_THINK)}),
    "deepseek-ai/DeepSeek-V4": _Model("dsml", "think", {128825: "｜DSML｜", **_numbered(128821, *_THINK)}),
    "google/gemma-4": _Model(
        "gemma4", "gemma4", {**_numbered(48, "<|tool_call>", "<tool_call|>"), 52: '<|"|>',
        **_numbered(100, "<|channel>", "<channel|>")},
    ),
    "zai-org/GLM-4": _Model("glm", "think", {**_numbered(151350, *_THINK, *_CALL), **_numbered(151356, *_GLM)}),
    "zai-org/GLM-5": _Model("glm", "think", {**_numbered(154841, *_THINK, *_CALL), **_numbered(154847, *_GLM)}),
    "openai/gpt-oss": _Model(
        "harmony", "harmony", {**_numbered(200005, "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
        **_numbered(200002, "<|return|>", "<|constrain|>"), 200012: "<|call|>"},
    ),
    "moonshotai/Kimi-K2": _Model("kimi-k2", "think", _K2),
    "moonshotai/Kimi-K3": _Model("kimi-k3", "kimi-k3", _numbered(163587, "<|open|>", "<|close|>", "<|sep|>")),
    "meta-llama/Llama-3": _Model("llama3", None, {128010: "<|python_tag|>"}),
    "meta-llama/Llama-4": _Model("llama4", None, _numbered(200016, "<|python_start|>", "<|python_end|>")),
    "mistralai/Mistral-7B": _Model("mistral", None, {5: "[TOOL_CALLS]"}),
    "mistralai/Magistral-Small-2506": _Model("mistral", "think", _TEKKEN),
    "mistralai/": _Model("mistral", "mistral", _TEKKEN),
    "Qwen/Qwen3.": _Model("qwen-xml", "think", _QWEN35),
    "Qwen/Qwen3-Coder": _Model("qwen-xml", "think", _QWEN3),
    "Qwen/Qwen3-": _Model("hermes", "think", _QWEN3),
}  # fmt: skip
"""The models of the fixtures, by the beginning of their names. The first that fits counts."""


def _model(name: str) -> _Model | None:
    return next((model for prefix, model in _MODELS.items() if name.startswith(prefix)), None)


class HeadwaterAdapter(Adapter):  # type: ignore[misc]  # canitoolcall is not installed where types are checked
    """Replays outputs with the reader that divides answers of chat, responses and messages."""

    name = "headwater"
    pinned_version = "0"
    supports_text_deltas = True

    def version(self) -> str:
        return version("headwater")

    def supports(self, family: str, model: str) -> Support:
        return Support(True) if _model(model) is not None else Support(False, "no format is known")

    def parser_config(self, raw: ReplayInput) -> dict[str, Any]:
        model = _model(raw.model)
        assert model is not None
        return {"tool_parser": model.parser, "reasoning": model.reasoning}

    def units(self, raw: ReplayInput) -> list[int]:
        return list(range(len(_pieces(raw))))

    def special_token_ids(self, raw: ReplayInput) -> Collection[int]:
        return {n for n, piece in enumerate(_pieces(raw)) if piece.startswith(SPECIAL)}

    def parse(self, raw: ReplayInput, tools: Sequence[ToolSpec]) -> ParseResult:
        return _read(raw, ["".join(_pieces(raw))], tools)

    def parse_stream(self, raw: ReplayInput, chunks: Sequence[Sequence[int]], tools: Sequence[ToolSpec]) -> ParseResult:
        pieces = _pieces(raw)
        return _read(raw, ["".join(pieces[n] for n in chunk) for chunk in chunks], tools)

    def parse_stream_text(self, raw: ReplayInput, deltas: Sequence[str], tools: Sequence[ToolSpec]) -> ParseResult:
        text, cuts, place = "".join(_pieces(raw)), [], 0
        for delta in deltas:
            end = place
            for _ in delta:
                end += 2 if text[end] == SPECIAL else 1
            cuts.append(text[place:end])
            place = end
        return _read(raw, cuts, tools)


def _read(raw: ReplayInput, pieces: Sequence[str], tools: Sequence[ToolSpec]) -> ParseResult:
    reader = _reader(raw, tools)
    finish = "length" if raw.truncated else "stop"
    parts = [part for piece in pieces for part in reader.read(piece, None)]
    return _joined([*parts, *reader.read("", finish)])


def _reader(raw: ReplayInput, tools: Sequence[ToolSpec]) -> AnswerReader:
    model = _model(raw.model)
    assert model is not None
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters", {}) for function in functions}
    reasoning = REASONING[model.reasoning] if model.reasoning is not None else None
    reading = AnswerReading(ToolUse(FORMATS[model.parser], schemas), reasoning)
    added = {mark: id for id, mark in model.ids.items()}
    return reading.with_tokens(added.get).after(raw.generation_prompt or "").reader()


def _joined(parts: Sequence[AnswerPart]) -> ParseResult:
    content = "".join(part for part in parts if isinstance(part, str))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if isinstance(part, CallPart):
            if part.name:
                calls.append((part.name, []))
            calls[part.number][1].append(part.arguments)
    return ParseResult(
        content or None, reasoning or None, tuple(ParsedToolCall(name, "".join(texts)) for name, texts in calls)
    )


@lru_cache(maxsize=8)
def _pieces(raw: ReplayInput) -> list[str]:
    """The output's text, each mark that is a token after `SPECIAL`, and words of at most six characters."""
    model = _model(raw.model)
    assert model is not None
    tokens = [(n, model.ids[id]) for n, id in enumerate(raw.token_ids or ()) if id in model.ids]
    pieces, place = [], 0
    for start, mark in _placed(raw.text, tokens, len(raw.token_ids or ())):
        pieces += [*re.findall(r".{1,6}", raw.text[place:start], re.DOTALL), SPECIAL + mark]
        place = start + len(mark)
    return [*pieces, *re.findall(r".{1,6}", raw.text[place:], re.DOTALL)]


def _placed(text: str, tokens: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    """Where these tokens stand in the text: an occurrence of each token's text, so that the other tokens' numbers of
    characters are as even as they can be.

    Args:
        text: the text.
        tokens: each special token's index among all tokens, and its text.
        count: the number of all tokens.
    """
    rate = (len(text) - sum(len(mark) for _, mark in tokens)) / max(count - len(tokens), 1)
    best: dict[int, tuple[float, list[tuple[int, str]]]] = {0: (0.0, [])}
    last = -1
    for index, mark in tokens:
        starts = [match.start() for match in re.finditer(re.escape(mark), text)]
        following: dict[int, tuple[float, list[tuple[int, str]]]] = {}
        for end, (cost, places) in best.items():
            for start in starts:
                between = index - last - 1
                if start < end or (start > end) != (between > 0):
                    continue
                new = cost + abs(start - end - between * rate)
                if start + len(mark) not in following or new < following[start + len(mark)][0]:
                    following[start + len(mark)] = (new, [*places, (start, mark)])
        best, last = following, index
    between = count - last - 1
    ends = {
        end: (cost + abs(len(text) - end - between * rate), places)
        for end, (cost, places) in best.items()
        if (len(text) > end) == (between > 0)
    }
    return min(ends.values())[1]
