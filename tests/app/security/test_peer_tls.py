"""The TLS between the machines of a cluster."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
from pathlib import Path

import pytest

from benchmarks.certificates import authority, issue
from headwater_server.errors import ConfigError
from headwater_server.security.kept_files import KeptFiles
from headwater_server.security.peer_tls import PeerTls, check_peer_files, peer_files

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


async def shown(server: PeerTls, client: PeerTls) -> tuple[bytes, bool]:
    """What a client is shown, and whether the server takes the client's certificate for a peer's."""
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.set_result(server.is_peer(writer.get_extra_info("peercert")))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server.server_context()) as listening:
        reader, writer = await asyncio.open_connection(
            *listening.sockets[0].getsockname()[:2], ssl=client.client_context(), server_hostname=client.server_name
        )
        tls = writer.get_extra_info("ssl_object")
        assert tls.version() == "TLSv1.3"
        certificate = tls.getpeercert(binary_form=True)
        await reader.read()
        writer.close()
        await writer.wait_closed()
    return certificate, await found


def test_two_peers_of_one_authority_know_each_other(tmp_path: Path) -> None:
    signer = authority(tmp_path)
    one, other = (PeerTls(issue(signer, tmp_path / name)) for name in ("one", "other"))
    assert asyncio.run(shown(one, other))[1]


def test_files_that_changed_count_for_new_connections_and_broken_ones_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signer, client = authority(tmp_path), tmp_path / "client"
    peer = PeerTls(issue(signer, tmp_path / "peer"))
    asking = PeerTls(issue(signer, client))
    first, _ = asyncio.run(shown(peer, asking))
    (tmp_path / "peer" / "tls.crt").write_text("broken")
    peer.renew()
    assert "keeping the previous one" in caplog.text
    assert asyncio.run(shown(peer, asking))[0] == first
    new = authority(tmp_path, "new")  # the authority may change, too
    issue(new, tmp_path / "peer")
    peer.renew()
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(shown(peer, asking))
    issue(new, client)
    asking.renew()
    assert asyncio.run(shown(peer, asking))[0] != first


def test_while_files_are_missing_what_is_kept_of_them_is_shown(tmp_path: Path) -> None:
    signer = authority(tmp_path)
    folder = issue(signer, tmp_path / "peer")
    kept = KeptFiles(peer_files(folder), check_peer_files)
    asking = PeerTls(issue(signer, tmp_path / "client"))
    first, _ = asyncio.run(shown(PeerTls(folder), asking))
    shutil.rmtree(folder)
    kept.renew()
    assert asyncio.run(shown(PeerTls(folder, kept.copies), asking)) == (first, True)


@pytest.mark.parametrize("missing", ["ca.crt", "tls.crt", "tls.key"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = issue(authority(tmp_path), tmp_path / "peer")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=rf"^cluster\.tls: .*/{re.escape(missing)}: can't be read: No such file"):
        PeerTls(folder)


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    folder = issue(authority(tmp_path), tmp_path / "peer")
    (folder / "tls.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"^cluster\.tls: .*mode 0644; chmod 600"):
        PeerTls(folder)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    signer = authority(tmp_path)
    folder, other = issue(signer, tmp_path / "peer"), issue(signer, tmp_path / "other")
    shutil.copy(other / "tls.key", folder / "tls.key")
    with pytest.raises(ConfigError, match=r"^cluster\.tls: .*can't be used together"):
        PeerTls(folder)


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    folder = issue(authority(tmp_path), tmp_path / "peer")
    shutil.copy(authority(tmp_path, "other") / "ca.crt", folder / "ca.crt")
    with pytest.raises(ConfigError, match=r"^cluster\.tls: .*expected a certificate that .*ca\.crt has signed"):
        PeerTls(folder)


def test_what_is_no_authority_is_refused(tmp_path: Path) -> None:
    folder = issue(authority(tmp_path), tmp_path / "peer")
    (folder / "ca.crt").write_text("nothing")
    with pytest.raises(ConfigError, match=r"^cluster\.tls: .*ca\.crt: expected the authority's certificate in PEM"):
        PeerTls(folder)


def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.tls: .*peers refuse: Hostname mismatch.*headwater"):
        PeerTls(issue(authority(tmp_path), tmp_path / "peer", name="DNS:other"))


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.tls: .*peers refuse: certificate has expired"):
        PeerTls(issue(authority(tmp_path), tmp_path / "peer", days=0))


def test_a_client_of_the_authority_with_another_name_is_no_peer() -> None:
    tls = PeerTls.__new__(PeerTls)
    assert not tls.is_peer(None)
    assert not tls.is_peer({})
    assert not tls.is_peer({"subjectAltName": (("DNS", "other"), ("IP Address", "10.0.0.1"))})
    assert tls.is_peer({"subjectAltName": (("DNS", "other"), ("DNS", "headwater"))})
