"""The log's queue: nobody waits for a reader, and what is lost is counted."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from headwater_server.telemetry.instruments import Counter
from headwater_server.telemetry.ledger import read_totals
from headwater_server.telemetry.log_output import LogOutput, never_blocking
from headwater_server.telemetry.observer import Observer
from headwater_server.telemetry.recorder import use
from headwater_server.telemetry.store import SeriesKey, Store, read_store
from tests.running import wait_for

LINE = "x" * 99 + "\n"


class Pipe(NamedTuple):
    """A pipe of 4 KiB, of which nobody reads, and the output that writes to it."""

    read: IO[bytes]
    output: LogOutput


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, 4096)
    output = LogOutput(write_fd, queue_bytes=50_000)
    with open(read_fd, "rb") as read:
        yield Pipe(read, output)
    output.finish(60)  # without a reader the rest is dropped at once
    os.close(write_fd)


def has_dropped(pipe: Pipe, lines: int) -> bool:
    return pipe.output.dropped == lines


def read_all(pipe: Pipe, until: bytes) -> bytes:
    """Read until some bytes have come."""
    data = b""
    while until not in data:
        data += os.read(pipe.read.fileno(), 65536)
    return data


def test_nobody_waits_for_a_reader_that_stalls(pipe: Pipe) -> None:
    for _ in range(100_000):  # 10 MB
        pipe.output.write(LINE)
    assert pipe.output.dropped >= 99_400  # all but the pipe and the queue
    pipe.output.finish(timeout_s=0)


def test_what_is_written_is_whole_and_what_is_missing_is_counted(pipe: Pipe, tmp_path: Path) -> None:
    handler = logging.StreamHandler(pipe.output)
    logger = logging.getLogger("headwater")
    logger.addHandler(handler)
    Store.create(tmp_path / "counts")
    pipe.output.on_dropped(Counter(Store(tmp_path / "counts"), "headwater_log_lines_dropped").add)
    try:
        for _ in range(5000):
            pipe.output.write(LINE)
        lines = read_all(pipe, b"the log lacks").decode().splitlines()
    finally:
        logger.removeHandler(handler)
    *written, told = lines
    assert set(written) == {LINE.rstrip()}
    missing = 5000 - len(written)
    assert told.startswith(f"the log lacks {missing} lines here")
    assert pipe.output.dropped == missing
    assert read_store(tmp_path / "counts").records[SeriesKey("headwater_log_lines_dropped", ())] == [missing]
    pipe.output.write("after\n")
    assert read_all(pipe, b"after\n") in (b"after\n", b"\nafter\n")


def test_lines_are_counted_once_when_the_counts_are_made_again(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dropped() -> list[int]:
        return read_totals(tmp_path / "metrics").records[SeriesKey("headwater_log_lines_dropped", ())]

    monkeypatch.setattr("sys.stderr", pipe.output)
    too_long = "x" * 10_000_000 + "\n"
    try:
        pipe.output.write(too_long)
        observer = Observer(tmp_path / "metrics")
        pipe.output.write(too_long)
        assert dropped() == [2]
        shutil.rmtree(tmp_path / "metrics")
        observer.restore()
        assert dropped() == [2]
        pipe.output.write(too_long)
        assert dropped() == [3] == [pipe.output.dropped]
    finally:
        use(Store())


def test_lines_of_several_threads_stay_whole(pipe: Pipe) -> None:
    threads = [threading.Thread(target=lambda: [pipe.output.write(LINE) for _ in range(40)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    data = b""
    while len(data) < 320 * len(LINE):
        data += os.read(pipe.read.fileno(), 65536)
    assert data == LINE.encode() * 320
    assert pipe.output.dropped == 0


def test_a_pipe_that_does_not_block_gets_all(pipe: Pipe) -> None:
    os.set_blocking(pipe.output.fileno(), False)
    for _ in range(300):
        pipe.output.write(LINE)
    data = b""
    while len(data) < 300 * len(LINE):
        data += os.read(pipe.read.fileno(), 65536)
    assert data == LINE.encode() * 300


def test_only_what_was_not_written_counts_as_missing(pipe: Pipe) -> None:
    pipe.output.write(LINE * 400)
    assert pipe.read.read(50 * len(LINE)) == LINE.encode() * 50
    pipe.read.close()
    wait_for(lambda: pipe.output.dropped > 0, 10, "the rest to be dropped")
    assert pipe.output.dropped <= 350


def test_a_reader_that_is_gone_is_no_reason_to_stop(pipe: Pipe) -> None:
    pipe.read.close()
    for count in range(1, 4):
        pipe.output.write(LINE)
        wait_for(functools.partial(has_dropped, pipe, count))


def test_only_a_stream_with_a_file_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert never_blocking(sys.stderr) is sys.stderr  # pytest's, in memory


@pytest.mark.slow
@pytest.mark.parametrize("is_read", [True, False])
def test_a_process_ends_with_all_that_it_logged_and_waits_for_no_reader(is_read: bool) -> None:
    script = (
        "import logging; from headwater_server.telemetry.logs import set_up_logging; set_up_logging('json')\n"
        f"[logging.info('line %d', number) for number in range({100 if is_read else 10_000})]\n"
        "raise SystemExit('the end')"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        if not is_read:
            assert process.wait(60) == 1
            return
        lines = process.stderr.read().splitlines()
    assert [line.partition('"message":')[2] for line in lines[:-1]] == [f'"line {number}"}}' for number in range(100)]
    assert lines[-1] == "the end"
