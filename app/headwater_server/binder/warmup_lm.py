"""Warm-up of a language model: sequences over a channel through the replica's Triton."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from tritonclient.grpc import service_pb2

from headwater.engine import EngineLimits, Sampling
from headwater.errors import ReplicaError
from headwater.signature import Signature
from headwater.wire.example_rows import batch_sizes
from headwater.wire.handshake import ReplicaSpec
from headwater.wire.lm import CONTROL, Message, Open, Post, StepFrame, Submit, decode_frame, encode
from headwater.wire.report import HEADWATER, CallNote
from headwater_server.binder.embedded_triton import EmbeddedTriton
from headwater_server.binder.warmup import grpc_outputs

__all__ = ["counts", "submits", "warm_up"]

CHANNEL: Final = "warm-up"
PROMPT_LENGTHS: Final = (5, 24, 1, 60)
"""Numbers of tokens of the prompts, which take turns."""
MAX_TOKENS: Final = 4
"""Maximum number of tokens to generate of each sequence."""
MOST: Final = 256
"""Maximum number of sequences generated together by default."""


def warm_up(
    signature: Signature, triton: EmbeddedTriton, spec: ReplicaSpec, progress: Callable[[str], None]
) -> None:  # fmt: skip
    """Generate a few tokens greedily, with different numbers of concurrent sequences; each sequence must finish.

    The numbers of sequences are `warmup_batch_sizes`; by default, powers of two up to the number that the engine
    computes together, and that number, but at most `MOST`. Numbers above what the engine computes together, or its
    cache holds, are lowered to that. An empty `warmup_batch_sizes`: no warm-up.

    Raises:
        ReplicaError: there was no answer, the channel ended, or a sequence failed.
    """
    assert signature.language_model is not None
    limits = signature.language_model.limits
    sizes = counts(limits, spec.warmup_batch_sizes)
    if not sizes:
        return
    numbers = itertools.count()
    with _WarmUpChannel(signature.name, triton, spec) as channel:
        for place, count in enumerate(sizes, start=1):
            progress(f"warming up, {count} sequence{'s' if count > 1 else ''} ({place}/{len(sizes)})")
            channel.generate(submits(count, limits, numbers))


def counts(limits: EngineLimits, wanted: Sequence[int] | None) -> list[int]:
    """The number of concurrent sequences in each run; see `warm_up`. ``wanted`` None: the default."""
    shortest = min(1 + MAX_TOKENS, limits.context_length)
    max_count = max(min(limits.max_sequences, limits.cache_tokens // shortest), 1)
    if wanted is None:
        return batch_sizes(min(max_count, MOST))
    return list(dict.fromkeys(min(size, max_count) for size in wanted))


def submits(count: int, limits: EngineLimits, numbers: Iterator[int]) -> list[Submit]:
    """Make ``count`` sequences of different lengths that together stay within the engine's limits, with the next
    ``numbers``."""
    longest = min(limits.context_length, limits.cache_tokens // count)
    sequences = []
    for length in itertools.islice(itertools.cycle(PROMPT_LENGTHS), count):
        length = max(min(length, longest - MAX_TOKENS), 1)
        prompt = [(7 * place + length) % limits.vocab_size for place in range(length)]
        max_tokens = max(min(MAX_TOKENS, longest - length), 0)
        greedy = Sampling(temperature=0) if "temperature" in limits.sampling else Sampling()
        sequences.append(Submit(next(numbers), CHANNEL, prompt, max_tokens, greedy, ignore_eos=True))
    return sequences


class _WarmUpChannel:
    """A channel (`headwater.wire.lm`) over a gRPC stream."""

    def __init__(self, name: str, triton: EmbeddedTriton, spec: ReplicaSpec) -> None:
        self._name = name
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._frames = grpc_outputs(triton, spec, iter(self._requests.get, None), "warm-up")

    def __enter__(self) -> _WarmUpChannel:
        self._send(Open(CHANNEL), CallNote(stream=CHANNEL))
        self._next()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._send(Post(CHANNEL), CallNote(cancel=CHANNEL))
                self._requests.put(None)
                if (frame := self._next()) is not None:
                    raise ReplicaError(f"warm-up: expected no frame after the channel was closed, got {frame}")
        finally:
            self._requests.put(None)
            self._frames.close()

    def generate(self, wanted: Sequence[Submit]) -> None:
        """Generate sequences until all have finished."""
        self._send(Post(CHANNEL, list(wanted)), CallNote())
        pending = {submit.number for submit in wanted}
        while pending:
            frame = self._next()
            if frame is None or frame.closed:
                raise ReplicaError(f"warm-up: the channel ended: {frame.closed if frame else 'Triton ended it'}")
            for event in frame.events:
                if event.finish in ("stop", "length"):
                    pending.discard(event.number)
                elif event.finish is not None:
                    raise ReplicaError(f"warm-up: a sequence ended with {event.finish!r}: {event.error}")

    def _next(self) -> StepFrame | None:
        """The channel's next frame; None if the stream has ended."""
        raw = next(self._frames, None)
        return None if raw is None else decode_frame(raw)

    def _send(self, message: Message, note: CallNote) -> None:
        """Send a request; a thread of gRPC takes it from the queue."""
        data = encode(message)
        request = service_pb2.ModelInferRequest(model_name=self._name)
        request.parameters[HEADWATER].string_param = msgspec.json.encode(note).decode()
        request.inputs.add(name=CONTROL, datatype="UINT8", shape=[1, len(data)])
        request.raw_input_contents.append(data)
        self._requests.put(request)
