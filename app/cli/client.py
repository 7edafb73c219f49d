"""The command line's side of a running server: asks what it serves, and commands load, unload and reload.

An API key comes from the environment: a command line can be read by everybody.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from app.cli.report.columns import columns
from app.errors import CommandError

__all__ = [
    "Head",
    "Metadata",
    "ServerClient",
    "Tensor",
    "api_key",
    "command_line",
    "status_table",
    "tls_context",
]

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 30.0
"""For a question; a command may take however long it takes."""
KEY_VARIABLE: Final = "HEADWATER_KEY"
LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")
MIB: Final = 1024 * 1024


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


class ServerClient:
    """One server that speaks the Open Inference Protocol, or OpenAI's.

    Args:
        url: its base, such as ``http://127.0.0.1:8000``.
        transport: tests put their own here.
        environment: has the API key, if there is one, as HEADWATER_KEY.
        key: an API key that counts instead; empty: none.
        option: of the command line, that names the server.
    """

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        environment: Mapping[str, str] = os.environ,
        *,
        key: str | None = None,
        option: str = "--url",
    ) -> None:
        self._url = url.rstrip("/")
        self._transport = transport
        self._option = option
        key = api_key(environment) if key is None else key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def index(self) -> list[dict[str, Any]]:
        """All models with their states.

        Raises:
            CommandError: it can't be reached, or is no Headwater.
        """
        index = self._ask("GET", "/v2/repository/index", timeout_s=ANSWER_TIMEOUT_S)
        if not isinstance(index, list):
            raise CommandError(f"{self._url}: expected a list of models, got something else: is it a Headwater server?")
        return index

    def command(self, action: str, model: str, config: str | None = None) -> dict[str, Any]:
        """Have a model loaded, unloaded or reloaded, however long that takes. Returns what the server says of it.

        Args:
            action: what.
            model: the deployment.
            config: of load and reload, JSON of a deployment's section.

        Raises:
            CommandError: it refused, failed, or can't be reached.
        """
        path = f"/v2/repository/models/{quote(model, safe='')}/{action}"
        body = None if config is None else {"parameters": {"config": config}}
        answer = self._ask("POST", path, timeout_s=None, body=body)
        if not isinstance(answer, dict) or "state" not in answer:
            raise CommandError(f"{self._url}: expected a model's state, got something else: is it a Headwater server?")
        return answer

    def scale(self, model: str, bounds: Mapping[str, int]) -> dict[str, Any]:
        """Have another number of replicas of a model.

        Args:
            model: the deployment.
            bounds: ``replicas``, or ``min`` and ``max``.

        Raises:
            CommandError: it refused, failed, or can't be reached.
        """
        path = f"/v2/repository/models/{quote(model, safe='')}/scale"
        answer = self._ask("POST", path, timeout_s=None, body=bounds)
        if not isinstance(answer, dict) or "replicas" not in answer:
            raise CommandError(f"{self._url}: expected a model's replicas, got something else: is it Headwater?")
        return answer

    def about(self) -> tuple[str, str]:
        """Its name and version; empty where it doesn't say.

        Raises:
            CommandError: it can't be reached, or wants an API key.
        """
        status, content = self.get("/v2")
        if status != 200 or not isinstance(content, dict):
            return "", ""
        return str(content.get("name", "")), str(content.get("version", ""))

    def models(self) -> list[str]:
        """The names of the models that are ready, as far as it says.

        Raises:
            CommandError: see `about`.
        """
        status, content = self.get("/v2/repository/index")
        if status == 200 and isinstance(content, list):
            return [str(one["name"]) for one in content if isinstance(one, dict) and one.get("state") == "READY"]
        status, content = self.get("/v1/models")
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
        status, content = self.get(path)
        if status == 404:
            known = ", ".join(self.models())
            what = f"expected one of the server's models, {known}," if known else "expected a model of the server,"
            raise CommandError(f"--model: {what} got {model!r}")
        if status != 200:
            raise CommandError(f"--model {model}: the server says: {_error(content) or f'status {status}'}")
        try:
            return msgspec.convert(content, Metadata)
        except msgspec.ValidationError as error:
            raise CommandError(f"{self._url}{path}: expected a model's metadata, got something else: {error}") from None

    def get(self, path: str) -> tuple[int, Any]:
        """The status, and the JSON of an answer; None for one that has none.

        Raises:
            CommandError: see `about`.
        """
        return self._send("GET", path, timeout_s=ANSWER_TIMEOUT_S)

    def _ask(self, method: str, path: str, *, timeout_s: float | None, body: object = None) -> Any:
        status, content = self._send(method, path, timeout_s=timeout_s, body=body)
        if content is None:
            raise CommandError(
                f"{self._url}: expected JSON, got status {status} with something else: is it a Headwater server?"
            )
        if status != 200:
            raise CommandError(_error(content) or f"{self._url}: status {status}")
        return content

    def _send(self, method: str, path: str, *, timeout_s: float | None, body: object = None) -> tuple[int, Any]:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            # Not by a proxy: a command must come from the server's own machine.
            with httpx.Client(
                timeout=timeout, verify=tls_context(self._url), trust_env=False, transport=self._transport
            ) as client:
                response = client.request(method, self._url + path, json=body, headers=self._headers)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise CommandError(
                f"{self._option}: {self._url}: no answer: {str(error) or type(error).__name__}; is the server running "
                "there?"
            ) from error
        if response.status_code == 401:
            shown = "the one given is not one of them" if self._headers else "none was given"
            raise CommandError(
                f"{self._url}: expected one of its API keys in the environment variable {KEY_VARIABLE}, or in "
                f"--api-key-file of `headwater bench`; {shown}"
            )
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, None


def _error(content: Any) -> str:
    """What an answer says of an error; empty: nothing."""
    return str(content.get("error") or "") if isinstance(content, dict) else ""


def api_key(environment: Mapping[str, str] = os.environ) -> str:
    """The API key that the environment has; empty: none.

    Raises:
        CommandError: it can't be one.
    """
    key = environment.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CommandError(f"environment variable {KEY_VARIABLE}: expected visible ASCII characters, got others")
    return key


def tls_context(url: str) -> ssl.SSLContext:
    """Who a server has to be: on this machine anybody, for whose name no certificate is."""
    if urlsplit(url).hostname in LOOPBACK_NAMES:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context()  # SSL_CERT_FILE in the environment names another authority


def status_table(index: Sequence[Mapping[str, Any]]) -> str:
    """The models as a table for people."""
    head = ("MODEL", "VERSION", "STATE", "REPLICAS", "DEVICES", "SINCE", "REASON")
    return columns([head, *map(_cells, index)])


def command_line(action: str, answer: Mapping[str, Any]) -> str:
    """What came of a command, in a line for people."""
    parts = [f"{answer['name']}: {action} done in {answer['took_s']:.1f} s, now {answer['state']}"]
    if "replicas" in answer:
        parts.append(f"{_replicas(answer)} replicas")
    if "drained" in answer:
        parts.append(f"{answer['drained']} requests finished, {answer['ended']} ended")
        freed = answer["freed"]
        text = f"freed {freed['host_bytes'] / MIB:.0f} MiB"
        if freed["gpu_bytes"] is not None:
            text += f", {freed['gpu_bytes'] / MIB:.0f} MiB on GPUs"
        parts.append(text)
    parts += answer.get("warnings", ())
    return "; ".join(parts)


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    reason = str(one.get("reason", ""))
    if one.get("shortage"):
        reason += f"; {one['shortage']}"
    told = [str(one.get(name, "")) for name in ("name", "version", "state")]
    return *told, _replicas(one), ",".join(one.get("devices", ())), str(one.get("since", "")), reason


def _replicas(one: Mapping[str, Any]) -> str:
    """Those ready and those wanted, and the bounds if they differ."""
    found = one.get("replicas")
    if found is None:
        return ""
    bounds = f" ({found['min']} to {found['max']})" if found["min"] < found["max"] else ""
    return f"{found['ready']}/{found['wanted']}{bounds}"
