"""Token streams of contenders: so many at the same time, of a model that computes nothing, every token checked."""

from __future__ import annotations

from benchmarks.peers import token_events
from benchmarks.peers.contenders import Running
from benchmarks.peers.scenarios import AnswerWrong
from benchmarks.peers.work import path_of
from benchmarks.stream_load import Answer, Ask, Job, LoadGenerator, raw_body
from benchmarks.stream_rates import completion, port_of
from benchmarks.stream_texts import counting

__all__ = ["Streamed", "measure"]

TIMEOUT_S = 120.0


class Streamed:
    """What one run found."""

    def __init__(self, answers: list[Answer]) -> None:
        seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
        self.tokens = sum(answer.tokens for answer in answers)
        self.tokens_per_s = self.tokens / seconds
        self.events_per_s = sum(answer.events for answer in answers) / seconds
        firsts = sorted(answer.first - answer.sent for answer in answers)
        self.first_p50_ms = 1000 * firsts[len(firsts) // 2]
        self.first_p99_ms = 1000 * firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))]


def measure(running: Running, load: LoadGenerator, streams: int, tokens: int) -> Streamed:
    """Ask for the streams.

    Raises:
        AnswerWrong: one of them is not what was asked for.
    """
    is_ours = running.peer is None
    if is_ours:
        ask = Ask(completion("streams", [1, 2, 3], tokens))
    else:
        ask = Ask(raw_body({"max_tokens": tokens}), path=path_of("streams"))
    answers = load.run(Job(port_of(running.server), [ask] * streams, timeout_s=TIMEOUT_S))
    expected = counting(tokens) if is_ours else token_events.text_of(tokens)
    for row, answer in enumerate(answers):
        if answer.error:
            raise AnswerWrong(f"stream {row}: status {answer.status}: {answer.error}")
        if answer.tokens != tokens or answer.texts.get(0) != expected:
            raise AnswerWrong(f"stream {row}: expected {tokens} tokens in order, got {answer.texts.get(0)!r:.300}")
    return Streamed(answers)
