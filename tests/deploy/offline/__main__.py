"""``python -m tests.deploy.offline``: install an offline folder or archive without a network, and serve `scale`.

`make offline-test` runs it, on what `make offline` has built.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

MODEL: Final = "headwater.zoo.scale:Scale"
BODY: Final = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
EXPECTED: Final = [2.0, 4.0, 6.0]
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
# Nothing answers there: whatever asked an index or went through a proxy would fail.
NOWHERE: Final = "http://127.0.0.1:9"


def environment(folder: Path) -> dict[str, str]:
    """One in which no index is reached, and nothing of this checkout is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "HEADWATER_"))}
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    pip = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": NOWHERE, "PIP_CONFIG_FILE": os.devnull}
    return {**kept, **proxies, **pip, "NO_PROXY": "127.0.0.1", "HOME": str(folder), "PYTHONUNBUFFERED": "1"}


def serve(headwater: Path, folder: Path) -> float:
    """Serve the model, ask it, and end it. Returns the seconds until it answered."""
    log = folder / "log"
    started = time.monotonic()
    with log.open("w") as output:
        command = [str(headwater), "serve", MODEL, "--port", "0"]
        process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=output, stderr=output)
    try:
        while time.monotonic() - started < START_TIMEOUT_S and process.poll() is None:
            if url := re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text()):
                with contextlib.suppress(OSError):
                    ask(url[0])
                    return time.monotonic() - started
            time.sleep(0.1)
        sys.exit(f"tests.deploy.offline: expected an answer within {START_TIMEOUT_S:g} s, got none:\n{log.read_text()}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)


def ask(url: str) -> None:
    """Ask the model once."""
    request = urllib.request.Request(
        f"{url}/v2/models/scale/infer", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as response:
        data = json.load(response)["outputs"][0]["data"]
    if data != EXPECTED:
        sys.exit(f"tests.deploy.offline: expected {EXPECTED}, got {data}")


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.offline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "what", type=Path, nargs="*", help="the folder, or a part of the archive; default: the newest in dist"
    )
    parser.add_argument("--python", default="", help="the machine's; default: the one that install.sh finds")
    options = parser.parse_args()
    built = sorted(Path("dist").glob("headwater-*-offline-*"), key=lambda path: path.stat().st_mtime)
    what: Path | None = next(iter([*options.what, *reversed(built)]), None)
    if what is None:
        sys.exit("tests.deploy.offline: expected a folder in dist, found none. Build one: make offline")
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder, source = Path(name), what.resolve()
        if source.is_file():
            parts = sorted(source.parent.glob(f"{source.stem}.*"), key=lambda part: int(part.suffix[1:]))
            whole = io.BytesIO(b"".join(part.read_bytes() for part in parts))
            with tarfile.open(fileobj=whole) as archive:
                archive.extractall(folder)
            (source,) = folder.iterdir()
        python = ["--python", options.python] if options.python else []
        command = [source / "install.sh", *python, folder / "installed"]
        subprocess.run(command, env=environment(folder), check=True)
        took_s = serve(folder / "installed" / "bin" / "headwater", folder)
        print(f"{what.name}: {MODEL} answered {took_s:.1f} s after the start")


if __name__ == "__main__":
    main()
