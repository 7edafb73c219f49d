"""Mutual TLS between the machines of a cluster: both sides present a certificate of the cluster."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headwater_server.errors import ConfigError
from headwater_server.security.regular_file import require_regular
from headwater_server.security.tls import load_pair

__all__ = ["PeerTls", "check_peer_files", "peer_files"]

logger = logging.getLogger("headwater")

FIELD: Final = "cluster.tls"
AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""Names of the files, as Kubernetes mounts a secret of the type ``kubernetes.io/tls``."""


class PeerTls:
    """TLS 1.3 with certificates of both sides, from a folder with ``ca.crt``, ``tls.crt`` and ``tls.key``.

    A peer belongs to the cluster if it has a certificate that this authority signed for the name `server_name`. No
    other names are compared, because a replica may be on any machine, at any address. To change the authority, put both
    the old and the new authority into ``ca.crt`` during the change.

    Args:
        folder: the folder with the three files.
        kept: copies of the last usable files, in the order of `paths`; they are read if the files can't be used. Empty:
            there are no copies.

    Raises:
        ConfigError: a file can't be read, the key isn't private (see `headwater_server.security.tls.load_pair`), or
            peers would refuse the certificate. With ``kept``, only if the copies can't be used either.
    """

    server_name: Final = "headwater"
    """The DNS name that each certificate must have."""

    def __init__(self, folder: Path, kept: Sequence[Path] = ()) -> None:
        self.paths = peer_files(folder)
        """Paths of the files, for a `FileWatch`."""
        try:
            self._loaded = _LoadedCertificates(self.paths)
        except ConfigError as error:
            if not kept:
                raise
            logger.error("can't load the cluster's certificate, using the previous one: %s", error)
            self._loaded = _LoadedCertificates(kept)

    def renew(self) -> None:
        """Read the files again, for new connections; if they are unusable, keep the previous content."""
        try:
            self._loaded = _LoadedCertificates(self.paths)
        except ConfigError as error:
            logger.error("can't reload the cluster's certificate, keeping the previous one: %s", error)
        else:
            logger.info("reloaded the cluster's certificate")

    def server_context(self) -> ssl.SSLContext:
        """The context for incoming connections; the caller must also check the client's certificate with `is_peer`."""
        return self._loaded.server

    def client_context(self) -> ssl.SSLContext:
        """The context for outgoing connections, which must use `server_name` as the server's name."""
        return self._loaded.client

    def channel_credentials(self) -> Any:
        """The credentials for outgoing gRPC connections."""
        import grpc  # imported only when needed: it takes memory

        authority, certificate, key = self._loaded.raw
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def is_peer(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether a client's certificate, in the form of `ssl.SSLSocket.getpeercert`, has the name `server_name`."""
        return certificate is not None and ("DNS", self.server_name) in certificate.get("subjectAltName", ())


def peer_files(folder: Path) -> list[Path]:
    """Paths of the authority's certificate, the peer's certificate, and the peer's private key."""
    return [folder / name for name in (AUTHORITY, CERTIFICATE, KEY)]


def check_peer_files(paths: Sequence[Path]) -> None:
    """Check the files of `peer_files`.

    Raises:
        ConfigError: the files can't be used; see `PeerTls`.
    """
    _LoadedCertificates(paths)


class _LoadedCertificates:
    """The content of the files, after a check."""

    def __init__(self, paths: Sequence[Path]) -> None:
        authority, certificate, key = paths
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.verify_mode = ssl.CERT_REQUIRED
        self.server.num_tickets = 0  # sessions aren't resumed
        self.server.set_alpn_protocols(["h2", "http/1.1"])
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.client.set_alpn_protocols(["http/1.1"])
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            load_pair(context, (FIELD, certificate), (FIELD, key))
            _trust(context, authority)
        self._try(authority, certificate)
        try:
            self.raw = tuple(path.read_bytes() for path in paths)
        except OSError as error:  # replaced since `load_pair` read it
            raise ConfigError(f"{FIELD}: {error.filename}: can't be read: {error.strerror}") from error

    def _try(self, authority: Path, certificate: Path) -> None:
        """Check the certificate as peers will: with a handshake between the server and the client context.

        Raises:
            ConfigError: the handshake fails.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [
            self.client.wrap_bio(to_client, to_server, server_hostname=PeerTls.server_name),
            self.server.wrap_bio(to_server, to_client, server_side=True),
        ]
        try:
            while sides:
                for side in list(sides):
                    try:
                        side.do_handshake()
                    except ssl.SSLWantReadError:
                        continue
                    sides.remove(side)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or "no TLS 1.3"
            name = f"the DNS name `{PeerTls.server_name}`"
            expected = f"expected a certificate that {authority} has signed, for {name}, for servers and clients"
            reason = f"{certificate}: {expected}, and valid now, got one that peers refuse: {why}"
            raise ConfigError(reason, field=FIELD, fix="issue it again") from error


def _trust(context: ssl.SSLContext, path: Path) -> None:
    require_regular(FIELD, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        why = error.reason or "no PEM"
        raise ConfigError(f"{FIELD}: {path}: expected the authority's certificate in PEM, got {why}") from error
    except OSError as error:
        raise ConfigError(f"{FIELD}: {path}: can't be read: {error.strerror}") from error
