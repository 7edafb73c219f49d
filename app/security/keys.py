"""The keys of clients: what a server knows of each, and how it finds the one that a request shows.

A key has 256 random bits, so a fast hash of it keeps it safe: what makes slow hashes such as bcrypt necessary is that
passwords can be guessed, and each wrong guess would cost the server what it costs the guesser.

Which scopes a request's route asks for. What isn't named here asks for a key, of whatever scope.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal, get_args

import msgspec

from app.errors import ConfigError

__all__ = [
    "ANY",
    "MAX_KEYS",
    "MAX_KEY_BYTES",
    "OPEN",
    "SCOPES",
    "Key",
    "Keys",
    "Scope",
    "make_key",
    "read_keys",
    "scopes_for",
]


Scope = Literal["infer", "metrics", "admin"]

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

MAX_KEY_BYTES: Final = 512
"""Of what a request shows; more is not looked at."""

MAX_KEYS: Final = 1000

PREFIX: Final = "hw_"
"""Of every key that we make, so that those who scan texts for secrets can tell it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}\Z")

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

PerSecond = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of a key; not the key itself."""

    name: str
    """For logs and people."""
    sha256: str
    """Of the key, in small hexadecimal digits."""
    scopes: tuple[Scope, ...]
    """What it may."""
    requests_per_second: PerSecond | None = None
    concurrent: Count | None = None
    """Requests at once."""
    tokens_per_minute: Count | None = None
    """Of language models: of prompts, and generated."""
    created: str = ""
    """When, for people."""

    @property
    def is_limited(self) -> bool:
        """Whether it has a limit."""
        return (self.requests_per_second, self.concurrent, self.tokens_per_minute) != (None, None, None)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[Key, ...]


def read_keys(content: object, source: str, *, is_text: bool = False) -> tuple[Key, ...]:
    """Check what a file of keys holds.

    Args:
        content: ``{"keys": [...]}``, each with the fields of `Key`.
        source: named in messages.
        is_text: whether numbers and ``null`` are texts, too.

    Raises:
        ConfigError: something is wrong with it. The message quotes no hash.
    """
    try:
        found = msgspec.convert(content, _File, strict=not is_text).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: expected {{keys: [{{name, sha256, scopes}}, ...]}}: {error}") from None
    if len(found) > MAX_KEYS:
        raise ConfigError(f"{source}: keys: expected at most {MAX_KEYS}, got {len(found)}")
    names: set[str] = set()
    digests: set[str] = set()
    for index, key in enumerate(found):
        where = f"{source}: keys[{index}]"
        if not _NAME.match(key.name):
            raise ConfigError(
                f"{where}.name: expected letters, digits, '_', '.', '@' or '-', at most 64, got {key.name[:80]!r}"
            )
        if key.name in names:
            raise ConfigError(f"{where}.name: expected each name once, got {key.name} twice; revoke one")
        if not _DIGEST.match(key.sha256):
            raise ConfigError(
                f"{where}.sha256: expected the key's SHA-256 in 64 small hexadecimal digits, got something else; "
                "`headwater keys add` writes it"
            )
        if key.sha256 in digests:
            raise ConfigError(f"{where}.sha256: expected each key once; {key.name} is the same as another")
        if not key.scopes:
            raise ConfigError(f"{where}.scopes: expected at least one of {', '.join(SCOPES)}")
        names.add(key.name)
        digests.add(key.sha256)
    return found


def make_key() -> tuple[str, str]:
    """A new key, and its hash."""
    text = PREFIX + secrets.token_urlsafe(32)
    return text, hashlib.sha256(text.encode()).hexdigest()


class Keys:
    """Finds a key by its text.

    The table is searched by a part of the hash, which tells nothing about the texts that would match; the rest is
    compared in a time that doesn't depend on it. So is it with a text that nothing is known of.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._all = tuple(keys)
        self._by_start: dict[bytes, tuple[bytes, Key | None]] = {}
        for key in self._all:
            digest = bytes.fromhex(key.sha256)
            self._by_start[digest[:8]] = digest, key
        self._nobody: tuple[bytes, Key | None] = secrets.token_bytes(32), None

    def __iter__(self) -> Iterator[Key]:
        return iter(self._all)

    def find(self, text: bytes) -> Key | None:
        """The key with this text, if there is one."""
        if len(text) > MAX_KEY_BYTES:
            return None
        digest = hashlib.sha256(text).digest()
        known, key = self._by_start.get(digest[:8], self._nobody)
        return key if hmac.compare_digest(known, digest) else None


OPEN: Final[tuple[Scope, ...]] = ()
"""No key is asked for."""

ANY: Final = SCOPES
"""One of any scope will do."""

_INFER: Final[tuple[Scope, ...]] = ("infer",)

_METRICS: Final[tuple[Scope, ...]] = ("metrics",)

_ADMIN: Final[tuple[Scope, ...]] = ("admin",)

_HEALTH: Final = re.compile(r"/v2/(health/(live|ready)|models/[^/]+(/versions/[^/]+)?/ready)\Z")

_PAGES: Final = ("/", "/docs")
"""What they show they ask for with the reader's key."""

_FILES: Final = ("/static/", "/docs/assets/")


def scopes_for(method: str, path: str) -> tuple[Scope, ...]:
    """The scopes, one of which a key must have; `OPEN`: none is needed.

    Args:
        method: the request's.
        path: as the router sees it, percent signs decoded.
    """
    if method == "POST":
        if path.startswith(("/v2/models/", "/v1/", "/v2/requests/")):
            return _INFER
        if path.startswith("/v2/repository/models/"):
            return _ADMIN
    elif path == "/metrics":
        return _METRICS
    elif method in ("GET", "HEAD") and (path in _PAGES or path.startswith(_FILES) or _HEALTH.match(path)):
        return OPEN
    return ANY
