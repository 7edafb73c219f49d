"""Writes the linear head of the digits network as an ONNX file: ``python -m examples.training.export_digit_head``.

The graph is built by hand, so the same weights give the same bytes.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from headwater.zoo.digits import WEIGHTS

__all__ = ["ONNX_FILE", "digit_head"]

ONNX_FILE: Final = WEIGHTS.with_name("digit_head.onnx")
OPSET: Final = 17
IR_VERSION: Final = 8
"""Opset and IR version are from ONNX 1.12; every ONNX Runtime since 1.12 reads them."""


def digit_head() -> onnx.ModelProto:
    """The graph of `headwater.zoo.digits.Digit`, with the same inputs and outputs."""
    tensors = load_file(WEIGHTS)
    weight, bias = tensors["head.weight"], tensors["head.bias"]
    classes, features = weight.shape
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["features", "weight", "bias"], ["logits"], transB=1),
            helper.make_node("ArgMax", ["logits"], ["index"], axis=1, keepdims=1),
            helper.make_node("Cast", ["index"], ["digit"], to=TensorProto.INT32),
        ],
        "digit_head",
        inputs=[helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", features])],
        outputs=[
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", classes]),
            helper.make_tensor_value_info("digit", TensorProto.INT32, ["n", 1]),
        ],
        initializer=[numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="headwater",
        doc_string="Tells which digit it is, from the features of the digits network.",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    ONNX_FILE.write_bytes(digit_head().SerializeToString(deterministic=True))
    print(f"wrote {ONNX_FILE} ({ONNX_FILE.stat().st_size:,} bytes)")
