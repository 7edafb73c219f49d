"""Grammars that take too long, too much memory, or end their process: only their own sequences notice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headwater.engine import EngineFull, Grammar, Sampling, TokenEvent
from headwater.lm import grammars as module
from headwater.lm.compile_queue import LANES, Lane
from headwater.lm.grammar_processes import GrammarProcess
from headwater.lm.grammar_wire import TOKEN, Reply, reply_of
from headwater.lm.grammars import Grammars
from headwater.lm.slot_engine import SlotEngine
from headwater_server.process.sweep import process_stats
from tests.app.lm.scripted import FOLDER
from tests.inference.lm.llamas import Short, by_id, request, run
from tests.inference.lm.test_grammars import (
    DIGITS,
    EOS_IDS,
    PROMPT,
    TOKENIZER,
    VOCAB_SIZE,
    engine_of,
    model,
    schema_grammar,
    text_of,
)

pytestmark = pytest.mark.heavy
ONLY_A = {TOKENIZER.get_vocab()["a"]: 50.0}
ENDLESS = schema_grammar({"type": "string", "allOf": [{"pattern": "^.*a" + "." * n + "$"} for n in range(24)]})
"""Would be compiled for days."""
TOO_LARGE = Grammar("regex", "((a{1000}){1000}){1000}", "form")
"""Each letter takes 190 MB."""
GROWING_FOLLOWER = """
import socket
import sys

from headwater.lm.grammar_host import _follow


class Matcher:
    kept = []

    def consume_token(self, token):
        self.kept.append(bytearray(token << 20))

    def compute_bitmask(self):
        return b""

    def is_stopped(self):
        return False

    def get_error(self):
        return ""


_follow(Matcher(), socket.socket(fileno=int(sys.argv[1])))
"""
"""A follower whose matcher keeps as many MiB as its token says."""


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)
    yield made
    made.shut()


@pytest.fixture
def engine(grammars: Grammars) -> SlotEngine:
    return engine_of(grammars)


def processes() -> list[int]:
    """The grammar processes of this process, parents first."""
    found = [os.getpid()]
    stats = dict(process_stats())
    for parent in found:
        found += sorted(pid for pid, stat in stats.items() if stat.parent == parent and stat.state != "Z")
    return found[1:]


def host(before: list[int]) -> int:
    """The process that was started last and forks the others."""
    new = [pid for pid in processes() if pid not in before]
    stats = dict(process_stats())
    return next(pid for pid in new if stats[pid].parent == os.getpid())


def step_until(engine: SlotEngine, is_so: Callable[[list[TokenEvent]], bool], most: int = 20_000) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for _ in range(most):
        if is_so(events):
            return events
        events += engine.step()
    raise AssertionError(f"it never came to that; events: {events[-5:]}")


def ended(id: str) -> Callable[[list[TokenEvent]], bool]:
    return lambda events: any(event.id == id and event.finish for event in events)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (ENDLESS, "to compile it takes more than 2.5 s of processor time, or 256 MiB of memory"),
        (Grammar("regex", "a?" * 4_000, "form"), "too many expressions constructed"),
        (TOO_LARGE, "takes more than"),
    ],
)
def test_a_grammar_that_takes_too_much_is_rejected(engine: SlotEngine, grammar: Grammar, reason: str) -> None:
    engine.submit(request("a", PROMPT, 90, Sampling(temperature=0, logit_bias=ONLY_A), grammar=grammar))
    engine.submit(request("b", PROMPT, 20, grammar=DIGITS))
    answers = by_id(step_until(engine, lambda events: ended("a")(events) and ended("b")(events)))
    assert answers["a"][-1].finish == "rejected"
    assert reason in answers["a"][-1].error
    assert text_of(answers["b"]).isdecimal()


def test_what_was_refused_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LANES", (Lane(0.01, 1), Lane(0.1, 1)))
    grammars = Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)
    engine = engine_of(grammars)
    engine.submit(request("a", PROMPT, 9, grammar=ENDLESS))
    (first,) = step_until(engine, ended("a"))
    engine.submit(request("b", PROMPT, 9, grammar=ENDLESS))
    (second,) = engine.step()
    assert (second.id, second.finish, second.error) == ("b", "rejected", first.error)
    assert not grammars._compilations  # private: keeping what was refused would be a leak, which no answer shows
    grammars.shut()


def test_a_compilation_ends_when_its_client_has_left(engine: SlotEngine, grammars: Grammars) -> None:
    before = processes()

    def have_ended(_: list[TokenEvent]) -> bool:
        grammars.poll(0.01)
        return processes() == before

    for _ in range(LANES[0].most_running):
        engine.submit(request("a", PROMPT, 9, grammar=ENDLESS))
        step_until(engine, lambda _: len(processes()) > len(before))
        engine.cancel("a")
        engine.submit(request("waits for nothing", PROMPT, 9, grammar=ENDLESS))
        engine.cancel("waits for nothing")
        step_until(engine, have_ended)
    engine.submit(request("b", PROMPT, 20, grammar=DIGITS))  # if they still took places, it would wait for ever
    events = step_until(engine, ended("b"))  # perhaps with cancellations of several rounds, which have the same ids
    assert text_of([event for event in events if event.id == "b"]).isdecimal()
    assert not grammars.compile(ENDLESS, "").error  # no time was up


def test_one_scope_cannot_keep_another_waiting(engine: SlotEngine, grammars: Grammars) -> None:
    """Twelve that take 2.75 s each are before it, more than the engine has places."""
    for number in range(12):
        endless = json.loads(ENDLESS.text)
        endless["allOf"].append({"pattern": f"^.*b.{{{number}}}$"})
        engine.submit(request(f"a{number}", PROMPT, 9, grammar=schema_grammar(endless), cache_scope="a"))
    engine.submit(request("b", PROMPT, 90, grammar=DIGITS, cache_scope="b"))
    events = step_until(engine, ended("b"))
    assert {event.id for event in events} == {"b"}
    engine.close()


def test_a_scope_may_have_so_many_waiting(
    engine: SlotEngine, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    with pytest.raises(EngineFull, match="too many grammars"):  # noqa: PT012
        for number in range(10):
            form = Grammar("regex", f"[0-9]{{{number + 1}}}", "form")
            engine.submit(request(str(number), PROMPT, 9, grammar=form, cache_scope="a"))
    assert engine.waiting == 5  # two are compiled
    engine.submit(request("b", PROMPT, 9, grammar=DIGITS, cache_scope="b"))
    engine.close()


@pytest.mark.parametrize("step", ["compile", "follow"])
def test_without_a_process_a_sequence_ends_instead_of_running_freely(
    engine: SlotEngine, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step == "follow":
        run(engine, request("a", PROMPT, 9, grammar=DIGITS))

    def fail(*arguments: object) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(socket, "socketpair", fail)
    answers = run(engine, request("a", PROMPT, 9, grammar=DIGITS), request("b", PROMPT, 9))
    assert (answers["a"][-1].finish, answers["a"][-1].error) == (
        "error",
        "form: expected a regular expression that answers can be held to, but the process of the grammar ended; "
        "try again"
        if step == "compile"
        else "form: the process of the grammar ended; try again",
    )
    assert text_of(answers["a"]) == "" or text_of(answers["a"]).isdecimal()
    assert answers["b"][-1].finish == "length"
    monkeypatch.undo()
    assert text_of(run(engine, request("a", PROMPT, 9, grammar=DIGITS))["a"]).isdecimal()


@pytest.mark.parametrize(
    ("number", "finish", "reason"),
    [
        (signal.SIGKILL, "error", "form: the process of the grammar ended; try again"),
        (signal.SIGSEGV, "rejected", "the next token takes more than"),
    ],
)
def test_a_process_that_ends_takes_its_own_sequence_with_it(number: int, finish: str, reason: str) -> None:
    before = processes()
    grammars = Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)
    engine = engine_of(grammars)
    long = Grammar("regex", "[ab]{80}", "form")
    engine.submit(request("a", PROMPT, 90, grammar=long))
    events = step_until(engine, lambda events: len(events) == 3)
    follower = [pid for pid in processes() if pid not in before][-1]
    engine.submit(request("b", PROMPT, 90, grammar=long))
    os.kill(follower, number)
    answers = by_id(events + step_until(engine, lambda events: ended("a")(events) and ended("b")(events)))
    assert (answers["a"][-1].finish, answers["b"][-1].finish) == (finish, "stop")
    assert reason in answers["a"][-1].error
    assert len(text_of(answers["b"])) == 80
    grammars.shut()


def test_a_host_that_ends_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    before = processes()
    grammars = Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)
    engine = engine_of(grammars)
    engine.submit(request("a", PROMPT, 90, grammar=Grammar("regex", "[ab]{80}", "form")))
    step_until(engine, lambda events: len(events) == 3)
    os.kill(host(before), signal.SIGKILL)
    assert step_until(engine, ended("a"))[-1].error == "form: the process of the grammar ended; try again"
    assert "the process that compiles grammars has ended" in caplog.text
    assert text_of(run(engine, request("a", PROMPT, 9, grammar=DIGITS))["a"]).isdecimal()
    grammars.shut()
    assert processes() == before


def held_packets(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """From now on, nothing is sent to the processes of grammars; the list gets functions that send it later."""
    held: list[Callable[[], None]] = []
    send = GrammarProcess.send
    monkeypatch.setattr(GrammarProcess, "send", lambda process, packet: held.append(lambda: send(process, packet)))
    return held


def test_a_late_mask_delays_its_own_sequence_only(engine: SlotEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = Sampling(temperature=1, seed=3)
    long = request("a", PROMPT, 90, seeded, grammar=Grammar("regex", "[ab]{30}", "form"))
    expected = text_of(run(engine, long)["a"])
    engine.submit(long)
    events = step_until(engine, lambda events: len(events) == 3)
    held = held_packets(monkeypatch)
    engine.submit(request("b", PROMPT, 60))
    events += step_until(engine, ended("b"))
    assert len(by_id(events)["a"]) <= 5
    monkeypatch.undo()
    held[0]()
    events += step_until(engine, ended("a"))
    assert text_of(by_id(events)["a"]) == expected


def test_a_sequence_that_was_put_off_goes_on_with_a_late_mask(
    engine: SlotEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = request("a", PROMPT, 90, Sampling(seed=3), grammar=Grammar("regex", "[ab]{30}", "form"))
    expected = text_of(run(engine, long)["a"])
    engine.submit(request("b", PROMPT, 60))
    engine.submit(long)
    events = step_until(engine, lambda events: [event.id for event in events].count("a") == 3)
    held = held_packets(monkeypatch)
    events += engine.step()
    short = Short(monkeypatch, model(), rows=1)
    events += step_until(engine, ended("b"))
    assert short.failures
    events += engine.step()
    monkeypatch.undo()
    assert len(by_id(events)["a"]) == 4
    held[0]()
    events += step_until(engine, ended("a"))
    assert text_of(by_id(events)["a"]) == expected


def test_grammars_are_kept_within_bounds_of_their_size(
    engine: SlotEngine, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = processes()
    monkeypatch.setattr(module, "KEPT_BYTES", 2**20)
    forms = [Grammar("regex", text, "form") for text in ("abcdefgh" * 8000, "[0-9]{3}", "hgfedcba" * 8000)]
    for form in forms:
        run(engine, request("a", PROMPT, 5, grammar=form))
    run(engine, request("a", PROMPT, 5))

    def have_ended(_: list[TokenEvent]) -> bool:
        grammars.poll(0.01)
        return processes() == before

    step_until(engine, have_ended)
    assert not any(grammars.compile(form, "").is_done for form in forms)  # the oldest go first


def test_a_grammar_that_was_not_kept_is_compiled_again_when_its_turn_comes(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", 0)
    engine = engine_of(grammars, max_sequences=1)
    engine.submit(request("first", PROMPT, 60))
    engine.submit(request("waits", PROMPT, 20, grammar=DIGITS))
    events = step_until(engine, ended("waits"))
    assert text_of(by_id(events)["waits"]).isdecimal()


def test_beyond_the_bound_of_all_the_largest_ends(engine: SlotEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Grammar("regex", "abcdefgh" * 16_000, "form")
    note = module.Constraint.note

    def note_as_large(self: module.Constraint, reply: Reply) -> None:
        # By how much it really grows, the allocator decides.
        note(self, reply._replace(size_bytes=2**30 + 1) if self._grammar == large else reply)

    monkeypatch.setattr(module.Constraint, "note", note_as_large)
    answers = run(engine, request("a", PROMPT, 90, grammar=large), request("b", PROMPT, 90, grammar=DIGITS))
    assert (answers["a"][-1].finish, answers["b"][-1].finish) == ("rejected", "stop")
    assert "all grammars together take more than 1024 MiB of memory" in answers["a"][-1].error


def test_by_how_much_a_follower_grows_is_measured() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        follower = subprocess.Popen(
            [sys.executable, "-c", GROWING_FOLLOWER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        sizes = []
        for mib in (0, 48, 16):
            ours.send(TOKEN.pack(mib))
            sizes.append(reply_of(ours.recv(4_096)).size_bytes >> 20)
    assert follower.wait() == 0
    first, second, third = sizes
    assert (first < 48, 48 <= second < 64, 64 <= third < 80) == (True, True, True), sizes


def test_what_takes_longer_than_the_first_lane_is_compiled_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = (Lane(1e-6, 1), Lane(2.5, 1))
    monkeypatch.setattr(module, "LANES", lanes)
    grammars = Grammars(FOLDER / "tokenizer.json", VOCAB_SIZE, EOS_IDS)
    answers = run(engine_of(grammars), request("a", PROMPT, 9, grammar=Grammar("regex", "(a?){3000}b", "form")))
    assert answers["a"][-1].finish in ("stop", "length")
    grammars.shut()
