"""Relays vLLM's answers: counts tokens, and removes fields that clients don't get.

An answer of vLLM is either whole or a stream of server-sent events, which ends with the event ``[DONE]``.
"""

from __future__ import annotations

import base64
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
import orjson

from headwater_server.codecs.wording import PARSE_ERRORS
from headwater_server.errors import (
    RETRY_AFTER_LOST_S,
    BadRequest,
    CallableFailed,
    ContextTooLong,
    HeadwaterError,
    NotFound,
    QueueFull,
    ReplicaLost,
    openai_error,
)
from headwater_server.lm.openai_answer import Event
from headwater_server.lm.text_generate import GenerateAnswer
from headwater_server.lm.text_stream import TextPiece, Usage
from headwater_server.telemetry.recorder import LanguageModelMeter
from headwater_server.vllm.requests import VllmRequest

__all__ = [
    "ChunkAnswer",
    "EmbeddingsAnswer",
    "EventReader",
    "GenerateRelay",
    "RelayedAnswer",
    "RelayedError",
    "RelayedUsage",
    "TokenCount",
    "Tokenized",
    "TokenizedAnswer",
    "WholeAnswer",
    "failure",
    "refusal",
]  # fmt: skip

DONE: Final = b"[DONE]"
LOST: Final = "the replica ended while it had the request"
_INDEX: Final = re.compile(rb'\[\{"index":(\d+)')
"""Beginning of a choice as vLLM writes it. The pattern finds the index without decoding the choice."""
_ABORTED: Final = b'"finish_reason":"abort"'
"""Part of a choice that vLLM aborted. A generated text can't contain these bytes, because JSON escapes quotes."""
_TOO_LONG: Final = ("maximum context length", "max_model_len", "maximum model length")
"""Words in vLLM's message about a prompt that is too long, or too long with its answer."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class RelayedUsage(msgspec.Struct):
    """``usage`` of a chat or completions answer of vLLM."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class RelayedError(msgspec.Struct, frozen=True):
    """An error of vLLM."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"null")
    object: msgspec.Raw = msgspec.Raw(b"null")
    created: msgspec.Raw = msgspec.Raw(b"0")
    model: msgspec.Raw = msgspec.Raw(b"null")
    choices: msgspec.Raw = msgspec.Raw(b"[]")
    usage: RelayedUsage | None = None
    error: RelayedError | None = None


class _TextChoice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None


class _RelayedChoice(msgspec.Struct, omit_defaults=True):
    """The fields of a whole answer's choice that the client gets: the fields of OpenAI's API, and vLLM's
    ``stop_reason``. (The choices of a stream are relayed unchanged.)"""

    index: msgspec.Raw
    finish_reason: str | None
    logprobs: msgspec.Raw = msgspec.Raw()
    stop_reason: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()


class _Whole(msgspec.Struct, omit_defaults=True):
    """The fields of a whole answer of ``/v1/chat/completions`` or ``/v1/completions`` that the client gets."""

    id: msgspec.Raw
    object: msgspec.Raw
    created: msgspec.Raw
    model: msgspec.Raw
    choices: list[_RelayedChoice]
    usage: msgspec.Raw
    service_tier: msgspec.Raw = msgspec.Raw()
    system_fingerprint: msgspec.Raw = msgspec.Raw()


class _WholeTexts(msgspec.Struct):
    choices: list[_TextChoice]
    usage: RelayedUsage | None = None


class _Embedding(msgspec.Struct):
    index: int
    embedding: msgspec.Raw
    object: str = "embedding"


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: RelayedUsage


class Tokenized(msgspec.Struct):
    """An answer of ``/tokenize``."""

    count: int
    token_strs: list[str] | None = None


class _RelayedRefusal(msgspec.Struct):
    error: RelayedError = RelayedError()


_chunks: Final = msgspec.json.Decoder(_Chunk)
_wholes: Final = msgspec.json.Decoder(_Whole)
_whole_texts: Final = msgspec.json.Decoder(_WholeTexts)
_usages: Final = msgspec.json.Decoder(RelayedUsage | None)
_texts: Final = msgspec.json.Decoder(list[_TextChoice])
_embeddings: Final = msgspec.json.Decoder(_Embeddings)
_tokenized: Final = msgspec.json.Decoder(Tokenized)
_refusals: Final = msgspec.json.Decoder(_RelayedRefusal)


def refusal(status: int, body: bytes) -> HeadwaterError:
    """The error for a request that vLLM refused, or failed to answer.

    Args:
        status: the HTTP status of vLLM's answer, other than 200.
        body: the answer's body. If it can't be decoded, its beginning is the message.
    """
    try:
        error = _refusals.decode(body).error
    except PARSE_ERRORS:
        error = RelayedError(body[:500].decode(errors="replace"))
    return _refusal(status, error)


def _refusal(status: int, error: RelayedError) -> HeadwaterError:
    if status in (429, 503):
        return QueueFull(f"the replica's queue is full: {error.message}", retry_after_s=RETRY_AFTER_LOST_S)
    if status == 404:
        return NotFound(error.message, field="model")
    if 400 <= status < 500 or status == 501:
        kind = ContextTooLong if any(word in error.message for word in _TOO_LONG) else BadRequest
        return kind(error.message, field=error.param)
    if "EngineCore" in error.message:  # the engine process is dead, and vLLM is about to exit
        return ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S)
    return CallableFailed(f"the engine failed: {error.message[:500]}")


def failure(error: RelayedError) -> HeadwaterError:
    """The exception for an error event within a stream. An error without a status, or with 500, means that the engine
    has ended."""
    status = error.code if isinstance(error.code, int) else 500
    return ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S) if status == 500 else _refusal(status, error)


class EventReader:
    """Splits the bytes of a stream into server-sent events, however the bytes are divided into pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The name and the data of each event that these bytes complete. The name is empty if the event has no name.
        Events without data, such as comments, are left out."""
        *blocks, self._rest = (self._rest + data if self._rest else data).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: "):
                yield b"", block[6:]
            else:  # the event has a name or comments
                fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
                if b"data" in fields:
                    yield fields.get(b"event", b""), fields[b"data"]


class TokenCount:
    """Counts a request's tokens as they arrive, for the metrics and for the token limit of the API key.

    Args:
        meter: the model's metrics.
        spend: called with each number of newly used tokens, to charge the API key.
        on_first: called at the first token of a stream; never for a whole answer.
    """

    def __init__(
        self,
        meter: LanguageModelMeter,
        spend: Callable[[int], None] | None = None,
        on_first: Callable[[], None] | None = None,
    ) -> None:
        self._meter = meter
        self._spend = spend
        self._on_first = on_first
        self._began_ns = time.perf_counter_ns()
        self._last_ns: dict[int, int] = {}
        """Time of the last token in nanoseconds of `time.perf_counter_ns`, by index of the choice."""
        self._completion: dict[int, int] = {}
        """Tokens so far, by index of the choice."""
        self._more = 0
        """Tokens that vLLM reported only as a total over all choices, beyond the tokens in `_completion`."""
        self._choices = 0
        self._prompt = self._cached = 0

    @property
    def usage(self) -> Usage:
        """The numbers of tokens so far."""
        return Usage(self._prompt, sum(self._completion.values()) + self._more, self._cached)

    def choice(self, index: int, tokens: int) -> None:
        """Note the number of tokens that the choice with this index of a stream has so far. A number that isn't larger
        than the last has no effect."""
        had = self._completion.get(index, 0)
        if tokens <= had:
            return
        self._completion[index] = tokens
        now_ns = time.perf_counter_ns()
        last_ns = self._last_ns.get(index)
        if last_ns is not None:
            self._meter.inter_token.observe_times((now_ns - last_ns) // (tokens - had), tokens - had)
        elif not self._last_ns:
            self._meter.first_token.observe(now_ns - self._began_ns)
            if self._on_first is not None:
                self._on_first()
        self._last_ns[index] = now_ns
        self._add(tokens - had)

    def prompt(self, tokens: int, cached: int = 0) -> None:
        """Note the number of tokens of all prompts together, and how many of these tokens came from the prefix cache.
        Numbers that aren't larger than the last have no effect."""
        more, more_cached = tokens - self._prompt, cached - self._cached
        if more > 0:
            self._prompt = tokens
            self._meter.prompt_tokens.add(more)
            if self._spend is not None:
                self._spend(more)
        if more_cached > 0:
            self._cached = cached
            self._meter.cached_prompt_tokens.add(more_cached)

    def total(self, prompt: int, completion: int, cached: int, choices: int) -> None:
        """Note the numbers over all choices at the answer's end; an embeddings request calls it after each of its
        answers.

        Args:
            prompt: tokens of all prompts.
            completion: generated tokens of all choices.
            cached: tokens of the prompts that came from the prefix cache.
            choices: number of choices; 0: the choices that `choice` was called for.
        """
        self.prompt(prompt, cached)
        self._choices = choices
        more = completion - self.usage.completion_tokens
        if more > 0:
            self._more += more
            self._add(more)

    def usage_at_end(self, usage: RelayedUsage | None, choices: int = 0) -> None:
        """Note vLLM's usage at the answer's end, if vLLM sent it. ``choices``: see `total`."""
        if usage is not None:
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
            self.total(usage.prompt_tokens, usage.completion_tokens or 0, cached or 0, choices)

    def end(self) -> None:
        """Note that vLLM answered a request completely: count its sequences."""
        self._meter.sequences.add(max(self._choices, len(self._completion)))

    def _add(self, tokens: int) -> None:
        self._meter.generated_tokens.add(tokens)
        if self._spend is not None:
            self._spend(tokens)


class WholeAnswer(Protocol):
    """The form of a whole answer in its API."""

    count: TokenCount
    """Counts the tokens of the answer; the methods call it."""

    @abstractmethod
    def whole(self, body: bytes) -> bytes:
        """Convert vLLM's answer into the client's answer.

        Raises:
            ReplicaLost: vLLM aborted the request, because it is ending.
            msgspec.MsgspecError, ValueError, RecursionError: vLLM's answer is not of the expected form.
        """


class RelayedAnswer(WholeAnswer, Protocol):
    """The form of an answer that is whole or a stream."""

    @abstractmethod
    def events(self, name: bytes, data: bytes) -> Sequence[Event]:
        """Convert an event of vLLM into the client's events, perhaps no event.

        Args:
            name: the event's name; empty without a name.
            data: the event's data, other than ``[DONE]``.

        Raises:
            HeadwaterError: the event says that the request failed.
            msgspec.MsgspecError, ValueError, LookupError, RecursionError: the event is not of the expected form.
        """

    @abstractmethod
    def end(self, error: HeadwaterError | None) -> Sequence[Event]:
        """The events that end the stream.

        Args:
            error: the error that ended the stream; None: the answer is complete.
        """


class ChunkAnswer(RelayedAnswer):
    """An answer of ``/v1/chat/completions`` or ``/v1/completions``."""

    def __init__(self, request: VllmRequest, count: TokenCount) -> None:
        self.count = count
        self._includes_usage = request.includes_usage
        self._counts_usage = request.counts_usage

    def whole(self, body: bytes) -> bytes:
        answer = _wholes.decode(body)
        _check_finished([choice.finish_reason for choice in answer.choices])
        self.count.usage_at_end(_usages.decode(answer.usage), len(answer.choices))
        return msgspec.json.encode(answer)

    def events(self, name: bytes, data: bytes) -> Sequence[Event]:
        chunk = _chunks.decode(data)
        if chunk.error is not None:
            raise failure(chunk.error)
        choices, usage = bytes(chunk.choices), chunk.usage
        if _ABORTED in choices:
            raise ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S)
        if choices == b"[]":
            self.count.usage_at_end(usage)
        elif usage is not None:
            match = _INDEX.match(choices)
            index = int(match[1]) if match is not None else _texts.decode(choices)[0].index
            self.count.choice(index, usage.completion_tokens or 0)
        shown_usage = b""
        if choices == b"[]":
            if not self._includes_usage:
                return ()
            shown_usage = b',"usage":' + orjson.dumps(self.count.usage.as_json())
        elif self._includes_usage or self._counts_usage:
            counted = orjson.dumps(self.count.usage.as_json()) if self._counts_usage else b"null"
            shown_usage = b',"usage":' + counted
        return (
            b'{"id":%b,"object":%b,"created":%b,"model":%b,"choices":%b%b}'
            % (chunk.id, chunk.object, chunk.created, chunk.model, choices, shown_usage),
        )

    def end(self, error: HeadwaterError | None) -> Sequence[Event]:
        return [DONE] if error is None else [orjson.dumps(openai_error(error)), DONE]


class GenerateRelay(RelayedAnswer):
    """An answer of Triton's generate extension, made from vLLM's answer of ``/v1/completions``."""

    def __init__(self, form: GenerateAnswer, count: TokenCount) -> None:
        self.count = count
        self._form = form

    def whole(self, body: bytes) -> bytes:
        answer = _whole_texts.decode(body)
        (choice,) = answer.choices
        _check_finished([choice.finish_reason])
        self.count.usage_at_end(answer.usage, 1)
        return self._form.whole([TextPiece(choice.text, (), choice.finish_reason)], self.count.usage)

    def events(self, name: bytes, data: bytes) -> Sequence[Event]:
        chunk = _chunks.decode(data)
        if chunk.error is not None:
            raise failure(chunk.error)
        choices = _texts.decode(chunk.choices)
        if not choices:
            self.count.usage_at_end(chunk.usage)
            return ()
        (choice,) = choices
        _check_finished([choice.finish_reason])
        if chunk.usage is not None:
            self.count.choice(0, chunk.usage.completion_tokens or 0)
        return self._form.piece(0, TextPiece(choice.text, (), choice.finish_reason))

    def end(self, error: HeadwaterError | None) -> Sequence[Event]:
        return self._form.end(self.count.usage, error)


class EmbeddingsAnswer(WholeAnswer):
    """An answer of ``/v1/embeddings``, collected from one or several answers of vLLM, in the order of the inputs.

    Args:
        model: the model's name in the answer.
        count: counts the tokens.
    """

    def __init__(self, model: str, count: TokenCount) -> None:
        self.count = count
        self._model = model
        self._data: list[_Embedding] = []

    def whole(self, body: bytes) -> bytes:
        """Add an answer of vLLM. Returns empty bytes: `body` returns the client's answer with all embeddings.

        Raises:
            CallableFailed: an embedding has a number that is not finite.
            msgspec.MsgspecError, ValueError, RecursionError: vLLM's answer is not of the expected form.
        """
        answer = _embeddings.decode(body)
        for item in answer.data:
            item.index += len(self._data)
            _check_finite(item)
        self._data += answer.data
        self.count.total(self.count.usage.prompt_tokens + answer.usage.prompt_tokens, 0, 0, len(answer.data))
        return b""

    def body(self) -> bytes:
        """The client's answer, once all of vLLM's answers were added."""
        tokens = self.count.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return msgspec.json.encode({"object": "list", "data": self._data, "model": self._model, "usage": usage})


class TokenizedAnswer(WholeAnswer):
    """An answer of ``/tokenize``: `tokenized`, once `whole` has decoded it."""

    tokenized: Tokenized

    def __init__(self, count: TokenCount) -> None:
        self.count = count

    def whole(self, body: bytes) -> bytes:
        self.tokenized = _tokenized.decode(body)
        return body


def _check_finite(item: _Embedding) -> None:
    """Raise `CallableFailed` if an embedding, encoded as numbers or as base64 of FP32, contains NaN or an infinity."""
    raw = bytes(item.embedding)
    if raw.startswith(b'"'):
        data = base64.b64decode(raw)
        is_finite = bool(np.isfinite(np.frombuffer(data, "<f4", len(data) // 4)).all())
    else:  # vLLM writes NaN and infinities as null
        is_finite = b"null" not in raw
    if not is_finite:
        raise CallableFailed(f"input[{item.index}]: expected finite numbers in vLLM's embedding, got NaN or infinities")


def _check_finished(reasons: Sequence[str | None]) -> None:
    """Raise `ReplicaLost` if vLLM aborted a choice, as it does when it is terminated."""
    if "abort" in reasons:
        raise ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S)
