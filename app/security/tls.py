"""HTTPS: the server's certificate and private key."""

from __future__ import annotations

import logging
import ssl
import stat

from app.config.sections import TlsSection
from app.errors import ConfigError

__all__ = ["Certificate"]

logger = logging.getLogger("headwater")


class Certificate:
    """A certificate with its key, and the TLS context that uses them.

    Raises:
        ConfigError: a file can't be read, others may read the key, or certificate and key don't match.
    """

    def __init__(self, section: TlsSection) -> None:
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


def _load(context: ssl.SSLContext, section: TlsSection) -> None:
    for field, path in (("certificate", section.certificate), ("key", section.key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"server.tls.{field}: {path}: can't be read: {error.strerror}") from error
    mode = stat.S_IMODE(section.key.stat().st_mode)
    if mode & 0o027:
        raise ConfigError(
            f"server.tls.key: {section.key}: expected a private key that only its owner may write and at most its "
            f"group may read, got mode {mode:04o}; chmod 600 {section.key}"
        )
    try:
        context.load_cert_chain(section.certificate, section.key, password=_no_passphrase)
    except ssl.SSLError as error:
        raise ConfigError(
            f"server.tls: {section.certificate} and {section.key}: expected a certificate and its private key, both in "
            f"PEM, got files that can't be used together: {error.reason or 'no PEM'}"
        ) from error


def _no_passphrase() -> str:
    raise ConfigError(
        "server.tls.key: expected a private key without a passphrase, since the server can't ask for one; decrypt the "
        "key with `openssl pkey`"
    )
