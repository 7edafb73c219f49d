"""The certificate of a server, and its key."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from headwater_server.config.sections import Tls
from headwater_server.errors import ConfigError
from headwater_server.security.kept_files import KeptFiles
from headwater_server.security.tls import Certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


def make(folder: Path, name: str, *arguments: str) -> Tls:
    """A key, and a certificate that it signed itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}",
         "-days", "2", "-keyout", str(key), "-out", str(certificate), *(arguments or ("-nodes",))],
        check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
    return Tls(certificate=certificate, key=key)


async def shown_name(certificate: Certificate) -> bytes:
    """What a client of a server with it is shown."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=certificate.context) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2], ssl=client)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert isinstance(shown, bytes)
    return shown


async def test_a_new_certificate_is_shown_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = make(tmp_path, "first")

    certificate = Certificate(section)
    assert b"first" in await shown_name(certificate)
    section.certificate.write_text("broken")
    certificate.renew()
    assert "keeping the previous one" in caplog.text
    assert b"first" in await shown_name(certificate)
    second = make(tmp_path, "second")
    second.certificate.replace(section.certificate)
    second.key.replace(section.key)
    certificate.renew()
    assert b"second" in await shown_name(certificate)


def test_while_the_files_are_missing_or_broken_what_is_kept_of_them_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = make(tmp_path, "first")
    kept = KeptFiles(
        [section.certificate, section.key], lambda paths: Certificate(Tls(certificate=paths[0], key=paths[1]))
    )
    certificate, key = paths = kept.copies
    make(tmp_path, "second").certificate.replace(section.certificate)
    kept.renew()  # the key is another one's
    for content in (b"broken", None):
        section.certificate.unlink()
        if content is not None:
            section.certificate.write_bytes(content)
        kept.renew()
        started = Certificate(section, Tls(certificate=certificate, key=key))
        assert "first" in asyncio.run(shown_name(started)).decode("latin-1")
        assert "using the previous one: server.tls" in caplog.text
    third = make(tmp_path, "third")
    third.certificate.replace(section.certificate)
    third.key.replace(section.key)
    kept.renew()
    assert kept.copies == paths
    assert b"third" in asyncio.run(shown_name(Certificate(Tls(certificate=certificate, key=key))))


def test_a_fifo_in_place_of_a_file_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    section = make(tmp_path, "one")
    section.key.unlink()
    os.mkfifo(section.key, 0o600)
    with pytest.raises(ConfigError, match=r"server\.tls\.key: .*one\.key: expected a regular file"):
        Certificate(section)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    one, other = make(tmp_path, "one"), make(tmp_path, "other")
    for certificate, key, named in (
        (tmp_path / "none", one.key, r"server\.tls\.certificate: .*none: can't be read"),
        (one.certificate, tmp_path / "none", r"server\.tls\.key: .*none: can't be read"),
        (one.certificate, other.key, "can't be used together"),
        (one.key, one.key, "can't be used together"),
    ):
        with pytest.raises(ConfigError, match=named):
            Certificate(Tls(certificate=certificate, key=key))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666])
def test_a_private_key_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    section = make(tmp_path, "one")
    section.key.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}; chmod 600"):
        Certificate(section)


def test_a_group_may_read_it(tmp_path: Path) -> None:
    section = make(tmp_path, "one")
    section.key.chmod(0o640)
    assert Certificate(section).context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_passphrase_is_asked_of_nobody(tmp_path: Path) -> None:
    section = make(tmp_path, "one", "-passout", "pass:secret")
    with pytest.raises(ConfigError, match="without a passphrase"):
        Certificate(section)
