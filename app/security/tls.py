"""HTTPS: the server's certificate and private key."""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path

from app.config.sections import Tls
from app.errors import ConfigError

__all__ = ["Certificate", "load_pair"]

logger = logging.getLogger("headwater")


class Certificate:
    """A certificate with its key, and the TLS context that uses them.

    Raises:
        ConfigError: a file can't be read, others may read the key, or certificate and key don't match.
    """

    def __init__(self, section: Tls) -> None:
        self._section = section
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load(self.context, section)

    def renew(self) -> None:
        """Read the files again, for new connections; if they are unusable, keep the present certificate."""
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._section)  # a try: a failure may spoil a context
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
    for field, path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{field}: {path}: can't be read: {error.strerror}") from error
    field, path = key
    mode = stat.S_IMODE(path.stat().st_mode)
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
