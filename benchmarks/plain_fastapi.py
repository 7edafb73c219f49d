"""A ceiling: FastAPI on uvicorn, the same body in and out, no inference behind it.

``python -m benchmarks.plain_fastapi PORT``.
"""

from __future__ import annotations

import sys

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

app = FastAPI()


@app.post("/v2/models/scale/infer")
async def infer(request: Request) -> Response:
    """Double the one input, here in the gateway's own process."""
    tensor = orjson.loads(await request.body())["inputs"][0]
    doubled = [value * 2 for value in tensor["data"]]
    output = {"name": "y", "datatype": "FP32", "shape": tensor["shape"], "data": doubled}
    return Response(
        orjson.dumps({"model_name": "scale", "model_version": "1", "outputs": [output]}),
        media_type="application/json",
    )


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False, log_level="warning")
