"""HTTPS: the server's certificate and private key."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

from headwater_server.config.sections import Tls
from headwater_server.errors import ConfigError
from headwater_server.security.regular_file import require_regular

__all__ = ["Certificate", "load_pair"]

logger = logging.getLogger("headwater")


class Certificate:
    """A certificate with its private key, and the TLS context that uses them.

    Args:
        section: the section of the configuration with the paths of the files.
        kept: copies of the last usable files; they are read if the files can't be used. None: there are no copies.

    Raises:
        ConfigError: see `load_pair`; with ``kept``, only if the copies can't be used either.
    """

    def __init__(self, section: Tls, kept: Tls | None = None) -> None:
        self._section = section
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), section)  # scratch: failure may spoil a context
        except ConfigError as error:
            if kept is None:
                raise
            logger.error("can't load the certificate, using the previous one: %s", error)
            section = kept
        _load(self.context, section)
        self._raw = _contents(section)

    def renew(self) -> None:
        """Read the files again, for new connections; if they are unusable, keep the previous certificate."""
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._section)  # scratch, as above
            _load(self.context, self._section)
            self._raw = _contents(self._section)
        except ConfigError as error:
            logger.error("can't reload the certificate, keeping the previous one: %s", error)
        else:
            logger.info("reloaded the certificate")

    def grpc_credentials(self) -> Any:
        """The credentials of a gRPC server, whose new connections use the certificate as it is then."""
        import grpc  # imported only when needed: it takes memory

        used = self._raw

        def changed() -> Any:
            nonlocal used
            if self._raw is used:
                return None
            used = self._raw
            return grpc.ssl_server_certificate_configuration([used])

        return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([used]), changed)


def _contents(section: Tls) -> tuple[bytes, bytes]:
    """The private key and the certificate, after a check."""
    try:
        return section.key.read_bytes(), section.certificate.read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", field="server.tls") from error


def _load(context: ssl.SSLContext, section: Tls) -> None:
    load_pair(context, ("server.tls.certificate", section.certificate), ("server.tls.key", section.key))


def load_pair(context: ssl.SSLContext, certificate: tuple[str, Path], key: tuple[str, Path]) -> None:
    """Load a certificate and its private key into a context.

    Args:
        context: the context of a server or a client.
        certificate: the configuration field of the certificate's file, for messages, and the file's path.
        key: the same for the private key.

    Raises:
        ConfigError: a file can't be read, the key's mode lets its group write it or other users read it, the key has a
            passphrase, or certificate and key don't match.
    """
    require_regular(*certificate)
    _, mode = require_regular(*key)
    field, path = key
    if mode & 0o027:
        expected = "expected a private key that only its owner may write and at most its group may read"
        raise ConfigError(f"{path}: {expected}, got mode {mode:04o}", field=field, fix=f"chmod 600 {path}")

    def no_passphrase() -> str:
        expected = "expected a private key without a passphrase, since the server can't ask for one"
        raise ConfigError(expected, field=field, fix="decrypt the key with `openssl pkey`")

    try:
        context.load_cert_chain(certificate[1], path, password=no_passphrase)
    except ssl.SSLError as error:
        reason = (
            f"{certificate[1]} and {path}: expected a certificate and its private key, both in PEM, got files that "
            f"can't be used together: {error.reason or 'no PEM'}"
        )
        raise ConfigError(reason, field=field.removesuffix(".key")) from error
