"""A language model without an engine: its tokens are scripted, and so is how they are grouped and how they end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import uvicorn
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import headwater.zoo
from headwater.engine import EngineLimits
from headwater.signature import LanguageModelSpec, Signature, TensorSpec
from headwater_server.config.schema import Server
from headwater_server.control.route_kinds import LanguageKind
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.errors import HeadwaterError, NotFound
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from headwater_server.lm.sequence import SequenceSpec, Tokens
from headwater_server.lm.text.language import LanguageText
from tests.app.lm.chat_events import checked_chunk
from tests.running import wait_for

FOLDER = Path(headwater.zoo.__file__).parent / "weights" / "tiny_lm"
LIMITS = EngineLimits(max_sequences=8, max_waiting=16, context_length=512, cache_tokens=2048, vocab_size=4096)
EOS = 2


@cache
def tiny_text() -> LanguageText:
    """The shipped model's tokenizer and template."""
    return LanguageText(FOLDER)


def ids_of(text: str) -> list[int]:
    """Its tokens, without special ones."""
    return tiny_text().tokenizer.encode(text, add_special_tokens=False)


@dataclass
class Script:
    """What the model says to every prompt."""

    text: str = "def add(a, b):\n    return a + b  # größer 漢字 🙂👍🏽"
    ids: list[int] | None = None
    """Instead of a text."""
    stops: bool = True
    """Whether a stop token follows it; otherwise it goes on until `SequenceSpec.max_tokens`."""
    chunk: int = 3
    """Tokens of a sequence that come at once."""
    fail_after: int | None = None
    """Tokens after which the request fails."""
    error: HeadwaterError | None = None
    hangs: bool = False
    """Whether it says nothing more after the last token, until it is closed."""

    def tokens(self, spec: SequenceSpec) -> list[int]:
        """A sequence's tokens; with a seed, they depend on it."""
        ids = list(self.ids if self.ids is not None else ids_of(self.text))
        if spec.sampling.seed is not None:
            ids.insert(0, 300 + spec.sampling.seed % 100)
        return ids


class ScriptedGeneration:
    """See `headwater_server.lm.sequence.Generation`."""

    def __init__(self, specs: Sequence[SequenceSpec], script: Script) -> None:
        self.specs = specs
        self._script = script
        self._left = {place: self._pieces(spec) for place, spec in enumerate(specs)}
        self._given = 0
        self.dropped: list[int] = []
        self.is_closed = False
        self.closed = asyncio.Event()

    def _pieces(self, spec: SequenceSpec) -> Iterator[Tokens]:
        ids = self._script.tokens(spec)
        if self._script.stops:
            ids.append(EOS)
        finish = "stop" if self._script.stops and len(ids) <= spec.max_tokens else "length"
        if finish == "length":
            while len(ids) < spec.max_tokens:
                ids.append(ids[len(ids) % 7])
            ids = ids[: spec.max_tokens]
        if not ids:
            yield Tokens([], finish=finish)
        count = spec.sampling.logprobs
        for start in range(0, len(ids), self._script.chunk):
            tokens = ids[start : start + self._script.chunk]
            is_last = start + self._script.chunk >= len(ids)
            yield Tokens(
                tokens,
                None if count is None else [-0.5 - token / 1000 for token in tokens],
                [tuple((300 + i, -0.1 * i) for i in range(count)) for _ in tokens] if count else None,
                finish if is_last and not self._script.hangs else None,
            )

    async def news(self) -> list[tuple[int, Tokens]]:
        """One piece of every sequence."""
        await asyncio.sleep(0)
        if self._script.fail_after is not None and self._given >= self._script.fail_after:
            assert self._script.error is not None
            raise self._script.error
        found = []
        for place in list(self._left):
            piece = next(self._left[place], None)
            if piece is None:
                if self._script.hangs:
                    await self.closed.wait()
                del self._left[place]
                continue
            self._given += len(piece.tokens)
            found.append((place, piece))
            if piece.finish is not None:
                del self._left[place]
        return found

    def drop(self, place: int) -> None:
        """Forget a sequence."""
        self.dropped.append(place)
        self._left.pop(place, None)

    def close(self) -> None:
        """Say that it was closed."""
        self.is_closed = True
        self.closed.set()


@dataclass
class ScriptedDispatcher:
    """What of `headwater_server.lm.language_model.LmDispatcher` routes use."""

    name: str
    script: Script
    limits: EngineLimits = LIMITS
    language_text: Callable[[], LanguageText] = tiny_text
    opened: list[tuple[str, ScriptedGeneration, float | None]] = field(default_factory=list)
    unavailable: HeadwaterError | None = None
    is_draining: bool = False
    in_flight: int = 0

    @property
    def signature(self) -> Signature:
        return Signature(
            name=self.name,
            inputs=(TensorSpec("text_input", "BYTES", (1,)),),
            outputs=(TensorSpec("text_output", "BYTES", (1,)),),
            streams=True,
            language_model=LanguageModelSpec(str(FOLDER), self.limits),
        )

    @property
    def route(self) -> DeploymentRoute:
        return DeploymentRoute(self.name, State.READY, signature=self.signature, kind=LanguageKind())

    def check_ready(self) -> Signature:
        if self.unavailable is not None:
            raise self.unavailable
        return self.signature

    async def text(self) -> LanguageText:
        return self.language_text()

    def open(
        self, request_id: str, specs: Sequence[SequenceSpec], *, timeout_s: float | None = None, cache_scope: str = ""
    ) -> ScriptedGeneration:
        generation = ScriptedGeneration(specs, self.script)
        self.opened.append((request_id, generation, timeout_s))
        return generation

    async def cancel_request(self, request_id: str) -> int:
        count = 0
        for id, generation, _ in self.opened:
            if id == request_id and not generation.is_closed:
                count += len(generation.specs)
        return count


class ScriptedModels:
    """What of `headwater_server.gateway.models.Models` routes use."""

    def __init__(self, *dispatchers: ScriptedDispatcher) -> None:
        self._dispatchers = {dispatcher.name: dispatcher for dispatcher in dispatchers}
        self.streams = 0
        self.is_draining = False

    def __iter__(self) -> Iterator[ScriptedModel]:
        return (ScriptedModel(dispatcher) for dispatcher in self._dispatchers.values())

    def get(self, name: str, version: str | None = None) -> ScriptedModel:
        if name not in self._dispatchers:
            raise NotFound(f"model {name!r}: unknown", field="model")
        return ScriptedModel(self._dispatchers[name])

    def choose(self, scope: object, name: str, version: str | None = None) -> ScriptedModel:
        return self.get(name, version)

    def language_model(self, model: ScriptedModel) -> ScriptedDispatcher:
        return model.dispatcher

    def vllm(self, name: str) -> None:
        return None

    async def cancel_request(self, request_id: str) -> int:
        return sum([await dispatcher.cancel_request(request_id) for dispatcher in self._dispatchers.values()])


@dataclass
class ScriptedModel:
    """What of `headwater_server.gateway.models.ServedModel` routes use."""

    dispatcher: ScriptedDispatcher
    version = "1"

    @property
    def name(self) -> str:
        return self.route.name

    @property
    def route(self) -> DeploymentRoute:
        return self.dispatcher.route


HELLO: Any = [{"role": "user", "content": "hi"}]


class Gateway:
    """A server on a loopback port with one scripted model, ``tiny``, and one without a chat template, ``plain``."""

    def __init__(self, url: str, models: ScriptedModels, tiny: ScriptedDispatcher, plain: ScriptedDispatcher) -> None:
        self.url = url
        self.models = models
        self.tiny = tiny
        self.plain = plain
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def says(self, **script: Any) -> None:
        """Give the model another script."""
        self.tiny.script = Script(**script)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=20)

    def chat(self, **fields: Any) -> ChatCompletion:
        return cast(ChatCompletion, self.client.chat.completions.create(model="tiny", messages=HELLO, **fields))

    def chunks(self, **fields: Any) -> list[ChatCompletionChunk]:
        stream = self.client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **fields)
        return list(cast("Iterator[ChatCompletionChunk]", stream))

    def completion(self, prompt: Any = "x", **fields: Any) -> Completion:
        return cast(Completion, self.client.completions.create(model="tiny", prompt=prompt, **fields))

    def completions(self, prompt: Any = "x", **fields: Any) -> list[Completion]:
        stream = self.client.completions.create(model="tiny", prompt=prompt, stream=True, **fields)
        return list(cast("Iterator[Completion]", stream))

    def frames(self, path: str, **body: Any) -> list[str]:
        """The data of a stream's events; those of chat are checked."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.text.endswith("\n\n")
        blocks = answer.text.removesuffix("\n\n").split("\n\n")
        assert all(block.startswith("data: ") for block in blocks)
        frames = [block.removeprefix("data: ") for block in blocks]
        if path == "/v1/chat/completions":
            for frame in frames:
                assert frame == "[DONE]" or frame.startswith('{"error":') or checked_chunk(frame)
        return frames


@contextmanager
def serving(models: ScriptedModels, **server: Any) -> Iterator[str]:
    app = create_app(cast(Models, models), Server(access_log=False, **server))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", loop="asyncio"))
        thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=[listener])))
        thread.start()
        try:
            wait_for(lambda: running.started, 20, "the server to start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
