"""A user's ``model.py`` in the process of its own that the bridge in Triton's stub starts and asks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headwater.wire.open_requests import REQUEST, OpenRequests
from tests.inference.triton.stub_stand_in import (
    ClientRequest,
    MetricLines,
    MetricServer,
    StubFolder,
    StubRefusal,
    StubResponse,
    StubTensor,
    stub_module,
)
from tests.running import wait_for

OTHER_PYTHON = Path(__file__).parents[3] / ".venv-user/bin/python"
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}

IS_CANCELLED = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            y = np.array([sender.is_cancelled()])
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]), flags=1)
"""
DOUBLES = """
import os

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if x.flat[0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative", pb_utils.TritonError.NOT_FOUND))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)])
"""
FAULTS = """
import os
import sys

class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy().item()
        answers = [pb_utils.InferenceResponse([request.inputs()[0]]) for request in requests]
        if x == 1:
            return answers[1:]
        if x == 2:
            return [None, *answers[1:]]
        if x == 3:
            raise ValueError("a deliberate fault")
        if x == 4:
            sys.exit("left")
        if x == 5:
            os._exit(3)
        if x == 6:
            return ["text", *answers[1:]]
        if x == 7:
            return None
        if x == 8:
            os.kill(os.getpid(), 9)
        return answers
"""
ECHO_TOLD = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        import json
        answers = []
        for request in requests:
            told = {
                "id": request.request_id(), "parameters": json.loads(request.parameters()), "flags": request.flags(),
                "correlation_id": request.correlation_id(), "timeout": request.timeout(), "args": self.args,
                "wanted": request.requested_output_names(), "folder": pb_utils.get_model_dir(),
            }
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([json.dumps(told)], object))]))
        return answers
"""
COUNTS_DOWN = """
class TritonPythonModel:
    def execute(self, requests):
        import threading
        for request in requests:
            count = request.inputs()[0].as_numpy().item()
            if count < 0:
                raise ValueError("a deliberate fault")
            threading.Thread(target=self.answer, args=[request.get_response_sender(), count]).start()

    def answer(self, sender, count):
        import os
        for left in range(count, 0, -1):
            if left == 100:
                os._exit(3)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([left]))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ASKS = """
import threading

def request(x):
    return pb_utils.InferenceRequest(
        model_name="other", requested_output_names=["z"], inputs=[pb_utils.Tensor("x", x)], request_id="inner",
        parameters={"p": 1},
    )

def answer(response):
    if response.has_error():
        return pb_utils.InferenceResponse(error=response.error())
    z = pb_utils.get_output_tensor_by_name(response, "z").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", z)])
"""
INLINE = f"""{ASKS}
class TritonPythonModel:
    def execute(self, requests):
        return [answer(request(r.inputs()[0].as_numpy()).exec()) for r in requests]
"""
IN_THREADS = f"""{ASKS}
from concurrent.futures import ThreadPoolExecutor

class TritonPythonModel:
    def execute(self, requests):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda r: answer(request(r.inputs()[0].as_numpy()).exec()), requests))
"""
ASYNCHRONOUS = f"""{ASKS}
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        responses = await asyncio.gather(*[request(r.inputs()[0].as_numpy()).async_exec() for r in requests])
        return [answer(response) for response in responses]
"""
OF_A_STREAM = f"""{ASKS}
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            parts = [
                pb_utils.get_output_tensor_by_name(response, "z").as_numpy()
                for response in request(r.inputs()[0].as_numpy()).exec(decoupled=True)
                if response.output_tensors()
            ]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.concatenate(parts))]))
        return answers
"""


def answer_other(fields: Any, decoupled: bool) -> Any:
    """The model ``other``: adds 100 to its input; refuses numbers below 0. Decoupled, it answers twice, then empty."""
    (tensor,) = fields["inputs"]
    if tensor.array.flat[0] < 0:
        error = sys.modules["triton_python_backend_utils"].TritonError("below 0")
        return StubResponse(error=error)
    if tensor.array.flat[0] == 13:
        raise StubRefusal("no such model")
    response = StubResponse([StubTensor("z", tensor.array + 100)])
    return iter([response, response, StubResponse()]) if decoupled else response


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = stub_module(answer_other)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    return module


@pytest.fixture
def stub(triton: Any) -> Iterator[StubFolder]:
    # Not pytest's own folders: their names are too long for unix sockets.
    with tempfile.TemporaryDirectory(prefix="hw-") as folder, contextlib.closing(StubFolder(Path(folder))) as made:
        yield made


def of(*values: Any) -> list[ClientRequest]:
    """Requests with the input ``x``."""
    return [ClientRequest(x=np.array([value])) for value in values]


def values_of(responses: Any) -> list[Any]:
    """The output ``y`` of each response, or the text of its error."""
    return [one.error().message() if one.has_error() else one.values["y"] for one in responses]


def failure_of(responses: Any) -> str:
    """The text of the error that each request of a call got."""
    (text,) = {response.error().message() for response in responses}
    return str(text)


class TestOutputs:
    """An output of another shape than its declaration."""

    CONFIG: ClassVar = {"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]}
    FAULT = "output 'y': expected TYPE_FP32 [3] as in config.pbtxt, got TYPE_INT64 [1]"

    def test_it_goes_out_as_it_is_and_the_log_says_so_once(self, stub: StubFolder) -> None:
        model = stub.model(DOUBLES, self.CONFIG)
        assert [values_of(model.execute(of(1))) for _ in range(2)] == [[[2]], [[2]]]
        (line,) = stub.log.read_text().splitlines()
        assert line.startswith(f"WARNING model m: {self.FAULT}")

    def test_strict_outputs_refuse_it_by_name(self, stub: StubFolder) -> None:
        model = stub.model(DOUBLES, self.CONFIG, strict_outputs=True)
        assert values_of(model.execute(of(1))) == [self.FAULT]


class TestAnswers:
    def test_each_request_of_a_call_gets_its_answer(self, stub: StubFolder) -> None:
        model = stub.model(DOUBLES)
        assert values_of(model.execute(of(1, 2, 3))) == [[2], [4], [6]]
        assert values_of(model.execute(of(4))) == [[8]]

    def test_a_model_that_forks_answers_each_call_once(self, stub: StubFolder) -> None:
        model = stub.model(
            DOUBLES.replace("def execute(self, requests):", "def execute(self, requests):\n        os.fork()")
        )
        assert [values_of(model.execute(of(x))) for x in range(1, 6)] == [[[2 * x]] for x in range(1, 6)]

    def test_a_request_that_fails_leaves_its_neighbours_alone(self, stub: StubFolder) -> None:
        one, two, three = stub.model(DOUBLES).execute(of(1, -2, 3))
        assert values_of([one, two, three]) == [[2], "negative", [6]]
        assert two.error().code().name == "NOT_FOUND"

    def test_a_model_gets_all_that_a_request_says(self, stub: StubFolder) -> None:
        model = stub.model(ECHO_TOLD)
        (response,) = model.execute([ClientRequest({"a": [1]}, request_id="r", x=np.zeros(1))])
        told = json.loads(response.values["y"][0])
        arguments = told.pop("args")
        folder = stub.folder / "m"
        assert told == {
            "id": "r", "parameters": {"a": [1]}, "flags": 1, "correlation_id": 7, "timeout": 9, "wanted": ["y"],
            "folder": str(folder / "1"),
        }  # fmt: skip
        assert (arguments["model_name"], arguments["model_repository"]) == ("m", str(folder))

    @pytest.mark.parametrize(
        "array",
        [
            np.array([[True, False]]),
            np.arange(6, dtype=np.uint64).reshape(2, 3),
            np.array([1.5, np.inf], np.float16),
            np.zeros((0, 3), np.int32),
            np.array([b"", b"\0\xff"], object),
        ],
        ids=["bool", "uint64", "float16", "empty", "bytes"],
    )
    def test_tensors_pass_both_ways(self, stub: StubFolder, array: Any) -> None:
        code = """
        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
        """
        (response,) = stub.model(code).execute([ClientRequest(x=array)])
        (tensor,) = response.output_tensors()
        assert (tensor.name(), tensor.array.dtype, tensor.array.shape) == ("x", array.dtype, array.shape)
        assert tensor.array.tolist() == array.tolist()

    def test_bfloat16_passes_both_ways(self, stub: StubFolder) -> None:
        code = """
        class TritonPythonModel:
            def execute(self, requests):
                (tensor,) = requests[0].inputs()
                assert tensor.triton_dtype() == 14
                return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack())])]
        """
        bits = np.array([[0x3F80, 0x4000]], np.uint16)
        (response,) = stub.model(code).execute([ClientRequest(x=StubTensor("x", bits, is_bfloat16=True))])
        (tensor,) = response.output_tensors()
        assert (tensor.name(), tensor.is_bfloat16, tensor.array.tolist()) == ("y", True, bits.tolist())

    def test_inputs_are_writable(self, stub: StubFolder) -> None:
        code = """
        class TritonPythonModel:
            def execute(self, requests):
                x = requests[0].inputs()[0].as_numpy()
                x += 1
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
        """
        assert values_of(stub.model(code).execute(of(1))) == [[2]]

    def test_a_model_may_use_the_sender_for_its_only_answer(self, stub: StubFolder) -> None:
        code = """
        import threading

        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    threading.Thread(target=self.send, args=[request, request.get_response_sender()]).start()

            def send(self, request, sender):
                for _ in range(request.inputs()[0].as_numpy().item()):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(1))]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """
        one, two = values_of(stub.model(code).execute(of(1, 2)))
        assert one == [1]
        assert two == "execute sent 2 responses for this request, expected 1, since the model is not decoupled"


class TestFaults:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (1, "expected a list of 2 responses, one for each request, got 1"),
            (6, "expected InferenceResponses, got str"),
            (7, "expected a list of 2 responses, one for each request, got NoneType"),
            (4, "SystemExit: left"),
        ],
        ids=["count", "type", "none", "exit"],
    )
    def test_a_call_whose_answers_are_wrong_fails_and_the_next_one_works(
        self, stub: StubFolder, value: int, text: str
    ) -> None:
        model = stub.model(FAULTS)
        assert re.search(text, failure_of(model.execute(of(value, 0))))
        assert len(model.execute(of(0))) == 1

    def test_none_fails_its_request_alone(self, stub: StubFolder) -> None:
        none, fine = stub.model(FAULTS).execute(of(2, 0))
        assert none.error().message() == "execute returned None for this request, expected an InferenceResponse"
        assert not fine.has_error()

    def test_an_exception_is_told_with_class_text_and_place(self, stub: StubFolder) -> None:
        model = stub.model(FAULTS)
        text = failure_of(model.execute(of(3, 0)))
        lines = (stub.folder / "m/1/model.py").read_text().splitlines()
        line = next(number for number, code in enumerate(lines, 1) if "a deliberate fault" in code)
        assert text == f"ValueError: a deliberate fault; at 1/model.py({line}): execute"
        assert "Traceback (most recent call last)" in stub.log.read_text()

    @pytest.mark.parametrize(
        ("value", "text"), [(5, "exited with status 3"), (8, "was killed by SIGKILL")], ids=["exit", "kill"]
    )
    def test_a_host_that_ends_fails_its_call_and_the_next_one_works(
        self, stub: StubFolder, value: int, text: str
    ) -> None:
        model = stub.model(FAULTS)
        for _ in range(2):
            assert re.search(f"^the model's process {text}$", failure_of(model.execute(of(value))))
            assert len(model.execute(of(0, 0))) == 2

    def test_a_call_that_takes_too_long_is_ended_and_the_next_one_works(self, stub: StubFolder) -> None:
        code = """
        import threading

        class TritonPythonModel:
            def execute(self, requests):
                if requests[0].inputs()[0].as_numpy().item():
                    threading.Event().wait()
                return [pb_utils.InferenceResponse(requests[0].inputs())]
        """
        model = stub.model(code, max_compute_s=0.5)
        assert re.search(r"was ended: a call took longer than max_compute_s = 0\.5 s", failure_of(model.execute(of(1))))
        assert len(model.execute(of(0))) == 1

    @pytest.mark.parametrize(
        ("code", "text"),
        [
            ("def broken(:", "SyntaxError"),
            ("import missing_module_of_a_test", "ModuleNotFoundError: No module named"),
            ("x = 1", "AttributeError: model.py defines no class TritonPythonModel"),
            ("class TritonPythonModel:\n    def initialize(self, args): raise KeyError('weights')",
             r"KeyError: 'weights'; at 1/model.py\(4\): initialize"),
            ("class TritonPythonModel:\n    def initialize(self, args): raise SystemExit(4)", "SystemExit: 4"),
            ("import os\nos._exit(7)", r"exited with status 7 before initialize\(\) returned"),
            ("class TritonPythonModel:\n    def initialize(self, args):\n        pb_utils.InferenceRequest("
             "model_name='o', requested_output_names=[], inputs=[]).exec()", "other models can be asked from"),
        ],
        ids=["syntax", "import", "class", "raise", "exit", "end", "bls"],
    )  # fmt: skip
    def test_a_model_that_can_not_be_loaded_says_why(self, stub: StubFolder, code: str, text: str) -> None:
        with pytest.raises(StubRefusal, match=text):
            stub.model(code)
        assert list(stub.instances.iterdir()) == []


class TestDecoupled:
    def test_answers_come_until_the_end(self, stub: StubFolder) -> None:
        requests = of(3, 0, 1)
        assert stub.model(COUNTS_DOWN, DECOUPLED).execute(requests) is None
        answers = [values_of(request.sender.heard()) for request in requests]
        assert answers == [[[3], [2], [1]], [], [[1]]]

    def test_an_exception_is_each_requests_last_answer(self, stub: StubFolder) -> None:
        model = stub.model(COUNTS_DOWN, DECOUPLED)
        (request,) = requests = of(-1)
        assert model.execute(requests) is None
        (text,) = values_of(request.sender.heard())
        assert text.startswith("ValueError: a deliberate fault; at 1/model.py(")

    def test_a_host_that_ends_is_the_last_answer_and_the_next_call_works(self, stub: StubFolder) -> None:
        model = stub.model(COUNTS_DOWN, DECOUPLED)
        (request,) = requests = of(101)
        model.execute(requests)
        *_, last = values_of(request.sender.heard())
        assert last == "the model's process exited with status 3"

        def works() -> bool:
            (request,) = requests = of(1)
            model.execute(requests)
            return values_of(request.sender.heard()) == [[1]]

        wait_for(works, what="the next host")

    def test_returning_responses_is_an_error(self, stub: StubFolder) -> None:
        (request,) = requests = of(1)
        assert stub.model(DOUBLES, DECOUPLED).execute(requests) is None
        (text,) = values_of(request.sender.heard())
        assert "expected None, got list" in text

    def test_coroutines_run_at_once(self, stub: StubFolder) -> None:
        code = """
        import asyncio

        class TritonPythonModel:
            def initialize(self, args):
                self.begun = 0
                self.all = None

            async def execute(self, requests):
                self.all = self.all or asyncio.Event()
                self.begun += 1
                if self.begun == 2:
                    self.all.set()
                await self.all.wait()
                sender = requests[0].get_response_sender()
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([self.begun]))]), flags=1)
        """
        model = stub.model(code, DECOUPLED)
        one, two = of(1, 1)
        assert model.execute([one]) is None
        assert model.execute([two]) is None
        assert values_of(one.sender.heard()) == values_of(two.sender.heard()) == [[2]]

    def test_what_can_not_be_sent_is_refused(self, stub: StubFolder) -> None:
        code = """
        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                refused = []
                for arguments in [(), (None, 2), ("text",), (None, 1), (None, 1)]:
                    try:
                        sender.send(*arguments)
                    except (TypeError, pb_utils.TritonModelException) as error:
                        refused.append(str(error))
                pb_utils.Logger.log_info("|".join(refused))
        """
        (request,) = requests = of(1)
        stub.model(code, DECOUPLED).execute(requests)
        assert request.sender.heard() == []
        (line,) = [line for line in stub.log.read_text().splitlines() if line.startswith("INFO model m: ")]
        nothing, flags, type_, ended = line.removeprefix("INFO model m: ").split("|")
        assert "expected a response, or flags" in nothing
        assert "expected 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL, got 2" in flags
        assert "expected an InferenceResponse, got str" in type_
        assert "have ended" in ended

    def test_a_model_learns_that_its_request_is_cancelled(self, stub: StubFolder) -> None:
        one, two = of(1, 2)
        two.sender.is_cancelled_now = True
        stub.model(IS_CANCELLED, DECOUPLED).execute([one, two])
        assert values_of(one.sender.heard()) + values_of(two.sender.heard()) == [[False], [True]]

    def test_a_model_learns_that_its_request_has_ended_at_the_gateway(self, stub: StubFolder) -> None:
        open_requests = OpenRequests(str(stub.folder))
        names = [open_requests.open(), open_requests.open(), "no worker's"]
        open_requests.close(names[1])
        requests = [ClientRequest({REQUEST: name, "a": 1}, x=np.array([0])) for name in names]
        stub.model(IS_CANCELLED, DECOUPLED).execute(requests)
        assert [values_of(request.sender.heard()) for request in requests] == [[[False]], [[True]], [[False]]]

    @pytest.mark.parametrize("config", [DECOUPLED, {}], ids=["decoupled", "plain"])
    def test_a_model_does_not_see_the_gateways_parameters(self, stub: StubFolder, config: dict[str, Any]) -> None:
        model = stub.model(
            """
            class TritonPythonModel:
                def execute(self, requests):
                    pb_utils.Logger.log_info(requests[0].parameters())
                    requests[0].get_response_sender().send(flags=1)
            """,
            config,
        )
        model.execute([ClientRequest({REQUEST: "0-0-0", "a": 1}, x=np.array([0]))])
        wait_for(lambda: 'INFO model m: {"a": 1}\n' in stub.log.read_text())


@pytest.mark.parametrize("code", [INLINE, IN_THREADS, ASYNCHRONOUS], ids=["inline", "threads", "async"])
class TestRequestsToOtherModels:
    def test_they_are_answered(self, stub: StubFolder, triton: Any, code: str) -> None:
        model = stub.model(code)
        for _ in range(2):
            assert values_of(model.execute(of(1, 2, 3))) == [[101], [102], [103]]
        fields = triton.asked[0]
        assert (fields["model_name"], fields["requested_output_names"]) == ("other", ["z"])
        assert (fields["request_id"], fields["parameters"]) == ("inner", {"p": 1})

    def test_an_error_is_an_answer(self, stub: StubFolder, code: str) -> None:
        one, two = stub.model(code).execute(of(1, -1))
        assert values_of([one, two]) == [[101], "below 0"]

    def test_a_request_that_triton_refuses_is_an_exception(self, stub: StubFolder, code: str) -> None:
        assert re.search(
            r"TritonModelException: no such model; at 1/model\.py", failure_of(stub.model(code).execute(of(13)))
        )


class TestTritonsInterface:
    def test_each_answer_of_a_decoupled_model_comes(self, stub: StubFolder) -> None:
        assert values_of(stub.model(OF_A_STREAM).execute(of(1))) == [[101, 101]]

    def test_metrics_are_counted_at_the_socket(self, stub: StubFolder) -> None:
        code = """
        class TritonPythonModel:
            def initialize(self, args):
                self.family = pb_utils.MetricFamily("hits", "Hits.", pb_utils.MetricFamily.COUNTER)
                self.metric = self.family.Metric({"a": "b"})

            def execute(self, requests):
                self.metric.increment(requests[0].inputs()[0].as_numpy().item())
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([self.metric.value()]))])]
        """
        with MetricServer(str(stub.folder / "metrics"), MetricLines) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                model = stub.model(code)
                assert values_of(model.execute(of(2))) == [[5.0]]
                assert re.search(r"TritonModelException: .*a counter only grows", failure_of(model.execute(of(-1))))
                model.finalize()
            finally:
                server.shutdown()
                thread.join()
        lines = server.lines
        assert lines[0] == ["metric_family", "hits", "Hits.", "COUNTER"]
        assert lines[1][:1] + lines[1][2:] == ["metric", {"a": "b"}, None]
        assert [line[2:] for line in lines[2:5]] == [["increment", 2.0], ["value"], ["increment", -1.0]]

    def test_models_are_loaded_from_any_thread(self, stub: StubFolder, triton: Any) -> None:
        code = """
        from concurrent.futures import ThreadPoolExecutor

        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.load_model("one", "{}")
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(pb_utils.unload_model, "two", True).result()
                    ready = [pool.submit(pb_utils.is_model_ready, "ready").result(), pb_utils.is_model_ready("other")]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(ready))])]
        """
        assert values_of(stub.model(code).execute(of(1))) == [[True, False]]
        assert triton.loaded == [("load", "one", "{}"), ("unload", "two", True)]


class TestLife:
    def test_the_configuration_is_completed_by_the_model(self, stub: StubFolder) -> None:
        code = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.set_max_batch_size(4)
                config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
                return config
        """
        assert stub.completed(code, {"name": "m"}) == {
            "name": "m", "max_batch_size": 4, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        }  # fmt: skip

    def test_a_model_that_completes_nothing_leaves_the_configuration(self, stub: StubFolder) -> None:
        assert stub.completed(DOUBLES, {"name": "m"}) == {"name": "m"}

    @pytest.mark.parametrize(
        ("body", "text"),
        [
            ("config.set_max_batch_size(1); return config", "ValueError: configuration specified max_batch_size 4"),
            ("return None", "TypeError: auto_complete_config: expected the ModelConfig, got NoneType"),
        ],
    )
    def test_a_refusal_says_why(self, stub: StubFolder, body: str, text: str) -> None:
        code = f"class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config): {body}\n"
        with pytest.raises(ValueError, match=text):
            stub.completed(code, {"max_batch_size": 4})

    def test_finalize_runs_once_and_the_process_ends(self, stub: StubFolder) -> None:
        code = """
        import os

        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([os.getpid()]))])]

            def finalize(self):
                print("finalized", os.getpid())
        """
        model = stub.model(code)
        assert [path.name for path in stub.instances.iterdir()] == [str(os.getpid())]
        ((pid,),) = values_of(model.execute(of(1)))
        model.finalize()
        assert not Path(f"/proc/{pid}").exists()
        assert stub.log.read_text() == f"finalized {pid}\n"
        assert list(stub.instances.iterdir()) == []
        model.finalize()

    def test_a_finalize_that_fails_ends_the_process_too(self, stub: StubFolder) -> None:
        code = f"{DOUBLES}\n    def finalize(self):\n        raise ValueError('a deliberate fault')\n"
        stub.model(code).finalize()
        assert "ValueError: a deliberate fault" in stub.log.read_text()

    def test_what_a_model_prints_is_in_the_log(self, stub: StubFolder) -> None:
        stub.model(f"print('loaded', flush=True)\n{DOUBLES}")
        assert "loaded\n" in stub.log.read_text()

    def test_modules_of_the_working_folder_hide_none_of_the_interface(self, stub: StubFolder) -> None:
        for name in ("triton_python_backend_utils", "numpy", "json", "headwater"):
            (stub.working_folder / f"{name}.py").write_text("raise ImportError('hidden')\n")
        assert values_of(stub.model(DOUBLES).execute(of(1))) == [[2]]

    def test_modules_beside_the_script_are_imported(self, stub: StubFolder) -> None:
        bridged = stub.bridged("")
        Path(bridged.script).with_name("beside_the_script.py").write_text("FACTOR = 3\n")
        code = """
        from beside_the_script import FACTOR

        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([FACTOR]))])]
        """
        assert values_of(stub.model(code).execute(of(1))) == [[3]]

    def test_a_model_may_run_under_another_python(self, stub: StubFolder) -> None:
        check = [str(OTHER_PYTHON), "-c", "import numpy"]
        if not OTHER_PYTHON.exists() or subprocess.run(check, capture_output=True).returncode:
            pytest.skip("there is no other Python with numpy")
        assert values_of(stub.model(DOUBLES, python=str(OTHER_PYTHON)).execute(of(1, -1))) == [[2], "negative"]


class TestSequences:
    @pytest.mark.parametrize(
        ("values", "ready"),
        [({"int32_false_true": [0, 1]}, np.int32), ({"fp32_false_true": [0, 1]}, np.float32)],
        ids=["int32", "fp32"],
    )
    def test_a_slot_without_a_sequence_has_zeros(self, stub: StubFolder, values: Any, ready: Any) -> None:
        config = {
            "sequence_batching": {
                "control_input": [{"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", **values}]}]
            }
        }
        code = """
        class TritonPythonModel:
            def execute(self, requests):
                return [
                    pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
                    for request in requests
                ]
        """
        model: Callable[..., Any] = stub.model(code, config).execute
        requests = [ClientRequest(x=np.array([5]), READY=np.array([[at]], ready)) for at in (1, 0)]
        assert values_of(model(requests)) == [[5], [0]]
