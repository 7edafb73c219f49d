"""The interface that a ``model.py`` imports: tensors, errors, requests, responses, configurations and lookups."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.triton import backend_utils
from headwater.triton.backend_utils import (
    TRITON_STRING_TO_NUMPY,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    Logger,
    MetricFamily,
    ModelConfig,
    PreferredMemory,
    Tensor,
    TritonError,
    TritonModelException,
    deserialize_bytes_tensor,
    get_input_tensor_by_name,
    get_output_tensor_by_name,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from headwater.triton.call_codec import CODES

NUMBERS = {
    "TYPE_BOOL": 1, "TYPE_UINT8": 2, "TYPE_UINT16": 3, "TYPE_UINT32": 4, "TYPE_UINT64": 5, "TYPE_INT8": 6,
    "TYPE_INT16": 7, "TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP16": 10, "TYPE_FP32": 11, "TYPE_FP64": 12,
    "TYPE_STRING": 13,
}  # fmt: skip
"""The numbers of ``TRITONSERVER_DataType``."""
DLPACK_TYPES = [np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]


class RecordingLink:
    """In place of the connection to Triton: keeps what it is asked, and answers each call with a number."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log(self, level: str, message: str) -> None:
        self.calls.append(("log", level, message))

    def infer(self, request: InferenceRequest, *, decoupled: bool) -> Any:
        self.calls.append(("infer", request.model_name, decoupled))
        return InferenceResponse([Tensor("y", np.zeros(1))])

    async def infer_later(self, request: InferenceRequest, *, decoupled: bool) -> Any:
        return self.infer(request, decoupled=decoupled)

    def call(self, function: str, *arguments: Any) -> Any:
        self.calls.append((function, *arguments))
        return len(self.calls)


class NullSender(InferenceResponseSender):
    """A sender that knows only whether the request is cancelled."""

    def is_cancelled(self) -> bool:
        return True


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> RecordingLink:
    connected = RecordingLink()
    monkeypatch.setattr(backend_utils, "link", connected)
    return connected


def request_of(*inputs: Tensor, **fields: Any) -> InferenceRequest:
    """A request to the model ``m``."""
    return InferenceRequest(inputs=inputs, requested_output_names=["y"], model_name="m", **fields)


class TestTensor:
    @pytest.mark.parametrize(("name", "number"), NUMBERS.items())
    def test_each_datatype_has_tritons_number(self, name: str, number: int) -> None:
        kind = triton_string_to_numpy(name)
        tensor = Tensor("x", np.zeros((2, 3), kind))
        assert tensor.triton_dtype() == numpy_to_triton_type(kind) == number
        assert np.dtype(triton_to_numpy_type(number)) == np.dtype(kind)
        assert tensor.shape() == [2, 3]
        assert tensor.name() == "x"
        assert tensor.is_cpu()

    def test_the_table_has_all_datatypes(self) -> None:
        assert list(TRITON_STRING_TO_NUMPY) == list(NUMBERS)

    def test_it_shares_the_memory_of_its_array(self) -> None:
        array = np.zeros(4, np.float32)
        tensor = Tensor("x", array)
        array[1] = 7
        assert tensor.as_numpy()[1] == 7
        tensor.as_numpy()[2] = 8
        assert array[2] == 8

    def test_an_array_that_is_not_in_c_order_is_copied_into_it(self) -> None:
        array = np.arange(6).reshape(2, 3).T
        tensor = Tensor("x", array)
        assert tensor.as_numpy().flags.c_contiguous
        assert np.array_equal(tensor.as_numpy(), array)

    def test_an_array_of_bytes_becomes_an_array_of_objects(self) -> None:
        tensor = Tensor("x", np.array([b"a", b"bcd"]))
        assert tensor.as_numpy().dtype == object
        assert tensor.as_numpy().tolist() == [b"a", b"bcd"]

    @pytest.mark.parametrize("kind", ["U3", "complex64", "datetime64[s]", "i4,f4", ">f4"])
    def test_other_dtypes_are_refused(self, kind: str) -> None:
        with pytest.raises(TritonModelException, match="Tensor 'x': Triton has no datatype for numpy's"):
            Tensor("x", np.zeros(2, kind))

    @pytest.mark.parametrize("value", [[1, 2], 3.0, None, "text"])
    def test_what_is_no_array_is_refused(self, value: Any) -> None:
        with pytest.raises(TypeError, match="Tensor 'x': expected a numpy array, got"):
            Tensor("x", value)

    def test_bfloat16_is_kept_as_its_bits(self) -> None:
        tensor = Tensor.of_bfloat16("x", np.array([0x3F80, 0x4000], np.uint16))
        assert tensor.is_bfloat16
        assert tensor.triton_dtype() == 14
        assert tensor.bits.tolist() == [0x3F80, 0x4000]
        with pytest.raises(TritonModelException, match="BF16 and cannot be converted to NumPy"):
            tensor.as_numpy()


class TestDlpack:
    @pytest.mark.parametrize("kind", DLPACK_TYPES)
    def test_numpy_takes_a_tensor_without_a_copy(self, kind: Any) -> None:
        array = np.arange(6).astype(kind).reshape(2, 3)
        taken = np.from_dlpack(Tensor("x", array))
        assert np.array_equal(taken, array)
        assert np.shares_memory(taken, array)

    @pytest.mark.parametrize("kind", DLPACK_TYPES)
    def test_a_tensor_takes_another_librarys_memory(self, kind: Any) -> None:
        array = np.arange(6).astype(kind).reshape(2, 3)
        tensor = Tensor.from_dlpack("x", array)
        assert tensor.as_numpy().dtype == array.dtype
        assert np.shares_memory(tensor.as_numpy(), array)

    def test_a_capsule_goes_from_tensor_to_tensor(self) -> None:
        array = np.arange(4, dtype=np.int32)
        tensor = Tensor.from_dlpack("y", Tensor("x", array).to_dlpack())
        assert tensor.name() == "y"
        assert np.shares_memory(tensor.as_numpy(), array)

    def test_a_read_only_array_is_exported_as_a_copy(self) -> None:
        array = np.arange(4, dtype=np.int32)
        array.flags.writeable = False
        assert np.from_dlpack(Tensor("x", array)).tolist() == [0, 1, 2, 3]

    def test_a_bfloat16_goes_from_tensor_to_tensor(self) -> None:
        tensor = Tensor.of_bfloat16("x", np.array([[1, 2]], np.uint16))
        taken = Tensor.from_dlpack("y", tensor.to_dlpack())
        assert (taken.is_bfloat16, taken.shape(), taken.bits.tolist()) == (True, [1, 2], [[1, 2]])

    def test_memory_that_is_not_in_c_order_is_refused(self) -> None:
        with pytest.raises(TritonModelException, match="Tensor 'x', from_dlpack: expected memory in C order"):
            Tensor.from_dlpack("x", np.zeros((2, 3)).T)

    @pytest.mark.parametrize("value", ["text", 3, None])
    def test_what_is_no_tensor_is_refused(self, value: Any) -> None:
        with pytest.raises((TritonModelException, ValueError)):
            Tensor.from_dlpack("x", value)


class TestErrors:
    def test_the_codes_are_those_of_triton_in_its_order(self) -> None:
        assert [getattr(TritonError, name).value for name in CODES] == list(range(len(CODES)))

    def test_an_error_has_its_message_and_is_internal_unless_it_says_otherwise(self) -> None:
        assert TritonError("broken").message() == "broken"
        assert TritonError("broken").code() is TritonError.INTERNAL
        assert TritonError("none", TritonError.NOT_FOUND).code() is TritonError.NOT_FOUND

    def test_another_type_of_message_or_code_is_refused(self) -> None:
        message: Any = 3
        with pytest.raises(TypeError, match="message: expected a str, got int"):
            TritonError(message)
        with pytest.raises(TypeError, match=r"code: expected one of TritonError\.UNKNOWN, .*, got 2"):
            TritonError("x", 2)


class TestResponse:
    def test_it_has_its_tensors_and_no_error(self) -> None:
        tensor = Tensor("y", np.zeros(1))
        response = InferenceResponse([tensor])
        assert response.output_tensors() == [tensor]
        assert not response.has_error()
        assert response.error() is None
        assert get_output_tensor_by_name(response, "y") is tensor
        assert get_output_tensor_by_name(response, "z") is None

    def test_an_error_is_raised_where_an_output_is_looked_up(self) -> None:
        response = InferenceResponse(error=TritonError("broken"))
        assert response.has_error()
        with pytest.raises(TritonModelException, match=r"^broken$"):
            get_output_tensor_by_name(response, "y")

    def test_other_types_are_refused(self) -> None:
        wrong: Any = np.zeros(1)
        with pytest.raises(TypeError, match="output_tensors: expected Tensors, got ndarray"):
            InferenceResponse([wrong])
        with pytest.raises(TypeError, match="error: expected a TritonError, got ndarray"):
            InferenceResponse(error=wrong)


class TestRequest:
    def test_it_keeps_its_fields(self) -> None:
        tensor = Tensor("x", np.zeros(1))
        request = request_of(
            tensor,
            request_id="r",
            correlation_id="c",
            model_version=3,
            flags=1,
            timeout=5,
            preferred_memory=PreferredMemory(backend_utils.TRITONSERVER_MEMORY_CPU),
            parameters={"a": 1},
        )
        assert request.inputs() == [tensor]
        assert (request.model_name, request.model_version) == ("m", 3)
        assert request.requested_output_names() == ["y"]
        assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("r", "c", 1, 5)
        assert json.loads(request.parameters()) == {"a": 1}
        assert request.trace() is None
        assert not request.is_cancelled()
        request.set_flags(2)
        assert request.flags() == 2
        assert get_input_tensor_by_name(request, "x") is tensor
        assert get_input_tensor_by_name(request, "z") is None

    def test_parameters_may_be_json(self) -> None:
        assert request_of(parameters='{"a": 1}').parameters() == '{"a": 1}'
        assert request_of().parameters() == "{}"

    @pytest.mark.parametrize("missing", ["inputs", "requested_output_names", "model_name"])
    def test_each_required_field_is_required(self, missing: str) -> None:
        fields: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
        del fields[missing]
        with pytest.raises(TypeError, match=f"InferenceRequest, {missing}: required"):
            InferenceRequest(**fields)

    def test_an_input_that_is_no_tensor_is_refused(self) -> None:
        wrong: Any = np.zeros(1)
        with pytest.raises(TypeError, match="inputs: expected Tensors, got ndarray"):
            request_of(wrong)

    def test_rescheduling_is_refused(self) -> None:
        request_of().set_release_flags(backend_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
        with pytest.raises(TritonModelException, match="iterative sequences"):
            request_of().set_release_flags(backend_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def test_only_a_clients_request_has_a_sender(self) -> None:
        request = request_of()
        with pytest.raises(TritonModelException, match="not a client's"):
            request.get_response_sender()
        sender = NullSender()
        request.sender = sender
        assert not request.is_sender_taken
        assert request.get_response_sender() is sender
        assert request.is_sender_taken
        assert request.is_cancelled()

    def test_a_clients_request_is_not_sent_on(self, link: RecordingLink) -> None:
        request = request_of()
        request.sender = NullSender()
        for send in (request.exec, request.async_exec):
            with pytest.raises(TritonModelException, match="expected a request that this model made"):
                send()
        assert link.calls == []

    def test_a_request_of_the_model_goes_to_the_link(self, link: RecordingLink) -> None:
        assert not request_of().exec().has_error()
        request_of().exec(decoupled=True)

        async def later() -> Any:
            return await request_of().async_exec()

        assert not asyncio.run(later()).has_error()
        assert link.calls == [("infer", "m", False), ("infer", "m", True), ("infer", "m", False)]


class TestModelConfig:
    def test_max_batch_size_is_never_made_smaller(self) -> None:
        config = ModelConfig({"max_batch_size": 4})
        with pytest.raises(ValueError, match=r"max_batch_size 4, but .* set to 2, which is smaller"):
            config.set_max_batch_size(2)
        config.set_max_batch_size(8)
        assert config.as_dict() == {"max_batch_size": 8}

    def test_dynamic_batching_prefers_whole_batches(self) -> None:
        config = ModelConfig({"max_batch_size": 4})
        config.set_dynamic_batching()
        assert config.as_dict()["dynamic_batching"] == {"preferred_batch_size": [4]}

    def test_dynamic_batching_of_the_file_stays(self) -> None:
        config = ModelConfig({"max_batch_size": 4, "dynamic_batching": {"preserve_ordering": True}})
        config.set_dynamic_batching()
        assert config.as_dict()["dynamic_batching"] == {"preserve_ordering": True}

    @pytest.mark.parametrize("other", ["sequence_batching", "ensemble_scheduling"])
    def test_dynamic_batching_excludes_other_schedulers(self, other: str) -> None:
        with pytest.raises(ValueError, match=f"config.pbtxt has {other}"):
            ModelConfig({other: {}}).set_dynamic_batching()

    def test_the_transaction_policy_is_set_once(self) -> None:
        config = ModelConfig({})
        config.set_model_transaction_policy({"decoupled": True})
        assert config.as_dict() == {"model_transaction_policy": {"decoupled": True}}
        config.set_model_transaction_policy({"decoupled": True})
        with pytest.raises(ValueError, match="to False, which is already set to True"):
            config.set_model_transaction_policy({"decoupled": False})

    def test_an_unknown_field_of_the_transaction_policy_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'coupled': unknown; expected 'decoupled'"):
            ModelConfig({}).set_model_transaction_policy({"coupled": True})

    @pytest.mark.parametrize("kind", ["input", "output"])
    def test_a_tensor_is_added_and_an_equal_one_is_not_added_again(self, kind: str) -> None:
        config = ModelConfig({})
        tensor = {"name": "t", "data_type": "TYPE_FP32", "dims": [4]}
        for _ in range(2):
            getattr(config, f"add_{kind}")(tensor)
        assert config.as_dict() == {kind: [tensor]}

    @pytest.mark.parametrize("kind", ["input", "output"])
    def test_what_the_file_lacks_is_filled(self, kind: str) -> None:
        config = ModelConfig({kind: [{"name": "other"}, {"name": "t", "data_type": "TYPE_INVALID", "dims": []}]})
        tensor = {"name": "t", "data_type": "TYPE_FP32", "dims": [4]}
        getattr(config, f"add_{kind}")(tensor)
        assert config.as_dict() == {kind: [{"name": "other"}, tensor]}

    @pytest.mark.parametrize("kind", ["input", "output"])
    @pytest.mark.parametrize(("field", "value"), [("data_type", "TYPE_INT8"), ("dims", [5])])
    def test_what_the_file_has_is_not_changed(self, kind: str, field: str, value: Any) -> None:
        tensor = {"name": "t", "data_type": "TYPE_FP32", "dims": [4]}
        config = ModelConfig({kind: [dict(tensor)]})
        with pytest.raises(ValueError, match=f"{kind} 't', {field}: config.pbtxt has"):
            getattr(config, f"add_{kind}")({**tensor, field: value})

    @pytest.mark.parametrize("kind", ["input", "output"])
    @pytest.mark.parametrize("missing", ["name", "data_type", "dims"])
    def test_a_tensor_without_a_field_is_refused(self, kind: str, missing: str) -> None:
        tensor = {"name": "t", "data_type": "TYPE_FP32", "dims": [4]}
        del tensor[missing]
        with pytest.raises(ValueError, match=f"expected {missing}"):
            getattr(ModelConfig({}), f"add_{kind}")(tensor)

    def test_an_unknown_property_is_refused_and_only_inputs_are_optional(self) -> None:
        tensor = {"name": "t", "data_type": "TYPE_FP32", "dims": [4], "optional": True}
        config = ModelConfig({})
        config.add_input(tensor)
        assert config.as_dict() == {"input": [tensor]}
        with pytest.raises(ValueError, match=r"output 't' .*: unknown property optional"):
            config.add_output(tensor)

    def test_lookups_in_a_configuration(self) -> None:
        entry = {"name": "x", "dims": [1]}
        config = {"input": [entry], "output": [entry], "model_transaction_policy": {"decoupled": True}}
        assert backend_utils.get_input_config_by_name(config, "x") is entry
        assert backend_utils.get_output_config_by_name(config, "x") is entry
        assert backend_utils.get_input_config_by_name(config, "y") is None
        assert backend_utils.get_output_config_by_name({}, "x") is None
        assert backend_utils.using_decoupled_model_transaction_policy(config)
        assert not backend_utils.using_decoupled_model_transaction_policy({})


class TestBytesTensors:
    @given(npst.arrays(object, npst.array_shapes(min_side=0, max_dims=3), elements=st.binary(max_size=20)))
    def test_what_was_serialized_is_read_back(self, array: Any) -> None:
        whole = serialize_byte_tensor(array)
        if not array.size:
            assert whole is None
            return
        assert whole is not None
        assert deserialize_bytes_tensor(whole[0]).tolist() == array.ravel().tolist()

    @given(st.lists(st.text(max_size=10), min_size=1))
    def test_texts_are_encoded(self, values: list[str]) -> None:
        whole = serialize_byte_tensor(np.array(values, object))
        assert whole is not None
        assert [value.decode() for value in deserialize_bytes_tensor(whole[0])] == values

    def test_an_array_of_bytes_is_taken_too(self) -> None:
        whole = serialize_byte_tensor(np.array([b"a", b"bc"]))
        assert whole is not None
        assert whole[0] == b"\x01\0\0\0a\x02\0\0\0bc"

    def test_numbers_are_refused(self) -> None:
        with pytest.raises(TritonModelException, match="invalid datatype"):
            serialize_byte_tensor(np.zeros(2))

    def test_nothing_is_no_elements(self) -> None:
        assert deserialize_bytes_tensor(b"").tolist() == []


class TestLink:
    def test_log_lines_have_their_level(self, link: RecordingLink) -> None:
        logger = Logger
        logger.log("a")
        logger.log("b", logger.ERROR)
        logger.log_info("c")
        logger.log_warn("d")
        logger.log_error("e")
        logger.log_verbose("f")
        levels = ["INFO", "ERROR", "INFO", "WARNING", "ERROR", "VERBOSE"]
        assert link.calls == [("log", level, text) for level, text in zip(levels, "abcdef", strict=True)]

    def test_metrics_are_tritons(self, link: RecordingLink) -> None:
        family = MetricFamily("hits", "Hits.", MetricFamily.HISTOGRAM)
        metric = family.Metric({"a": "b"}, buckets=(1, 2))
        metric.increment(1)
        metric.set(2)
        metric.observe(3)
        assert metric.value() == 6
        del metric
        del family
        assert link.calls == [
            ("metric_family", "hits", "Hits.", "HISTOGRAM"),
            ("metric", 1, {"a": "b"}, [1, 2]),
            ("metric_do", 2, "increment", 1.0),
            ("metric_do", 2, "set", 2.0),
            ("metric_do", 2, "observe", 3.0),
            ("metric_do", 2, "value"),
            ("metric_forget", 2),
            ("metric_forget", 1),
        ]

    def test_a_kind_that_is_no_kind_of_metric_is_refused(self, link: RecordingLink) -> None:
        with pytest.raises(TypeError, match="MetricFamily 'hits', kind"):
            MetricFamily("hits", "Hits.", 0)
        assert link.calls == []

    def test_models_are_loaded_by_triton(self, link: RecordingLink) -> None:
        assert backend_utils.is_model_ready("m", "2")
        backend_utils.load_model("m", "{}")
        backend_utils.unload_model("m", unload_dependents=True)
        assert link.calls == [("is_model_ready", "m", "2"), ("load_model", "m", "{}"), ("unload_model", "m", True)]
        with pytest.raises(TritonModelException, match="files: not supported"):
            backend_utils.load_model("m", files={"file:1/model.py": b""})

    @pytest.mark.parametrize(
        "use",
        [
            lambda: Logger.log_info("x"),
            lambda: request_of().exec(),
            lambda: request_of().async_exec(),
            lambda: backend_utils.is_model_ready("m"),
            lambda: backend_utils.load_model("m"),
            lambda: backend_utils.unload_model("m"),
            lambda: MetricFamily("hits", "Hits.", MetricFamily.COUNTER),
        ],
    )
    def test_without_a_connection_each_use_of_triton_says_so(self, use: Any) -> None:
        with pytest.raises(TritonModelException, match="Triton is not connected"):
            use()

    def test_the_folder_of_the_version_is_what_the_host_sets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend_utils, "model_folder", "/models/m/1")
        assert backend_utils.get_model_dir() == "/models/m/1"
