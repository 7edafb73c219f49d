"""What PyTriton imports without its clients. After an upgrade of PyTriton this fails before a binder does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from pathlib import Path
from headwater_server.binder.pytriton_clients import leave_out_clients
leave_out_clients()
from headwater_server.binder.embedded_triton import EmbeddedTriton
EmbeddedTriton(Path(sys.argv[1]), "token").command()
print(*sorted({"aiohttp", "gevent", "geventhttpclient"} & sys.modules.keys()), "PyTriton works")
"""


@pytest.mark.slow
def test_pytriton_works_without_the_packages_of_its_clients(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("PyTriton works", 0), done.stderr
