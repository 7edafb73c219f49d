"""A peer: the same callable bound with PyTriton as its documentation shows, served by Triton's own HTTP.

``python -m benchmarks.bare_pytriton PORT [MODULE:CLASS DEVICE OPTIONS MAX_BATCH_SIZE]``: the shipped ``scale`` on the
CPU, or another model with options as JSON. Dynamic batching is on, with the batch size that the gateway has.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

from benchmarks.local_triton import local_triton
from headwater.datatypes import DATATYPES
from headwater.runtime.loader import load_model
from headwater.signature import Signature
from headwater.wire.arrays import argument, wire


def main() -> None:
    """Serve until SIGINT."""
    port = int(sys.argv[1])
    reference, device, options, size = sys.argv[2:] or ("headwater.zoo.scale:Scale", "cpu", "{}", "64")
    max_batch_size = int(size)
    model = load_model(reference, json.loads(options))
    model.load(device)
    name = reference.rpartition(":")[2].lower()
    signature = Signature.of(model, name=name, max_batch_size=max_batch_size)

    @batch  # type: ignore[untyped-decorator]  # PyTriton carries no types
    def infer(**inputs: Any) -> Any:
        rows = len(next(iter(inputs.values())))
        given = {
            spec.name: argument(spec, inputs[spec.name], model.arrays, device)
            for spec in signature.inputs
            if spec.name in inputs
        }
        answer = model(**given)
        return {spec.name: wire(spec, answer[spec.name], rows) for spec in signature.outputs}

    def tensors(specs: Any) -> list[Any]:
        return [
            Tensor(name=one.name, dtype=DATATYPES[one.datatype].numpy.type, shape=one.shape, optional=one.optional)
            for one in specs
        ]

    with local_triton(port) as triton:
        triton.bind(
            model_name=name,
            infer_func=infer,
            inputs=tensors(signature.inputs),
            outputs=tensors(signature.outputs),
            config=ModelConfig(max_batch_size=max_batch_size, batcher=DynamicBatcher()),
        )
        triton.serve()


if __name__ == "__main__":
    main()
