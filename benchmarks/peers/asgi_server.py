"""uvicorn's own ceiling: an ASGI application that reads the body and answers the right bytes, made beforehand.

``python -m benchmarks.peers.asgi_server SCENARIO PORT``; the scenario is one of `SCALINGS`, the answer that of
its request.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import uvicorn

from benchmarks.peers.work import SCALINGS, work

_HEADERS = [(b"content-type", b"application/json")]


class Constant:
    """Answers every request with one body."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._headers = [*_HEADERS, (b"content-length", str(len(body)).encode())]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})


if __name__ == "__main__":
    todo = work(sys.argv[1])
    (answer,) = todo.answers([SCALINGS[sys.argv[1]].data])
    app: Any = Constant(json.dumps(answer).encode())
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), access_log=False, log_level="warning", lifespan="off")
