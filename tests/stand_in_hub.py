"""A stand-in for the Hugging Face hub: serves a folder as the model `NAME`, to huggingface_hub's own downloads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Serve a folder's files; the hub's URL, for the variable HF_ENDPOINT."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *of_request: object) -> None:
            """Write no log."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, content, tag = 200, b"", "none"
            if path == f"/api/models/{NAME}/revision/main":
                content = json.dumps(
                    {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                ).encode()
            elif path == f"/api/models/{NAME}/tree/{COMMIT}":
                sizes = {name: file.stat().st_size for name, file in files.items()}
                tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
                content = json.dumps(tree).encode()
            elif (file := files.get(path.removeprefix(f"/{NAME}/resolve/{COMMIT}/"))) is not None:
                content = file.read_bytes()
                tag = hashlib.sha1(content).hexdigest()
            else:
                status = 404
            self.send_response(status)
            for header, value in (
                ("X-Repo-Commit", COMMIT),
                ("ETag", f'"{tag}"'),
                ("Content-Length", str(len(content))),
            ):
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
