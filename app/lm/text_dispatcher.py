"""What every dispatcher of a language model refuses: requests with tensors."""

from __future__ import annotations

from typing import NoReturn

from app.codecs.tensors import InferRequest
from app.dispatch.protocol import Dispatcher
from app.errors import BadRequest

__all__ = ["TextDispatcher"]


class TextDispatcher(Dispatcher):
    """A dispatcher that takes text only."""

    def check_whole(self) -> None:
        self.check_ready()
        raise self._refusal()

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> NoReturn:
        raise self._refusal()

    def stream(self, request: InferRequest) -> NoReturn:
        raise self._refusal()

    def _refusal(self) -> BadRequest:
        name = self.route.name
        return BadRequest(
            f"model `{name}` is a language model and takes no tensors: POST to /v2/models/{name}/generate, "
            f"/v2/models/{name}/generate_stream or /v1/chat/completions"
        )
