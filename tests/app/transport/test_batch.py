"""How a batch travels to a replica."""

from __future__ import annotations

from headwater.model import Parameter
from headwater.signature import REQUEST, Signature, TensorSpec
from headwater_server.codecs.tensors import InferRequest, RawTensor
from headwater_server.transport.batch import encode_inputs

SIGNATURE = Signature(
    name="m",
    inputs=(TensorSpec("x", "UINT8", (1,)),),
    outputs=(TensorSpec("y", "UINT8", (1,)),),
    parameters=(Parameter(REQUEST, "str", "", per="row"),),
)


def _rows(parameters: str, count: int) -> tuple[InferRequest, dict[str, RawTensor], int]:
    inputs = {"x": RawTensor("UINT8", (count, 1), bytes(count))}
    return InferRequest("", inputs, count, [], {}, {REQUEST: parameters}), inputs, count


def test_a_model_is_told_which_rows_are_of_one_request() -> None:
    batch = [_rows("", 2), _rows("", 1), _rows('{"a":1}', 1)]
    told = encode_inputs(SIGNATURE, batch)[0].note.rows[REQUEST]
    numbers, parameters = zip(*(str(value).split(" ", 1) for value in told), strict=True)
    assert parameters == ("", "", "", '{"a":1}')
    assert numbers[0] == numbers[1]
    again = encode_inputs(SIGNATURE, batch[:1])[0].note.rows[REQUEST]  # which Triton may merge with the first
    assert len({*numbers, str(again[0]).split(" ", 1)[0]}) == 4
