"""The calls of a warm-up, against a server in place of Triton."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ModelUnfit, ReplicaError
from headwater.signature import Signature, TensorSpec
from headwater.wire.handshake import ReplicaSpec, WarmUpRequest
from headwater.wire.report import RowReport, Status, encode_reports
from headwater_server.binder import warmup

SPEC = ReplicaSpec("m", "a:B", "token", (), ".")
INPUT = TensorSpec("x", "FP32", (3, -1), dimensions=("", "width"))
SIGNATURE = Signature("m", (INPUT,), (TensorSpec("y", "FP32", (1,)),), max_batch_size=8)
Answer = Callable[[int], RowReport]


class Triton:
    """A server on a unix socket that reports on the rows of each call."""

    def __init__(self, folder: Path) -> None:
        self.http_socket = str(folder / "h")
        self.answer: Answer = lambda rows: RowReport(Status.OK)
        self.rows: list[int] = []
        """The number of rows of each call."""

    def warm_up(self, signature: Signature, sizes: list[int], *, skips_slow: bool = False) -> list[tuple[str, str]]:
        """Warm up, and return what was reported."""
        reported: list[tuple[str, str]] = []
        triton: Any = self
        request = WarmUpRequest(signature, sizes, skips_slow)
        warmup.warm_up(request, triton, SPEC, lambda event, text: reported.append((event, text)))
        return reported


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[Triton]:
    served = Triton(tmp_path)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            head = json.loads(body[: int(self.headers["Inference-Header-Content-Length"])])
            rows = head["inputs"][0]["shape"][0]
            served.rows.append(rows)
            reports = encode_reports([served.answer(rows)] * rows, 1).tobytes()
            self.send_response(200)
            self.send_header("Inference-Header-Content-Length", "2")
            self.send_header("Content-Length", str(2 + len(reports)))
            self.end_headers()
            self.wfile.write(b"{}" + reports)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with socketserver.ThreadingUnixStreamServer(served.http_socket, Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield served
        server.shutdown()


def test_each_size_is_called_and_reported(triton: Triton) -> None:
    assert triton.warm_up(SIGNATURE, [1, 2, 8]) == [
        ("progress", "warming up, batch of 1 (1/3)"),
        ("progress", "warming up, batch of 2 (2/3)"),
        ("progress", "warming up, batch of 8 (3/3)"),
    ]
    assert triton.rows == [1, 2, 8]


@pytest.mark.parametrize("status", [Status.RAISED, Status.BAD_INPUT, Status.BAD_OUTPUT])
def test_a_failure_with_invented_values_is_a_warning(triton: Triton, status: Status) -> None:
    triton.answer = lambda rows: RowReport(status, "Fail: not so")
    (_, (event, text)) = triton.warm_up(SIGNATURE, [1, 2])
    assert event == "warning"
    assert text == (
        "served without a warm-up, so the first requests take longer. warm-up with a batch of 1: Fail: not so. "
        "The values tried were invented: `x` zeros of shape [3, 1]; if the model can't take them, give it an example: "
        "`example` in its class, `options.example` for a file or function, or the sizes of dimensions: `options.sizes` "
        "with width"
    )
    assert triton.rows == [1]


def test_a_failure_with_the_models_example_fails_the_start(triton: Triton) -> None:
    signature = Signature("m", (INPUT,), SIGNATURE.outputs, example={"x": [[1.0, 2.0]] * 3})
    triton.answer = lambda rows: RowReport(Status.BAD_INPUT, "not so")
    with pytest.raises(ModelUnfit, match=r"^warm-up with a batch of 1: not so$"):
        triton.warm_up(signature, [1, 2])


@pytest.mark.parametrize("status", [Status.BROKEN, Status.OUT_OF_MEMORY])
def test_a_failure_that_no_values_cause_fails_the_start(triton: Triton, status: Status) -> None:
    triton.answer = lambda rows: RowReport(status, "no memory")
    with pytest.raises(ReplicaError, match="warm-up with a batch of 1: no memory"):
        triton.warm_up(SIGNATURE, [1])


@pytest.mark.parametrize(("skips_slow", "called"), [(True, [1, 2, 4]), (False, [1, 2, 4, 8, 16])])
def test_sizes_that_would_take_long_are_left_out(
    triton: Triton, monkeypatch: pytest.MonkeyPatch, skips_slow: bool, called: list[int]
) -> None:
    now_s = [0.0]

    def answer(rows: int) -> RowReport:
        now_s[0] += rows * 1.0
        return RowReport(Status.OK)

    triton.answer = answer
    monkeypatch.setattr(warmup, "time", Clock(now_s))
    reported = triton.warm_up(SIGNATURE, [1, 2, 4, 8, 16], skips_slow=skips_slow)
    assert triton.rows == called
    if skips_slow:
        assert reported[-1] == ("progress", "warming up, batches of 8 and more left out: each would take 8 s")


class Clock:
    """In place of the module ``time``."""

    def __init__(self, now_s: list[float]) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        return self._now_s[0]
