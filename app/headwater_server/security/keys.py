"""API keys: the stored data of a key, how the server finds a request's key, and the scopes that a route requires.

A key has 256 random bits, so a fast hash keeps it safe. Slow hashes such as bcrypt are for passwords, which can be
guessed; for keys, each wrong guess would cost the server as much time as the attacker.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec

from headwater_server.errors import ConfigError
from headwater_server.security.scopes import SCOPES, Scope

__all__ = ["OPEN", "Key", "Keys", "is_health_check", "make_key", "read_keys", "scopes_for"]

MAX_KEY_BYTES: Final = 512
"""A text longer than this is refused without hashing it."""
MAX_KEYS: Final = 1000
PREFIX: Final = "hw_"
"""Starts every key that Headwater makes, so that secret scanners can recognise it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
OPEN: Final[tuple[Scope, ...]] = ()
"""No key is required."""
_HEALTH: Final = re.compile(r"/(ping|health(/ready)?|v2/health/(live|ready)|v2/models/[^/]+(/versions/[^/]+)?/ready)\Z")
_PAGES: Final = ("/", "/docs")
"""Pages without data: their scripts fetch data with the reader's key."""
_FILES: Final = ("/static/", "/docs/assets/")
_UNDER_THE_ROOT: Final = (
    "/", "/classify", "/decode", "/detokenize", "/embed", "/embed_all", "/embed_sparse", "/invocations", "/pooling",
    "/predict", "/rerank", "/score", "/similarity", "/tokenize", "/v2/embed", "/v2/rerank",
)  # fmt: skip
"""Inference routes without the prefix ``/v1/``, for compatibility with other servers' APIs."""
PerSecond = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key's stored data, which doesn't include the key itself. A limit of None doesn't apply."""

    name: str
    """Identifies the key in logs and messages."""
    sha256: str
    """The key's SHA-256, in lower-case hexadecimal digits."""
    scopes: tuple[Scope, ...]
    requests_per_second: PerSecond | None = None
    concurrent: Count | None = None
    """The most requests in flight at once."""
    tokens_per_minute: Count | None = None
    """Tokens of language models: prompt tokens and generated tokens together."""
    created: str = ""
    """Date of creation, for people."""

    @property
    def is_limited(self) -> bool:
        """Whether the key has a limit."""
        return (self.requests_per_second, self.concurrent, self.tokens_per_minute) != (None, None, None)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[Key, ...]


def read_keys(content: object, field: str, place: str = "", *, is_text: bool = False) -> tuple[Key, ...]:
    """Check the content of a file of keys.

    Args:
        content: ``{"keys": [...]}``; each item has the fields of `Key`.
        field: the configuration's field, or another name of the source, for messages.
        place: the path of the field's file and a colon, for messages; empty: there is no file.
        is_text: whether numbers and ``null`` are given as strings.

    Raises:
        ConfigError: the content is invalid. The message quotes no hash.
    """
    try:
        keys = msgspec.convert(content, _File, strict=not is_text).keys
    except msgspec.ValidationError as error:
        reason = f"{place}expected {{keys: [{{name, sha256, scopes}}, ...]}}: {error}"
        raise ConfigError(reason, field=field) from None
    for fault, fix in _faults(keys):
        raise ConfigError(f"{place}{fault}", field=field, fix=fix)
    return keys


def _faults(keys: Sequence[Key]) -> Iterator[tuple[str, str]]:
    """The faults of keys, each with the way to fix it, which may be empty."""
    if len(keys) > MAX_KEYS:
        yield f"keys: expected at most {MAX_KEYS}, got {len(keys)}", ""
    names: set[str] = set()
    digests: set[str] = set()
    for index, key in enumerate(keys):
        where = f"keys[{index}]"
        if not _NAME.match(key.name):
            expected = "expected letters, digits, '_', '.', '@' or '-', at most 64"
            yield f"{where}.name: {expected}, got {key.name[:80]!r}", ""
        if key.name in names:
            yield f"{where}.name: expected each name once, got {key.name} twice", "revoke one"
        if not _DIGEST.match(key.sha256):
            expected = "expected the key's SHA-256 in 64 lower-case hexadecimal digits"
            yield f"{where}.sha256: {expected}, got something else", "`headwater keys add` writes it"
        if key.sha256 in digests:
            yield f"{where}.sha256: expected each key once; {key.name} is the same as another", ""
        if not key.scopes:
            yield f"{where}.scopes: expected at least one of {', '.join(SCOPES)}", ""
        names.add(key.name)
        digests.add(key.sha256)


def make_key() -> tuple[str, str]:
    """Make a new key. Returns the key and its SHA-256 in hexadecimal digits."""
    text = PREFIX + secrets.token_urlsafe(32)
    return text, hashlib.sha256(text.encode()).hexdigest()


class Keys:
    """Finds a key by its text.

    The lookup uses the first 8 bytes of the hash; its timing reveals nothing about the text of a key. The whole hash is
    compared in constant time, also for unknown texts.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._by_start: dict[bytes, tuple[bytes, Key | None]] = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            self._by_start[digest[:8]] = digest, key
        self._nobody = secrets.token_bytes(32), None

    def find(self, text: bytes) -> Key | None:
        """The key with this text; None if there is no such key."""
        if len(text) > MAX_KEY_BYTES:
            return None
        digest = hashlib.sha256(text).digest()
        stored_digest, key = self._by_start.get(digest[:8], self._nobody)
        return key if hmac.compare_digest(stored_digest, digest) else None


def scopes_for(method: str, path: str) -> tuple[Scope, ...]:
    """The scopes of which a request's key must have at least one; `OPEN` if no key is required. A route that is not
    named in this function requires a key of any scope.

    Args:
        method: the request's method.
        path: the path as the router sees it, with percent-encoding decoded.
    """
    if method == "POST":
        if path.startswith(("/v2/models/", "/v1/", "/v2/requests/")) or path in _UNDER_THE_ROOT:
            return ("infer",)
        if path.startswith("/v2/repository/models/"):
            return ("admin",)
    elif path == "/metrics":
        return ("metrics",)
    elif is_health_check(method, path) or (method in ("GET", "HEAD") and (path in _PAGES or path.startswith(_FILES))):
        return OPEN
    return SCOPES


def is_health_check(method: str, path: str) -> bool:
    """Whether a request asks for the health of the server or a model; takes the arguments of `scopes_for`."""
    return method in ("GET", "HEAD") and _HEALTH.match(path) is not None
