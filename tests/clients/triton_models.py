"""A Triton model repository for the clients of gRPC."""

from __future__ import annotations

from typing import Final

__all__ = ["MODELS"]

_ONE = """
    backend: "python"
    input [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
    output [{ name: "y", data_type: TYPE_INT32, dims: [ 1 ] }]
"""
_BATCHED = f"{_ONE}\nmax_batch_size: 8"
_DECOUPLED = f"{_ONE}\nmodel_transaction_policy {{ decoupled: true }}"
_X = 'pb_utils.get_input_tensor_by_name(request, "x").as_numpy()'
_RESPONSE = "pb_utils.InferenceResponse([pb_utils.Tensor('y', {})])"

MODELS: Final[dict[str, tuple[str, str]]] = {
    # Doubles numbers; fails at -1, refuses -2.
    "doubled": (
        f"{_BATCHED}\ndynamic_batching {{ }}",
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                return [self.answer({_X}) for request in requests]

            def answer(self, x):
                if -1 in x:
                    return pb_utils.InferenceResponse(error=pb_utils.TritonError("no -1"))
                if -2 in x:
                    refused = pb_utils.TritonError("no -2", pb_utils.TritonError.INVALID_ARG)
                    return pb_utils.InferenceResponse(error=refused)
                return {_RESPONSE.format("2 * x")}
        """,
    ),
    # Sums the numbers of a sequence.
    "summed": (
        f"""{_BATCHED}
        sequence_batching {{
          max_sequence_idle_microseconds: 60000000
          oldest {{ max_candidate_sequences: 16 }}
          control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} }}
          state [{{ input_name: "in" output_name: "out" data_type: TYPE_INT32 dims: [ 1 ] }}]
        }}
        """,
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                return [self.answer(request) for request in requests]

            def answer(self, request):
                total = pb_utils.get_input_tensor_by_name(request, "in").as_numpy() + {_X}
                return pb_utils.InferenceResponse([pb_utils.Tensor("y", total), pb_utils.Tensor("out", total)])
        """,
    ),
    # Counts up to its input; fails after a negative input's numbers.
    "counted": (
        _DECOUPLED,
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    x = {_X}.item()
                    for number in range(abs(x)):
                        sender.send({_RESPONSE.format("np.array([number], np.int32)")})
                    if x < 0:
                        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
    ),
    # Counts until its client cancels. One request at a time: the next one is answered when the model is free.
    "endless": (
        _DECOUPLED,
        f"""
        import time

        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    number = 0
                    while not sender.is_cancelled():
                        sender.send({_RESPONSE.format("np.array([number], np.int32)")})
                        number += 1
                        time.sleep(0.01)
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
    ),
    # Answers after as many milliseconds.
    "slow": (
        _BATCHED,
        f"""
        import time

        class TritonPythonModel:
            def execute(self, requests):
                answers = []
                for request in requests:
                    x = {_X}
                    time.sleep(x.max().item() / 1000)
                    answers.append({_RESPONSE.format("x")})
                return answers
        """,
    ),
}
