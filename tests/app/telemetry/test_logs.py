"""The log and the access log: one line an event, in UTC, with nothing in it that a client sent unless asked for."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import headwater_server.errors
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Server
from headwater_server.config.sections import LogFormat
from headwater_server.errors import BadRequest, CallableFailed, ConfigError, HeadwaterError, QueueFull, Unavailable
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from headwater_server.telemetry.logs import FLUSH_AFTER_S, REPLICA_LOGGER, AccessLog, json_line, set_up_logging, utc

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z")
SECRET = "the prompt \u2028 nobody shall read"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def logged(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, log_format: LogFormat = "auto") -> None:
    monkeypatch.setattr("sys.stderr", stream)
    set_up_logging(log_format)
    logging.getLogger("headwater").info(
        "model %s: ready", "scale", extra={"request_id": "r 1", "rows": 3, "_added_by_a_library": 1}
    )
    logging.getLogger(REPLICA_LOGGER).info("%s", "loading\u2028 weights", extra={"replica": "scale-1"})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("headwater").exception("it failed")


class TestLog:
    def test_json_where_nobody_reads_along(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = io.StringIO()
        logged(monkeypatch, stream)
        ready, replica, failed = map(json.loads, stream.getvalue().split("\n")[:-1])
        assert TIME.match(ready.pop("time"))
        assert ready == {
            "level": "info", "logger": "headwater", "message": "model scale: ready", "request_id": "r 1", "rows": 3,
        }  # fmt: skip
        assert (replica["logger"], replica["replica"], replica["message"]) == (
            "headwater.replica", "scale-1", "loading\u2028 weights",
        )  # fmt: skip
        assert failed["level"] == "error"
        assert failed["exception"].endswith("ValueError: two\nlines")

    def test_for_people_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = Terminal()
        logged(monkeypatch, stream)
        ready, replica, failed, *trace = stream.getvalue().split("\n")
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}Z model scale: ready request_id='r 1' rows=3", ready)
        assert re.fullmatch(r"\S+Z scale-1 \| loading\u2028 weights", replica)
        assert re.fullmatch(r"\S+Z ERROR it failed", failed)
        assert trace[0].startswith("Traceback")

    @pytest.mark.parametrize(
        ("stream", "log_format", "is_json"), [(Terminal(), "json", True), (io.StringIO(), "human", False)]
    )
    def test_the_configuration_decides(
        self, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, log_format: LogFormat, is_json: bool
    ) -> None:
        logged(monkeypatch, stream, log_format)
        assert stream.getvalue().startswith("{") is is_json

    def test_the_time_is_utc(self) -> None:
        assert utc(0) == "1970-01-01T00:00:00.000Z"
        assert utc(1767323045.678) == "2026-01-02T03:04:05.678Z"

    def test_what_is_no_sound_text_is_logged_all_the_same(self) -> None:
        assert json.loads(json_line({"path": "a\udcff", "error": ValueError("x")})) == {
            "path": "a\\udcff",
            "error": "x",
        }

    def test_a_format_that_there_is_not(self) -> None:
        content = {"server": {"log_format": "xml"}, "deployments": {"a": {"model": "m:C"}}}
        with pytest.raises(ConfigError, match=r"server.log_format.*'human'.*got 'xml'"):
            read_config(content, source="test", environment={}, flags={})


def access_lines(state: dict[str, Any], *, human: bool = False, payloads: bool = False, path: str = "/v2/x") -> str:
    stream = Terminal() if human else io.StringIO()
    log = AccessLog(stream, payloads=payloads)
    scope = {"method": "POST", "path": path, "client": ("10.0.0.1", 5), "query_string": b"q=" + SECRET.encode()}

    async def write() -> None:
        log.write(scope, 400, 0.0123, {"request_id": "r1", **state})
        log.flush()

    asyncio.run(write())
    return stream.getvalue()


class TestAccessLog:
    def test_a_line(self) -> None:
        line = json.loads(access_lines({"note": "tokens=3+4", "log_fields": {"trace_id": "t"}}))
        assert TIME.match(line.pop("time"))
        assert line == {
            "level": "info", "logger": "access", "message": "POST /v2/x 400", "method": "POST", "path": "/v2/x",
            "status": 400, "ms": 12.3, "client": "10.0.0.1", "note": "tokens=3+4", "request_id": "r1", "trace_id": "t",
        }  # fmt: skip

    def test_a_line_of_nothing_but_what_every_request_has(self) -> None:
        line = json.loads(access_lines({}))
        assert TIME.match(line.pop("time"))
        assert line == {
            "level": "info", "logger": "access", "message": "POST /v2/x 400", "method": "POST", "path": "/v2/x",
            "status": 400, "ms": 12.3, "client": "10.0.0.1", "note": "", "request_id": "r1",
        }  # fmt: skip
        assert json.loads(access_lines({"note": "a\udcff"}))["note"] == "a\\udcff"

    def test_for_people(self) -> None:
        line = access_lines({"note": "streamed", "log_fields": {"trace_id": "t"}}, human=True)
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}Z POST /v2/x 400 12\.3 ms streamed r1 trace_id=t\n", line)

    @pytest.mark.parametrize("human", [False, True])
    @pytest.mark.parametrize("error", [BadRequest, CallableFailed])
    def test_what_a_client_sent_is_logged_only_if_asked_for(self, error: type[HeadwaterError], human: bool) -> None:
        state = {"error": error(f"x: expected numbers, got {SECRET!r}")}
        assert "nobody" not in access_lines(state, human=human)
        assert error.__name__ in access_lines(state, human=human)
        assert "nobody" in access_lines(state, human=human, payloads=True)

    @pytest.mark.parametrize("error", [QueueFull, Unavailable])
    def test_what_only_we_can_have_said_is_logged(self, error: type[HeadwaterError]) -> None:
        assert json.loads(access_lines({"error": error("queue: full")}))["error"] == "queue: full"

    def test_an_error_of_a_new_kind_is_taken_to_quote(self) -> None:
        quoting = {
            name
            for name in headwater_server.errors.__all__
            if getattr(getattr(headwater_server.errors, name), "may_quote", False)
        }
        assert {"HeadwaterError", "BadRequest", "NotFound", "CallableFailed", "UnsupportedMediaType"} <= quoting

    @pytest.mark.parametrize("human", [False, True])
    def test_a_path_forges_no_line(self, human: bool) -> None:
        line = access_lines({}, human=human, path='/v2/x\n{"status": 200}\x1b[2J\u202e')
        assert line.count("\n") == 1
        assert not {"\x1b", "\u202e"} & set(line)

    async def test_a_request_through_the_gateway(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        gateway = create_app(Models(), Server())

        async def written() -> None:
            while not stream.getvalue():  # noqa: ASYNC110 - a timer writes it
                await asyncio.sleep(0.01)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://test") as client:
            body = {"inputs": [SECRET], "key": SECRET}
            answer = await client.post("/v2/models/none/infer", json=body, headers={"X-Request-Id": "mine"})
            assert answer.status_code == 404
        await asyncio.wait_for(written(), 20 * FLUSH_AFTER_S + 5)
        line = json.loads(stream.getvalue())
        assert (line["request_id"], line["error"], line["status"]) == ("mine", "NotFound", 404)
        assert "nobody" not in stream.getvalue()
