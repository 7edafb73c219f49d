"""An engine for tests of agents: its model does what a script in the prompt says (`script` of tests/clients/cases.py).

``options: {engine: "obedient:engine"}``; the model's folder gives the tokenizer only. Its chat template is after
``tests.app.lm.tool_text.TEMPLATES["reasoning"]``.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from headwater.engine import EngineLimits, SequenceRequest, TokenEvent
from headwater.lm.admission import Admission
from headwater.lm.grammar_source import compiled, special_texts

__all__ = ["NO_SCRIPT", "Obedient", "engine"]

Step: TypeAlias = str | list[tuple[str, dict[str, Any]]]
"""An answer's text, or its calls: the name and arguments of each."""

NO_SCRIPT: Final = "There is nothing to do."
"""The answer to a prompt without a script, or at its end."""
_SCRIPT: Final = re.compile(r"script\.([\w-]+)\.end")
_RESULT: Final = re.compile(r"<\|im_start\|>(?:tool|user)\n(.*?)<\|im_end\|>", re.DOTALL)
_END: Final = "<|im_end|>"
_TURN: Final = "<|im_start|>assistant\n"
_THINK: Final = "<think>\n"
_LIMITS: Final = EngineLimits(
    max_sequences=8,
    max_waiting=64,
    context_length=1_000_000,
    cache_tokens=8_000_000,
    vocab_size=4096,
    grammars=frozenset({"json_schema", "regex", "lark"}),
)


def engine(folder: Path, *, device: str, on_broken: Any, step_s: float = 0.005) -> Obedient:
    """The engine. Its steps take time, so that the pieces of a stream come one after another."""
    return Obedient(folder, step_s)


class Obedient(Admission):
    """Answers by the prompt's last script: the answer's place in it is the number of the assistant's turns since then.
    A call of a tool that isn't offered is text that says so. An answer that its grammar doesn't take is an error.

    Args:
        folder: with the tokenizer.
        step_s: how long a step takes, in seconds.
    """

    def __init__(self, folder: Path, step_s: float) -> None:
        super().__init__(_LIMITS)
        self._step_s = step_s
        path = str(folder / "tokenizer.json")
        self._tokenizer = Tokenizer.from_file(path)
        self._guide = LLTokenizer(path, n_vocab=_LIMITS.vocab_size, eos_token=self._tokenizer.token_to_id(_END))
        self._answers: dict[str, tuple[SequenceRequest, list[int]]] = {}
        self._positions: dict[str, int] = {}
        self._events: list[TokenEvent] = []

    @property
    def has_work(self) -> bool:
        return bool(self._events or self.active or self.waiting)

    def cancel(self, id: str) -> bool:
        """See `Engine.cancel`."""
        if not self.release(id):
            return False
        self._answers.pop(id, None)
        self._events.append(TokenEvent(id, self._positions.pop(id, 0), None, finish="cancelled"))
        return True

    def step(self) -> list[TokenEvent]:
        """See `Engine.step`."""
        time.sleep(self._step_s)
        events, self._events = self._events, []
        while (request := self.take()) is not None:
            tokens = self._tokenizer.encode(self._answer(request), add_special_tokens=False).ids
            if error := self._refusal(request, tokens):
                events.append(TokenEvent(request.id, 0, None, finish="error", error=error))
                self.release(request.id)
                continue
            self._answers[request.id], self._positions[request.id] = (request, tokens), 0
        for id, (request, tokens) in [*self._answers.items()]:
            n = self._positions[id]
            self._positions[id] += 1
            is_last, is_full = n + 1 == len(tokens), n + 1 >= request.max_tokens
            finish: Any = "stop" if is_last else "length" if is_full else None
            events.append(TokenEvent(id, n, tokens[n] if n < request.max_tokens else None, finish=finish))
            if finish is not None:
                del self._answers[id], self._positions[id]
                self.release(id)
        return events

    def close(self) -> None:
        """See `Engine.close`."""
        self.clear()
        self._answers.clear()
        self._positions.clear()
        self._events.clear()

    def _answer(self, request: SequenceRequest) -> str:
        """The text of the answer, with the token that ends it."""
        prompt: str = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        step, number = _step(prompt)
        answer = _text(step, prompt) if isinstance(step, str) else _calls(step, prompt)
        is_thinking = prompt.endswith(_THINK) and (request.grammar is None or bool(request.grammar.before))
        return (f"This is answer {number}.\n</think>\n\n" if is_thinking else "") + answer + _END

    def _refusal(self, request: SequenceRequest, tokens: Sequence[int]) -> str:
        """Why the answer isn't one that the request's grammar takes; empty if it is."""
        if request.grammar is None:
            return ""
        grammar = request.grammar
        matcher, _ = compiled(self._guide, special_texts(self._guide), grammar.kind, grammar.text, grammar.before)
        taken = matcher.validate_tokens(list(tokens[:-1]))
        if taken < len(tokens) - 1:
            text = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
            return f"the grammar of {grammar.field} takes {taken} of {len(tokens) - 1} tokens of {text}"
        matcher.consume_tokens(list(tokens[:-1]))
        return (
            "" if matcher.is_accepting() else f"the grammar of {grammar.field} expects more after the script's answer"
        )


def _step(prompt: str) -> tuple[Step, int]:
    """The step of the prompt's script that comes next, and its number, from 1."""
    scripts = [*_SCRIPT.finditer(prompt)]
    if not scripts:
        return NO_SCRIPT, 1
    steps = json.loads(base64.urlsafe_b64decode(f"{scripts[-1][1]}=="))
    number = prompt.count(_TURN, scripts[-1].end())
    return (steps[number - 1] if 0 < number <= len(steps) else NO_SCRIPT), number


def _text(text: str, prompt: str) -> str:
    results = _RESULT.findall(prompt) if "{result}" in text else []
    return text.replace("{result}", results[-1]) if results else text


def _calls(calls: list[tuple[str, dict[str, Any]]], prompt: str) -> str:
    """The text of calls, as the model's chat template has it; or what is wrong with them."""
    offered = re.findall(r'"name": "([^"]+)"', prompt.partition("Write <tool_call>")[0])
    if missing := [name for name, _ in calls if name not in offered]:
        return f"There is no tool {missing[0]}."
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
