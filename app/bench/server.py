"""What the server says of itself and of the model, before any load."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from app.errors import CommandError
from app.server_client import CONNECT_TIMEOUT_S, KEY_VARIABLE, tls_context

__all__ = ["Head", "Metadata", "Server", "Tensor"]

ASK_TIMEOUT_S = 30.0


class Tensor(msgspec.Struct, frozen=True):
    """An input or output."""

    name: str
    datatype: str
    shape: list[int]
    """Its batch axis first; -1: varies."""


class Head(msgspec.Struct, frozen=True):
    """A pipeline's."""

    name: str


class Metadata(msgspec.Struct, frozen=True):
    """What ``GET /v2/models/{model}`` says."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor] = []
    heads: list[Head] = []


class Server:
    """One server that speaks the Open Inference Protocol, or OpenAI's.

    Args:
        url: its base.
        key: an API key; empty: none.
        transport: tests put their own here.
    """

    def __init__(self, url: str, key: str = "", transport: httpx.BaseTransport | None = None) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._transport = transport

    def about(self) -> tuple[str, str]:
        """Its name and version; empty where it doesn't say.

        Raises:
            CommandError: it can't be reached, or wants another key.
        """
        status, content = self._get("/v2")
        if status != 200 or not isinstance(content, dict):
            return "", ""
        return str(content.get("name", "")), str(content.get("version", ""))

    def models(self) -> list[str]:
        """The names of the models that are ready, as far as it says.

        Raises:
            CommandError: see `about`.
        """
        status, content = self._get("/v2/repository/index")
        if status == 200 and isinstance(content, list):
            return [str(one["name"]) for one in content if isinstance(one, dict) and one.get("state") == "READY"]
        status, content = self._get("/v1/models")
        listed = content.get("data") if status == 200 and isinstance(content, dict) else None
        return [str(one.get("id")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []

    def only_model(self) -> str:
        """The model, if there is one.

        Raises:
            CommandError: there is none or are several, or see `about`.
        """
        names = self.models()
        if len(names) != 1:
            known = ", ".join(names) or "none that is ready"
            raise CommandError(f"--model: expected the name of a model, got none; the server has {known}")
        return names[0]

    def metadata(self, model: str) -> Metadata:
        """A model's inputs, outputs and heads.

        Raises:
            CommandError: there is no such model, it isn't ready, or see `about`.
        """
        path = f"/v2/models/{quote(model, safe='')}"
        status, content = self._get(path)
        if status == 404:
            known = ", ".join(self.models())
            what = f"expected one of the server's models, {known}," if known else "expected a model of the server,"
            raise CommandError(f"--model: {what} got {model!r}")
        if status != 200:
            told = content.get("error") if isinstance(content, dict) else None
            raise CommandError(f"--model {model}: the server says: {told or f'status {status}'}")
        try:
            return msgspec.convert(content, Metadata)
        except msgspec.ValidationError as error:
            raise CommandError(f"{self._url}{path}: expected a model's metadata, got something else: {error}") from None

    def _get(self, path: str) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = httpx.Timeout(ASK_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            with httpx.Client(
                timeout=timeout, verify=tls_context(self._url), trust_env=False, transport=self._transport
            ) as client:
                response = client.get(self._url + path, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise CommandError(
                f"URL: {self._url}: no answer: {str(error) or type(error).__name__}; is the server running there?"
            ) from error
        if response.status_code in (401, 403):
            shown = "the one given is not allowed this" if self._key else "none was given"
            raise CommandError(
                f"{self._url}: expected an API key in --api-key-file or in the environment variable {KEY_VARIABLE}; "
                f"{shown} (status {response.status_code})"
            )
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, None
