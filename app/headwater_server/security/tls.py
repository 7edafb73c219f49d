"""HTTPS: the server's certificate and private key."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from headwater_server.config.sections import Tls
from headwater_server.errors import ConfigError
from headwater_server.security.regular_file import read_regular

__all__ = ["Certificate", "load_pair", "require_regular"]

logger = logging.getLogger("headwater")


class Certificate:
    """A certificate with its key, and the TLS context that uses them.

    Args:
        section: names the files.
        kept: copies of the files as they last were usable, which are read if the files can't be used.

    Raises:
        ConfigError: a file can't be read, others may read the key, or certificate and key don't match.
    """

    def __init__(self, section: Tls, kept: Tls | None = None) -> None:
        self._section = section
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), section)  # a try: a failure may spoil a context
        except ConfigError as error:
            if kept is None:
                raise
            logger.error("can't load the certificate, using the previous one: %s", error)
            section = kept
        _load(self.context, section)

    def renew(self) -> None:
        """Read the files again, for new connections; if they are unusable, keep the present certificate."""
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._section)  # a try, as above
            _load(self.context, self._section)
        except ConfigError as error:
            logger.error("can't reload the certificate, keeping the previous one: %s", error)
        else:
            logger.info("reloaded the certificate")


def _load(context: ssl.SSLContext, section: Tls) -> None:
    load_pair(context, ("server.tls.certificate", section.certificate), ("server.tls.key", section.key))


def load_pair(context: ssl.SSLContext, certificate: tuple[str, Path], key: tuple[str, Path]) -> None:
    """Have a context use a certificate and its key.

    Args:
        context: of a server or a client.
        certificate: the field of the configuration that names the file, and the file.
        key: the same of the key.

    Raises:
        ConfigError: a file can't be read, others may read the key, or certificate and key don't match.
    """
    require_regular(*certificate)
    mode = require_regular(*key)
    field, path = key
    if mode & 0o027:
        raise ConfigError(
            f"{field}: {path}: expected a private key that only its owner may write and at most its "
            f"group may read, got mode {mode:04o}; chmod 600 {path}"
        )

    def no_passphrase() -> str:
        raise ConfigError(
            f"{field}: expected a private key without a passphrase, since the server can't ask for one; decrypt the "
            "key with `openssl pkey`"
        )

    try:
        context.load_cert_chain(certificate[1], path, password=no_passphrase)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{field.removesuffix('.key')}: {certificate[1]} and {path}: expected a certificate and its private key, "
            f"both in PEM, got files that can't be used together: {error.reason or 'no PEM'}"
        ) from error


def require_regular(field: str, path: Path) -> int:
    """See that a path is a regular file that can be read. Returns its mode bits.

    Args:
        field: of the configuration, which names the file.
        path: the file.

    Raises:
        ConfigError: it can't be read, or is no regular file.
    """
    try:
        content, mode = read_regular(path)
    except OSError as error:
        raise ConfigError(f"{field}: {path}: can't be read: {error.strerror}") from error
    if content is None:
        raise ConfigError(f"{field}: {path}: expected a regular file, got a FIFO, a socket or a device")
    return mode
