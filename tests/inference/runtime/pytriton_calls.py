"""Calls what a PyTriton script binds as a replica does: ``python -m tests.inference.runtime.pytriton_calls``.

Standard input is a JSON list of calls, ``{"script", "options", "requests": [{"inputs", "parameters"}, ...]}``; printed
is a JSON list of results: the answers of the requests, which share a call, and the errors of their rows; or why the
script can't be served.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from pytriton.proxy.types import Request

from headwater.errors import LoadError
from headwater.model import Model
from headwater.replica.probe import own_output
from headwater.runtime.call_loop import CallLoop
from headwater.runtime.loader import load_model
from headwater.runtime.runner import Runner
from headwater.signature import REQUEST, Signature
from headwater.wire.report import HEADWATER, REPORT, CallNote, decode_reports

ROWS = 64


def _note(number: int, request: dict[str, Any], rows: int) -> str:
    own = json.dumps(request["parameters"]) if request.get("parameters") else ""
    note = CallNote(rows={REQUEST: [f"{number} {own}"] * rows})
    return json.dumps({"rows": note.rows})


def _call(models: dict[str, Model], call: dict[str, Any]) -> dict[str, Any]:
    try:
        model = load_model(f"pytriton:{call['script']}", call.get("options", {}))
    except LoadError as error:
        return {"reason": error.problem.reason, "fix": error.problem.fix}
    key = json.dumps([call["script"], call.get("options")])
    if key not in models:
        CallLoop().load(model, "cpu")
        models[key] = model
    model = models[key]
    signature = Signature.of(model, name="model", max_batch_size=ROWS)
    types = {tensor.name: tensor.datatype for tensor in model.inputs}
    requests = []
    for number, request in enumerate(call["requests"]):
        data = {name: _array(types[name], value) for name, value in request["inputs"].items()}
        rows = len(next(iter(data.values())))
        requests.append(Request(data, {HEADWATER: _note(number, request, rows)}))
    answers = asyncio.run(Runner(model, signature, "cpu").handle(requests))
    results: dict[str, Any] = {"answers": [], "errors": []}
    for answer in answers:
        report = answer.pop(REPORT)
        results["errors"].append([row.message for row in decode_reports(report.tobytes(), len(report)).rows])
        results["answers"].append({name: _listed(array) for name, array in answer.items()})
    return results


def _array(datatype: str, value: Any) -> Any:
    if datatype == "BYTES":
        return np.vectorize(str.encode, otypes=[object])(np.array(value, object))
    return np.array(value, {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[datatype])


def _listed(array: Any) -> Any:
    texts = np.vectorize(bytes.decode, otypes=[object])
    return (texts(array) if array.dtype == object else array).tolist()


def main() -> None:
    """Answer what is asked on standard input."""
    models: dict[str, Model] = {}
    calls = json.load(sys.stdin)
    with own_output() as output:
        output.write(json.dumps([_call(models, call) for call in calls]).encode())
    for model in models.values():
        model.unload()


if __name__ == "__main__":
    main()
