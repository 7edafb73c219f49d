"""Certificates of a cluster, made with openssl: an authority, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["authority", "issue"]

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def authority(folder: Path, name: str = "ca") -> Path:
    """A folder with an authority's certificate and key."""
    made = folder / name
    made.mkdir()
    _openssl(
        "req", "-x509", *_KEY, "-subj", f"/CN={name}", "-days", "2",
        "-keyout", str(made / "ca.key"), "-out", str(made / "ca.crt"),
    )  # fmt: skip
    return made


def issue(signer: Path, folder: Path, *, name: str = "DNS:headwater", days: int = 2) -> Path:
    """Fill a folder as a Kubernetes secret is mounted, with a certificate for this name that the authority signed."""
    folder.mkdir(exist_ok=True)
    request, extensions = folder / "request", folder / "extensions"
    _openssl("req", *_KEY, "-subj", "/CN=peer", "-keyout", str(folder / "tls.key"), "-out", str(request))
    extensions.write_text(f"subjectAltName={name}\n")
    _openssl(
        "x509", "-req", "-in", str(request), "-CA", str(signer / "ca.crt"), "-CAkey", str(signer / "ca.key"),
        "-CAcreateserial", "-days", str(days), "-extfile", str(extensions), "-out", str(folder / "tls.crt"),
    )  # fmt: skip
    (folder / "tls.key").chmod(0o600)
    shutil.copy(signer / "ca.crt", folder / "ca.crt")
    return folder


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
