"""Every error that a client or operator can see.

::

    HeadwaterError                 status, message
    ├── BadRequest                 400  the request's content is wrong; the message names the field
    │   ├── UnknownField                an object has a field that its type doesn't have
    │   ├── ContextTooLong              prompt, or prompt and answer together, exceed the context length
    │   └── ThreadUnsupported           the request continues a conversation that the server would have to keep
    ├── Unauthorized               401  no API key, or the key is not valid
    ├── Forbidden                  403  this client may not do this, or the configuration forbids it
    │   └── ScopeMissing                its API key is valid, but lacks the scope for this request
    ├── NotFound                   404  unknown model, version, route, file or running request
    ├── MethodNotAllowed           405
    ├── BodyTooSlow                408  headers or body did not arrive in time
    ├── Conflict                   409  the deployment's state doesn't allow the command
    │   └── MemoryBudgetExceeded        the memory budget doesn't allow another replica
    ├── Cancelled                  409  someone cancelled the request by its id
    ├── BodyTooLarge               413
    ├── UnsupportedMediaType       415  content type or encoding
    ├── Quarantined                422  two replicas were lost while they computed the same request
    ├── QueueFull                  429  a queue has no place for the request; Retry-After
    ├── RateLimited                429  the API key has reached a limit, or is barred from the model; Retry-After
    ├── HeadersTooLarge            431
    ├── ClientGone                 499  logs and metrics only
    ├── CallableFailed             500  the callable, an operator's command, or the gateway itself failed
    │   ├── ContractBroken              an engine's tokens are not in sequence
    │   └── OutOfMemory                 the device's memory does not suffice for the request
    ├── SharedMemoryFull           503  /dev/shm has no capacity for the call's tensors; Retry-After
    ├── Unavailable                503  the deployment, or the server, can't take the request now; Retry-After
    │   └── ReplicaLost                 the replica ended while it had the request
    │       └── ReplicaUnreachable      the replica ended before it received the request
    ├── UnknownCoding              501  a transfer coding other than chunked
    ├── DeadlineExceeded           504  time in the queue counts
    └── VersionNotSupported        505  a version of HTTP other than 1.0 and 1.1

    ConfigError                    for the operator: the configuration is wrong; names the field
    StartError                     for the operator: a process can't start
    CommandError                   for the operator: a command of `headwater` failed
"""

from __future__ import annotations

import copy
from typing import ClassVar, Final

from headwater.errors import OutputMismatch

__all__ = [
    "RETRY_AFTER_LOST_S",
    "BadRequest",
    "BodyTooLarge",
    "BodyTooSlow",
    "CallableFailed",
    "Cancelled",
    "ClientGone",
    "CommandError",
    "ConfigError",
    "Conflict",
    "ContextTooLong",
    "ContractBroken",
    "DeadlineExceeded",
    "Forbidden",
    "HeadersTooLarge",
    "HeadwaterError",
    "MemoryBudgetExceeded",
    "MethodNotAllowed",
    "NotFound",
    "OutOfMemory",
    "Quarantined",
    "QueueFull",
    "RateLimited",
    "ReplicaLost",
    "ReplicaUnreachable",
    "ScopeMissing",
    "SharedMemoryFull",
    "StartError",
    "ThreadUnsupported",
    "Unauthorized",
    "Unavailable",
    "UnknownCoding",
    "UnknownField",
    "UnsupportedMediaType",
    "VersionNotSupported",
    "anthropic_error",
    "openai_error",
]

RETRY_AFTER_LOST_S: Final = 2
"""``Retry-After`` after the loss of a replica: about the time until another replica has capacity for its requests."""


class HeadwaterError(Exception):
    """Base of the errors of HTTP requests. A client may get any of them but `ClientGone`.

    A subclass sets ``status``, ``may_quote`` and ``code`` with class keywords, or inherits them.
    """

    status: int = 500
    """HTTP status of the answer: that of the class, or of a row's own refusal."""
    may_quote: ClassVar[bool] = True
    """Whether the message may quote a client's input or a callable's output: the access log shows such a message only
    with ``access_log: full``."""

    code: ClassVar[str | None] = None
    """OpenAI's ``code``: a word for programs. Where OpenAI's API defines a word for the error, it is that word. None:
    the error has no word."""

    fault: str | None = None
    """The rest of a message that begins with the path of ``field``; None: the message doesn't begin with it."""

    def __init_subclass__(
        cls, status: int | None = None, *, may_quote: bool | None = None, code: str | None = None
    ) -> None:
        cls.status = cls.status if status is None else status
        cls.may_quote = cls.may_quote if may_quote is None else may_quote
        cls.code = code or cls.code

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """The request field at fault: OpenAI's ``param``; None: no field is known to be at fault."""
        self.retry_after_s = retry_after_s
        """The answer's ``Retry-After`` in seconds. None: 2 for a 503, else the answer has no such header."""

    def again(self, message: str | None = None) -> HeadwaterError:
        """Return a copy of this error, optionally with another message. Needed because an exception object that is
        raised in several tasks collects the tracebacks of all of them."""
        copied = copy.copy(self)
        if message is not None:
            copied.message, copied.args, copied.fault = message, (message,), None
        return copied


class BadRequest(HeadwaterError, status=400):
    """The request's content is wrong."""

    @classmethod
    def about(cls, field: str, fault: str) -> BadRequest:
        """An error whose message begins with the field's path; ``fault`` is the rest of the message."""
        error = cls(f"{field}{fault}", field=field)
        error.fault = fault
        return error

    def moved(self, field: str) -> BadRequest:
        """A copy with another path of the field, for a request in which the field has another place."""
        return self.about(field, f": {self.message}" if self.fault is None else self.fault)


class UnknownField(BadRequest):
    """An object has a field that its type doesn't have."""


class ContextTooLong(BadRequest, code="context_length_exceeded"):
    """The prompt, or prompt and answer together, exceed the model's context length."""


class ThreadUnsupported(BadRequest, code="thread_unsupported_request"):
    """A request of Anthropic's API has ``thread``. Its clients know the code, and then send all messages."""


class Unauthorized(HeadwaterError, status=401, may_quote=False, code="invalid_api_key"):
    """The request has no API key, or its key is not valid."""


class Forbidden(HeadwaterError, status=403, may_quote=False):
    """The configuration forbids the operation, or reserves it to operators and the client is not known to be an
    operator."""


class ScopeMissing(Forbidden):
    """The API key is valid, but lacks the scope for this request."""


class NotFound(HeadwaterError, status=404):
    """No such model, version, adapter, route or file; or no running request with this id, to cancel."""


class MethodNotAllowed(HeadwaterError, status=405, may_quote=False):
    """The route exists, but not for this method."""


class BodyTooSlow(HeadwaterError, status=408, may_quote=False):
    """The headers or the body did not arrive in time."""


class Conflict(HeadwaterError, status=409, may_quote=False):
    """The deployment's state, or another command that is under way, doesn't allow the command."""


class MemoryBudgetExceeded(Conflict):
    """The memory budget doesn't allow another replica."""


class Cancelled(HeadwaterError, status=409, may_quote=False, code="cancelled"):
    """The request was cancelled by its id while it ran."""


class BodyTooLarge(HeadwaterError, status=413, may_quote=False):
    """The body, compressed or decompressed, is over the configured limit."""


class UnsupportedMediaType(HeadwaterError, status=415):
    """The route doesn't accept this content type or content encoding."""


class Quarantined(HeadwaterError, status=422, may_quote=False, code="quarantined"):
    """Two replicas were lost earlier while they computed the same request."""


class QueueFull(HeadwaterError, status=429, may_quote=False, code="rate_limit_exceeded"):
    """A queue has no place for the request: the queue of the deployment, of its replica, of all deployments together,
    or of the texts to tokenize. Also raised for a waiting request that loses its place to a more urgent request."""


class RateLimited(HeadwaterError, status=429, may_quote=False, code="rate_limit_exceeded"):
    """A limit of the API key is reached, or the key's requests have ended too many replicas of the model; the server
    itself may have capacity."""


class HeadersTooLarge(HeadwaterError, status=431, may_quote=False):
    """The headers are over the limit."""


class ClientGone(HeadwaterError, status=499, may_quote=False):
    """The client disconnected before its answer; seen in logs and metrics only."""


class CallableFailed(HeadwaterError, status=500, code="failed"):
    """The user's callable raised, or its output contradicts its declaration. Also: an operator's command failed, or the
    gateway has a bug."""

    mismatch: OutputMismatch | None = None
    """The output that contradicts its declaration, if that is the fault."""


class ContractBroken(CallableFailed):
    """An engine repeated a token, skipped a token, or sent tokens after the end: its output can't be trusted."""


class OutOfMemory(CallableFailed, code="out_of_memory"):
    """The memory of the replica's device does not suffice for the request, even if it is computed alone; the replica
    keeps serving."""


class SharedMemoryFull(HeadwaterError, status=503, may_quote=False, code="unavailable"):
    """/dev/shm has no capacity for the tensors of the call; the replica keeps serving."""


class Unavailable(HeadwaterError, status=503, may_quote=False, code="unavailable"):
    """The deployment is loading, draining, unloaded or crashed; the request was not done in time before an unload; or
    the server is stopping, or has no memory or no connection left for the request."""


class ReplicaLost(Unavailable):
    """The replica ended, or could not continue, while it had the request; or the server stopped."""


class ReplicaUnreachable(ReplicaLost):
    """The replica ended, or could not be reached, before it received the request: nothing of the request was
    computed."""


class DeadlineExceeded(HeadwaterError, status=504, may_quote=False, code="timeout"):
    """The request's deadline was exceeded; time in the queue counts."""


class UnknownCoding(HeadwaterError, status=501):
    """A transfer coding that this server doesn't decode."""


class VersionNotSupported(HeadwaterError, status=505):
    """A version of HTTP that this server doesn't speak."""


class ConfigError(Exception):
    """The configuration is wrong; the message names the field, the expected value and the given value.

    Args:
        reason: the expected and the given value.
        field: the field at fault; empty: ``reason`` names the field.
        fix: how to fix it; empty: ``reason`` suffices.
    """

    def __init__(self, reason: str, *, field: str = "", fix: str = "") -> None:
        super().__init__((f"{field}: " if field else "") + reason + (f"; {fix}" if fix else ""))
        self.reason, self.field, self.fix = reason, field, fix


class StartError(Exception):
    """A process can't start; the message says why and how to fix it."""


class CommandError(Exception):
    """A command of the command line failed, here or on a running server; the message says why."""


def openai_error(error: HeadwaterError) -> dict[str, object]:
    """The body of an error response in the format of OpenAI's API; its ``code`` is ``model_not_found`` for a
    `NotFound` about the field ``model``."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    is_model = isinstance(error, NotFound) and error.field == "model"
    code = "model_not_found" if is_model else error.code
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": code}}


_ANTHROPIC_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(error: HeadwaterError, request_id: str | None = None) -> dict[str, object]:
    """The body of an error response, or of a stream's error event, in the format of Anthropic's API.

    Clients know a prompt that is too long by the beginning of the message.

    Args:
        error: the error.
        request_id: the request's id; None: the body has none.
    """
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    prefix = "prompt is too long: " if isinstance(error, ContextTooLong) else ""
    about: dict[str, object] = {"type": kind, "message": prefix + error.message}
    if isinstance(error, ThreadUnsupported):
        about["details"] = {"error_code": error.code}
    return {"type": "error", "error": about, **({} if request_id is None else {"request_id": request_id})}
