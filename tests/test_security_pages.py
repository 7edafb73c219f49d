"""SECURITY.md and docs/security.md name a test for each promise, and the bounds that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.engine import MAX_GRAMMAR
from headwater.hf.images import MOST_PIXELS
from headwater.hf.speech import LEAST_RATE, MOST_RATE, MOST_SAMPLES, MOST_SECONDS
from headwater.lm.compile_queue import LANES
from headwater.lm.grammar_wire import COMPILE_BYTES, FOLLOW_BYTES, MASK_CPU_S, TOKEN_CPU_S
from headwater.lm.grammars import KEPT, KEPT_BYTES, MASK_WAIT_S, MOST_BYTES, MOST_WAITING
from headwater_server.cluster.port import MOST_CONNECTIONS
from headwater_server.cluster.port_connection import MOST_JSON_BYTES
from headwater_server.cluster.request_head import MOST_HEAD_BYTES
from headwater_server.codecs.faults import MAX_CONTAINERS, MAX_VALUES
from headwater_server.codecs.memory import MOST_TIMES
from headwater_server.codecs.multipart import MAX_HEAD_BYTES, MAX_PARTS
from headwater_server.config.overlay import MAX_CONFIG_BYTES, MAX_DEPTH, MAX_KEYS
from headwater_server.control.control_server import HELLO_TIMEOUT_S
from headwater_server.control.messages import MAX_MESSAGE_BYTES
from headwater_server.gateway.http.body_budget import ALL_BODIES_BYTES, SMALL_BYTES
from headwater_server.gateway.http.connections import SPARE_PLACES
from headwater_server.gateway.http.entry import MAX_HEADER_BYTES
from headwater_server.gateway.http.tls_handshake import HANDSHAKE_TIMEOUT_S
from headwater_server.gateway.worker import IDLE_TIMEOUT_S
from headwater_server.lm.grammar_depth import MOST_DEPTH
from headwater_server.lm.text.chat_template import MAX_CHARACTERS, MAX_SECONDS
from headwater_server.lm.text_pool import MAX_WAITING_BYTES, SHORT_BYTES
from headwater_server.lm.tokenize_body import MAX_TOKENS
from headwater_server.security.keys import MAX_KEY_BYTES
from headwater_server.supervisor.preflight import VANISHED_AFTER_MS

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[1]
THREATS, PAGE = ((ROOT / name).read_text() for name in ("SECURITY.md", "docs/security.md"))
SECTIONS = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
READERS = THREATS.partition("## What reads clients' bytes")[2]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize("text", [THREATS, PAGE], ids=["SECURITY.md", "docs/security.md"])
def test_each_file_that_is_named_is_there(text: str) -> None:
    names = re.findall(r"`((?:tests|app|inference)/[^`]+)`", text)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_each_section_names_its_tests(section: str) -> None:
    assert re.search(r"`tests/\S+`|tests/fuzz", section)


def test_each_reader_of_clients_bytes_has_a_bound_and_names_its_test() -> None:
    rows = [line.strip("| ").split(" | ") for line in READERS.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 18
    for reader, bound, test in rows:
        assert bound, reader
        assert "`tests/" in test, reader


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PAGE, f"{SPARE_PLACES} places more for each worker"),
        (PAGE, f"| a TLS handshake | {HANDSHAKE_TIMEOUT_S:g} s"),
        (PAGE, f"| a request's line and headers | {MAX_HEADER_BYTES // KIB} KiB"),
        (PAGE, f"| all bodies together | {ALL_BODIES_BYTES // GIB} GiB"),
        (PAGE, f"Bodies over {SMALL_BYTES // KIB} KiB may use three quarters"),
        (PAGE, f"{MAX_CONTAINERS:,} keys, objects and arrays, and {MAX_VALUES:,} values"),
        (PAGE, f"at most {MOST_TIMES} times its size"),
        (PAGE, f"bodies up to {SHORT_BYTES // KIB} KiB have threads of their own"),
        (PAGE, f"{MAX_WAITING_BYTES // MIB} MiB of its bodies may wait"),
        (PAGE, f"{MAX_TOKENS:,} tokens"),
        (PAGE, f"60 to {VANISHED_AFTER_MS // 1000} s, also while its request computes"),
        (PAGE, f"{MAX_GRAMMAR:,} characters; {MOST_DEPTH}"),
        (PAGE, f"{MAX_SECONDS:g} s of CPU time, {MAX_CHARACTERS:,}"),
        (PAGE, f"too long one ({MAX_KEY_BYTES} bytes)"),
        (PAGE, f"| a connection without a request | {IDLE_TIMEOUT_S} s"),
        (PAGE, f"| {MOST_PIXELS:,} pixels |"),
        (PAGE, f"{LEAST_RATE:,} to {MOST_RATE:,} samples a second; {MOST_SECONDS:,} seconds"),
        (PAGE, f"2^{MOST_SAMPLES.bit_length() - 1} samples of all channels"),
        (PAGE, f"| {sum(lane.cpu_s for lane in LANES):g} s of processor time, {COMPILE_BYTES // MIB} MiB;"),
        (PAGE, f"at most {MOST_WAITING} waiting"),
        (PAGE, f"| {MASK_CPU_S:g} s of processor time, {TOKEN_CPU_S:g} s on average; the answer {FOLLOW_BYTES // MIB}"),
        (PAGE, f"| {MOST_BYTES // GIB} GiB beside the processes themselves"),
        (PAGE, f"{KEPT} grammars that no answer follows, {KEPT_BYTES // MIB} MiB"),
        (PAGE, f"waits at most {MASK_WAIT_S:g} s"),
        (READERS, f"{MAX_PARTS} parts, {MAX_HEAD_BYTES // KIB} KiB for a part's head"),
        (READERS, f"{MAX_CONFIG_BYTES:,} characters, {MAX_DEPTH} levels, {MAX_KEYS:,} fields beside `options`"),
        (READERS, f"{MAX_MESSAGE_BYTES // MIB} MiB each; a gateway's token comes first, within {HELLO_TIMEOUT_S:g} s"),
        (READERS, f"{MOST_CONNECTIONS:,} connections; a head {MOST_HEAD_BYTES // KIB} KiB"),
        (READERS, f"{MOST_JSON_BYTES // MIB} MiB of a call's JSON"),
    ],
)
def test_bounds_are_those_of_the_code(text: str, told: str) -> None:
    assert told in " ".join(text.split())
