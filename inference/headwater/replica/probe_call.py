"""The call with which a replica's guardian checks whether the replica answers; see `headwater_server.process.probe`."""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from headwater.datatypes import DATATYPES
from headwater.signature import Signature
from headwater.wire.report import HEADWATER, REPORT, CallNote
from headwater.wire.shared_memory import stand_in_shape

__all__ = ["PROBE_FILE", "probe_request", "write_probe"]

PROBE_FILE: Final = "probe"
"""Name of the request's file in the replica's folder."""
HTTP_SOCKET: Final = "h"
"""Name of Triton's HTTP socket in the replica's folder."""


def probe_request(signature: Signature, token: str) -> bytes:
    """A complete HTTP request to Triton, which the runner answers without calling the model.

    Args:
        signature: the signature of a model that doesn't answer in frames.
        token: the access token that Triton's requests must carry.
    """
    inputs, data = [], []
    for spec in signature.inputs:
        if spec.optional:
            continue
        datatype, shape = DATATYPES[spec.datatype], stand_in_shape(spec, 1)
        data.append(bytes(math.prod(shape) * (datatype.size_bytes or 4)))  # BYTES: an empty element, four zero bytes
        size = {"binary_data_size": len(data[-1])}
        inputs.append({"name": spec.name, "datatype": datatype.wire, "shape": shape, "parameters": size})
    note = msgspec.json.encode(CallNote(cancel="-")).decode()
    outputs = [{"name": REPORT, "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs, "parameters": {HEADWATER: note}}).encode()
    body = b"".join((head, *data))
    lines = (
        f"POST /v2/models/{signature.name}/infer HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(body)}",
        f"triton-access-token: {token}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


def write_probe(directory: Path, signature: Signature, token: str, timeout_s: float) -> None:
    """Write the request to a replica's folder, if the replica answers it with status 200 within ``timeout_s`` seconds.
    Without the file, the guardian doesn't probe: a replica must not be ended for a request that its model never
    answers. Models that answer in frames are not probed, because they take gRPC."""
    if signature.is_framed:
        return
    request = probe_request(signature, token)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(directory / HTTP_SOCKET))
            connection.sendall(request)
            line = connection.makefile("rb").readline().decode("latin-1").strip()
        if line.split(" ")[1:2] != ["200"]:
            raise OSError(line or "the connection was closed")
    except OSError as error:
        print(f"the guardian can't see whether this replica answers: {error}", file=sys.stderr, flush=True)
        return
    fresh = directory / f"{PROBE_FILE}.new"
    fresh.touch(mode=0o600)
    fresh.write_bytes(request)
    # Renamed atomically: the guardian may read the file at any time, and a partial request gets no answer.
    fresh.rename(directory / PROBE_FILE)
