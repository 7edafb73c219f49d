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
    """A certificate and its key, and the context of connections that show it.

    Raises:
        ConfigError: a file can't be read, others may read the key, or they don't belong together.
    """

    def __init__(self, section: TlsSection) -> None:
        self._section = section
        self.context = _context(section)

    def renew(self) -> None:
        """Read the files again: new connections get what they hold. If that is unusable, what was there stays."""
        try:
            _context(self._section)
            _load(self.context, self._section)
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)
        else:
            logger.info("the certificate was read again")


def _context(section: TlsSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, section)
    return context


def _load(context: ssl.SSLContext, section: TlsSection) -> None:
    for field, path in (("certificate", section.certificate), ("key", section.key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"server.tls.{field}: {path}: can't be read: {error.strerror}") from error
    mode = stat.S_IMODE(section.key.stat().st_mode)
    if mode & 0o027:
        raise ConfigError(
            f"server.tls.key: {section.key}: expected a private key that its owner writes and at most his group reads, "
            f"got mode {mode:04o}; chmod 600 {section.key}"
        )
    try:
        context.load_cert_chain(section.certificate, section.key, password=_no_passphrase)
    except ssl.SSLError as error:
        raise ConfigError(
            f"server.tls: {section.certificate} and {section.key}: expected a certificate and its private key, both in "
            f"PEM, got what can't be used together: {error.reason or 'no PEM'}"
        ) from error


def _no_passphrase() -> str:
    raise ConfigError(
        "server.tls.key: expected a private key without a passphrase, for which nobody could be asked; decrypt it with "
        "`openssl pkey`"
    )
