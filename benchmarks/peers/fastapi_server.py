"""A peer: FastAPI on uvicorn, with pydantic models and the model called in the route, as its documentation shows.

``python -m benchmarks.peers.fastapi_server SCENARIO PORT``. A route that computes is no coroutine, so FastAPI runs it
in its thread pool; nothing gathers rows into batches, which a user would have to write.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import Body, FastAPI, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from benchmarks.peers.token_events import END, event_of, last_event
from benchmarks.peers.work import ImageWork, path_of, work


class Tensor(BaseModel):
    """One input or output."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float] | list[str]


class Request(BaseModel):
    """What is asked."""

    inputs: list[Tensor]


class Answer(BaseModel):
    """What is answered."""

    outputs: list[Tensor]


class StreamRequest(BaseModel):
    """A stream that is asked for."""

    max_tokens: int


def application(scenario: str) -> FastAPI:
    """The app with the scenario's route."""
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    if scenario == "image":
        images = ImageWork()

        @app.post(path_of(scenario))
        def infer_image(body: bytes = Body(media_type="application/octet-stream")) -> Response:
            return Response(images.binary_answers([body])[0], media_type="application/octet-stream")

    elif scenario == "streams":

        @app.post(path_of(scenario))
        async def stream(request: StreamRequest) -> StreamingResponse:
            return StreamingResponse(_events(request.max_tokens), media_type="text/event-stream")

    else:
        todo = work(scenario)

        @app.post(path_of(scenario))
        def infer(request: Request) -> Answer:
            message: dict[str, Any] = {"inputs": [{"data": request.inputs[0].data}]}
            (answer,) = todo.answers([todo.row(message)])
            return Answer.model_validate(answer)

    return app


async def _events(count: int) -> AsyncIterator[str]:
    for token in range(count):
        yield f"data: {event_of(token, count)}\n\n"
    yield f"data: {last_event(count)}\n\n"
    yield f"data: {END}\n\n"


if __name__ == "__main__":
    uvicorn.run(
        application(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), access_log=False, log_level="warning"
    )
