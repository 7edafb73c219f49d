"""The command line's client of a running server: queries the served models, and sends the commands load, unload,
reload, scale, promote and rollback.

An API key comes from the environment, since command lines are visible to all users.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx
import msgspec
from msgspec.structs import replace

from headwater.wire.handshake import OWN_SIDE
from headwater_server.cli.report.columns import columns
from headwater_server.errors import CommandError

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
"""Timeout of a query. A command has no timeout once it is connected."""
KEY_VARIABLE: Final = "HEADWATER_KEY"
LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")
MIB: Final = 1024 * 1024


class Tensor(msgspec.Struct, frozen=True):
    """An input or output."""

    name: str
    datatype: str
    shape: list[int]
    """Batch axis first; -1 for a dimension that varies."""
    optional: bool = False
    """Whether requests may leave this input out."""


class Head(msgspec.Struct, frozen=True):
    """A head of a pipeline."""

    name: str


class Metadata(msgspec.Struct, frozen=True):
    """The answer to ``GET /v2/models/{model}``."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor] = []
    heads: list[Head] = []


class _ConfiguredInput(msgspec.Struct):
    name: str
    optional: bool = False


class _ServerConfig(msgspec.Struct):
    """The used part of the answer to ``GET /v2/models/{model}/config``."""

    input: list[_ConfiguredInput] = []


class ServerClient:
    """A client of a server that speaks the Open Inference Protocol or OpenAI's API.

    Args:
        url: the server's base, such as ``http://127.0.0.1:8000``.
        transport: a transport of httpx that tests pass.
        environment: may have an API key in HEADWATER_KEY.
        key: an API key that takes precedence; empty: no key; None: the key in the environment, if there is one.
        option: the option of the command line that names the server; quoted in messages.

    Raises:
        CommandError: the key in the environment has characters that no key has.
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
            CommandError: the server refused, can't be reached, or isn't Headwater.
        """
        index = self._ask("GET", "/v2/repository/index")
        if not isinstance(index, list):
            raise CommandError(f"{self._url}: expected a list of models, got something else: is it a Headwater server?")
        return index

    def command(self, action: str, model: str, config: str | None = None) -> dict[str, Any]:
        """Load, unload or reload a model, without a timeout. Returns the server's answer, which has the model's new
        state; see `command_line`.

        Args:
            action: ``load``, ``unload`` or ``reload``.
            model: the deployment.
            config: for load and reload, a deployment's section as JSON.

        Raises:
            CommandError: the server refused, failed, or can't be reached.
        """
        return self._change(action, model, None if config is None else {"parameters": {"config": config}}, "state")

    def scale(self, model: str, bounds: Mapping[str, int]) -> dict[str, Any]:
        """Change the number of a model's replicas to ``replicas``, or ``min`` and ``max``. Result and errors as for
        `command`."""
        return self._change("scale", model, bounds, "replicas")

    def promote(self, model: str, version: str) -> dict[str, Any]:
        """Give a version of a model all requests. Result and errors as for `command`."""
        return self._change("promote", model, {"version": version}, "traffic")

    def roll_back(self, model: str, *, is_undo: bool) -> dict[str, Any]:
        """Undo the last change of a model's traffic, or with ``is_undo`` the last rollback. Result and errors as for
        `command`."""
        return self._change("rollback", model, {"undo": True} if is_undo else None, "traffic")

    def _change(self, action: str, model: str, body: object, wanted: str) -> dict[str, Any]:
        answer = self._ask("POST", f"/v2/repository/models/{quote(model, safe='')}/{action}", body)
        if not isinstance(answer, dict) or wanted not in answer:
            raise CommandError(
                f"{self._url}: expected a model's {wanted}, got something else: is it a Headwater server?"
            )
        return answer

    def about(self) -> tuple[str, str]:
        """The server's name and version; empty if it doesn't report them.

        Raises:
            CommandError: the server can't be reached, or requires an API key.
        """
        status, content = self.get("/v2")
        if status != 200 or not isinstance(content, dict):
            return "", ""
        return str(content.get("name", "")), str(content.get("version", ""))

    def models(self) -> list[str]:
        """The names of the ready models; empty if no model is ready, or the server doesn't list its models.

        Raises:
            CommandError: see `about`.
        """
        status, content = self.get("/v2/repository/index")
        if status == 200 and isinstance(content, list):
            ready = (
                str(entry["name"]) for entry in content if isinstance(entry, dict) and entry.get("state") == "READY"
            )
            return list(dict.fromkeys(ready))  # a model with versions has an entry for each version
        status, content = self.get("/v1/models")
        listed = content.get("data") if status == 200 and isinstance(content, dict) else None
        return [str(entry.get("id")) for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []

    def only_model(self) -> str:
        """The name of the server's only model.

        Raises:
            CommandError: the server has no ready model or several models; or see `about`.
        """
        names = self.models()
        if len(names) != 1:
            models = ", ".join(names) or "no ready model"
            raise CommandError(f"--model: expected the name of a model, got no name; the server has {models}")
        return names[0]

    def metadata(self, model: str) -> Metadata:
        """A model's inputs, outputs and heads.

        Raises:
            CommandError: there is no such model, it isn't ready, the answer is no metadata, or see `about`.
        """
        path = f"/v2/models/{quote(model, safe='')}"
        status, content = self.get(path)
        if status == 404:
            models = ", ".join(self.models())
            expected = (
                f"expected one of the server's models, {models}," if models else "expected a model of the server,"
            )
            raise CommandError(f"--model: {expected} got {model!r}")
        if status != 200:
            raise CommandError(f"--model {model}: the server says: {_error(content) or f'status {status}'}")
        _, config = self.get(f"{path}/config")  # only /config says which inputs are optional
        try:
            metadata = msgspec.convert(content, Metadata)
            optional = {tensor.name for tensor in msgspec.convert(config or {}, _ServerConfig).input if tensor.optional}
        except msgspec.ValidationError as error:
            raise CommandError(f"{self._url}{path}: expected a model's metadata, got something else: {error}") from None
        inputs = [replace(tensor, optional=tensor.name in optional) for tensor in metadata.inputs]
        return replace(metadata, inputs=inputs)

    def get(self, path: str) -> tuple[int, Any]:
        """The status and the decoded JSON of an answer; None in place of JSON if the body isn't JSON.

        Raises:
            CommandError: see `about`.
        """
        return self._send("GET", path)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        status, content = self._send(method, path, body)
        if content is None:
            raise CommandError(
                f"{self._url}: expected JSON, got status {status} with something else: is it a Headwater server?"
            )
        if status != 200:
            raise CommandError(_error(content) or f"{self._url}: status {status}")
        return content

    def _send(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S if method == "GET" else None, connect=CONNECT_TIMEOUT_S)
        try:
            # No proxy: a command must come from the machine of the server.
            with httpx.Client(
                timeout=timeout, verify=tls_context(self._url), trust_env=False, transport=self._transport
            ) as client:
                response = client.request(method, self._url + path, json=body, headers=self._headers)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
            raise CommandError(
                f"{self._option}: expected a server's URL such as http://127.0.0.1:8000, got {self._url!r}: {error}"
            ) from error
        except httpx.HTTPError as error:
            raise CommandError(
                f"{self._option}: {self._url}: no answer: {str(error) or type(error).__name__}; is the server running "
                "there?"
            ) from error
        if response.status_code == 401:
            got = "an invalid key" if self._headers else "no key"
            raise CommandError(
                f"{self._url}: expected one of the server's API keys in the environment variable {KEY_VARIABLE}, or in "
                f"--api-key-file of `headwater bench`, got {got}"
            )
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, None


def _error(content: Any) -> str:
    """The error message in an answer; empty if it has no error."""
    return str(content.get("error") or "") if isinstance(content, dict) else ""


def api_key(environment: Mapping[str, str] = os.environ) -> str:
    """The API key in the environment; empty if there is no key.

    Raises:
        CommandError: the variable's value has characters that no key has.
    """
    key = environment.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CommandError(f"environment variable {KEY_VARIABLE}: expected visible ASCII characters, got others")
    return key


def tls_context(url: str) -> ssl.SSLContext:
    """A TLS context for a server. Certificates are not verified on loopback addresses, for which no certificate is
    issued."""
    if urlsplit(url).hostname in LOOPBACK_NAMES:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context()  # SSL_CERT_FILE in the environment names another authority


def status_table(index: Sequence[Mapping[str, Any]]) -> str:
    """The models as a text table, with a column for nodes on a cluster, followed by a table of the package versions
    that replicas use."""
    rows = [("MODEL", "VERSION", "STATE", "REPLICAS", "DEVICES", "NODES", "SINCE", "REASON"), *map(_cells, index)]
    at = rows[0].index("NODES")
    is_cluster = any(row[at] for row in rows[1:])
    table = columns(rows if is_cluster else [(*row[:at], *row[at + 1 :]) for row in rows])
    versions = _versions(index)
    return f"{table}\n\n{columns(versions)}" if len(versions) > 1 else table


def command_line(action: str, answer: Mapping[str, Any]) -> str:
    """The result of a command in one line, from the server's answer to it."""
    if "traffic" in answer:
        shares = ", ".join(f"{100 * share:g} % to {version}" for version, share in answer["traffic"].items())
        return f"{answer['name']}: {action} done: {shares}; default {answer['default']}"
    parts = [f"{answer['name']}: {action} done in {answer['took_s']:.1f} s, now {answer['state']}"]
    if "replicas" in answer:
        parts.append(f"{_replicas(answer)} replicas")
    if "drained" in answer:
        parts.append(f"{answer['drained']} requests finished, {answer['ended']} ended")
        freed = answer["freed"]
        text = "freed an unknown size" if freed["host_bytes"] is None else f"freed {freed['host_bytes'] / MIB:.0f} MiB"
        if freed["gpu_bytes"] is not None:
            text += f", {freed['gpu_bytes'] / MIB:.0f} MiB on GPUs"
        parts.append(text)
    parts += answer.get("warnings", ())
    return "; ".join(parts)


def _cells(model: Mapping[str, Any]) -> tuple[str, ...]:
    reason = str(model.get("reason", ""))
    if model.get("shortage"):
        reason += f"; {model['shortage']}"
    name, version, state, since = (str(model.get(field, "")) for field in ("name", "version", "state", "since"))
    devices = ",".join(model.get("devices", ()))
    nodes = ",".join(f"{node} ({count})" if count > 1 else node for node, count in model.get("nodes", {}).items())
    if "share" in model:
        version += " (shadow)" if model.get("shadow") else f" ({100 * model['share']:g} %)"
    return name, version, state, _replicas(model), devices, nodes, since, reason


def _versions(index: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of a table of package versions: for each model, a row for each distinct environment of its replicas; for
    Headwater itself, a row for each distinct set of versions."""
    rows = [("MODEL", "VERSION", "REPLICAS", "RUNS WITH")]
    headwater_versions = set()
    for model in index:
        environments = model.get("environments", ())
        for environment in environments:
            ids = environment["replicas"]
            which = "all" if len(environments) == 1 else ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")
            texts = [f"{package} {version}" for package, version in environment["versions"].items()]
            of_model = ", ".join(text for text in texts if not text.startswith(OWN_SIDE))
            rows.append((model["name"], str(model["version"]), which, of_model))
            headwater_versions.add(
                ", ".join(text.removeprefix(OWN_SIDE) for text in texts if text.startswith(OWN_SIDE))
            )
    return [*rows, *(("Headwater itself", "", "", text) for text in sorted(headwater_versions - {""}))]


def _replicas(model: Mapping[str, Any]) -> str:
    """The numbers of ready and wanted replicas, and the bounds of scaling if they differ; empty if the entry has no
    replicas."""
    counts = model.get("replicas")
    if counts is None:
        return ""
    bounds = f" ({counts['min']} to {counts['max']})" if counts["min"] < counts["max"] else ""
    return f"{counts['ready']}/{counts['wanted']}{bounds}"
