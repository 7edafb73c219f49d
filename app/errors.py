"""Every error that a client or operator can see.

::

    HeadwaterError                 status, message
    ├── BadRequest                 400  the request's content is wrong; the message names the field
    ├── Unauthorized               401  no API key, or none that is good here
    ├── Forbidden                  403  not allowed to this client
    │   └── ScopeMissing                its API key is good, but not for this
    ├── NotFound                   404  unknown model or route
    ├── MethodNotAllowed           405
    ├── BodyTooSlow                408
    ├── Conflict                   409
    │   └── MemoryBudgetExceeded                      the memory budget doesn't allow another replica
    ├── Cancelled                  409  someone cancelled the request by its id
    ├── BodyTooLarge               413
    ├── UnsupportedMediaType       415  content type or encoding
    ├── Quarantined                422  the same request took two replicas down
    ├── QueueFull                  429  the queue of the deployment, or of all, is full; Retry-After
    ├── RateLimited                429  the API key's own limit is reached; Retry-After
    ├── HeadersTooLarge            431
    ├── ClientGone                 499  logs and metrics only
    ├── CallableFailed             500  the user's callable raised, or broke its declaration
    │   └── ContractBroken              an engine's tokens are not in sequence
    ├── Unavailable                503  loading, draining or crashed; Retry-After
    │   └── ReplicaLost                 the replica ended while it had the request
    │       └── ReplicaUnreachable      the replica ended before it had it
    └── DeadlineExceeded           504  queueing included

    ConfigError                    for the operator: the configuration is wrong; names the field
    StartError                     for the operator: a process can't start
    CommandError                   for the operator: a running server refused a command, or can't be reached
"""

from __future__ import annotations

from typing import ClassVar, Final

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
    "ContractBroken",
    "DeadlineExceeded",
    "Forbidden",
    "HeadersTooLarge",
    "HeadwaterError",
    "MemoryBudgetExceeded",
    "MethodNotAllowed",
    "NotFound",
    "Quarantined",
    "QueueFull",
    "RateLimited",
    "ReplicaLost",
    "ReplicaUnreachable",
    "ScopeMissing",
    "StartError",
    "Unauthorized",
    "Unavailable",
    "UnsupportedMediaType",
    "openai_error",
]

RETRY_AFTER_LOST_S: Final = 2
"""What a client is told to wait when a replica was lost: about as long as another one takes to have room for it."""


class HeadwaterError(Exception):
    """Base of the errors that an HTTP client sees."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    """OpenAI's ``type``."""
    may_quote: ClassVar[bool] = True
    """Whether its message may hold what a client sent or a callable said: then it is logged only if asked for."""

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """The request's field at fault: OpenAI's ``param``."""
        self.retry_after_s = retry_after_s

    def again(self, message: str | None = None) -> HeadwaterError:
        """The same, perhaps in other words: one object raised in several tasks gathers the tracebacks of all."""
        return type(self)(
            self.message if message is None else message, field=self.field, retry_after_s=self.retry_after_s
        )


class BadRequest(HeadwaterError):
    """The request's content is wrong."""

    status = 400
    kind = "invalid_request_error"


class Unauthorized(HeadwaterError):
    """No API key, or none that is good here."""

    status = 401
    kind = "invalid_request_error"
    may_quote = False


class Forbidden(HeadwaterError):
    """What only an operator may do, asked by someone who can't be told from anybody else."""

    status = 403
    kind = "invalid_request_error"
    may_quote = False


class ScopeMissing(Forbidden):
    """The API key is good, but not for this."""


class NotFound(HeadwaterError):
    """No such model or route."""

    status = 404
    kind = "invalid_request_error"


class MethodNotAllowed(HeadwaterError):
    """The route exists, but not for this method."""

    status = 405
    kind = "invalid_request_error"
    may_quote = False


class BodyTooSlow(HeadwaterError):
    """The body did not arrive in time."""

    status = 408
    kind = "invalid_request_error"
    may_quote = False


class Conflict(HeadwaterError):
    """The deployment's state doesn't allow it."""

    status = 409
    kind = "invalid_request_error"
    may_quote = False


class MemoryBudgetExceeded(Conflict):
    """The memory budget doesn't allow another replica."""


class Cancelled(HeadwaterError):
    """The request was cancelled by its id while it ran."""

    status = 409
    kind = "invalid_request_error"
    may_quote = False


class BodyTooLarge(HeadwaterError):
    """The body, or what it unpacks to, is over the configured limit."""

    status = 413
    kind = "invalid_request_error"
    may_quote = False


class UnsupportedMediaType(HeadwaterError):
    """Content type or content encoding that the route doesn't take."""

    status = 415
    kind = "invalid_request_error"


class Quarantined(HeadwaterError):
    """The same request took two replicas down a while ago."""

    status = 422
    kind = "invalid_request_error"
    may_quote = False


class QueueFull(HeadwaterError):
    """The queue of the deployment, or of all, is full."""

    status = 429
    kind = "rate_limit_error"
    may_quote = False


class RateLimited(HeadwaterError):
    """The limit of the API key is reached, whatever the server could do."""

    status = 429
    kind = "rate_limit_error"
    may_quote = False


class HeadersTooLarge(HeadwaterError):
    """The headers are over the limit."""

    status = 431
    kind = "invalid_request_error"
    may_quote = False


class ClientGone(HeadwaterError):
    """The client went away before its answer; seen in logs and metrics only."""

    status = 499
    kind = "invalid_request_error"
    may_quote = False


class CallableFailed(HeadwaterError):
    """The user's callable raised, or broke its own declaration."""

    status = 500


class ContractBroken(CallableFailed):
    """An engine repeated a token, left one out, or went on after the end: what it says can't be trusted."""


class Unavailable(HeadwaterError):
    """The deployment is loading, draining or crashed."""

    status = 503
    may_quote = False


class ReplicaLost(Unavailable):
    """The replica ended while it had the request."""


class ReplicaUnreachable(ReplicaLost):
    """The replica ended before it had the request: nothing of it was computed."""


class DeadlineExceeded(HeadwaterError):
    """The request's deadline passed, queueing included."""

    status = 504
    may_quote = False


class ConfigError(Exception):
    """The configuration is wrong; the message names the field, what was expected and what came."""


class StartError(Exception):
    """A process can't start; the message says why and how to fix it."""


class CommandError(Exception):
    """A running server refused or failed what it was told to do, or can't be reached; the message says why."""


def openai_error(error: HeadwaterError) -> dict[str, object]:
    """The body of an error in the form of OpenAI's API."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.field, "code": error.status}}
