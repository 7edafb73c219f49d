"""A model's signature: its checked declarations, in a form that travels to the gateway as JSON."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
import numpy as np

from headwater.answer_formats import ReasoningName, ToolParser
from headwater.datatypes import DATATYPES
from headwater.engine import EngineLimits, Sampling
from headwater.errors import DeclarationError
from headwater.hub_cache import model_name
from headwater.mapping import MAPPINGS, check_mappings
from headwater.model import Classification, Embedding, Model, Parameter, Reranking, State, Tensor, Transcription

__all__ = [
    "CONTEXT", "COUNT", "REQUEST", "HeadSpec", "LanguageModelSpec", "Signature", "StateSpec", "TensorSpec", "VllmSpec",
    "text_signature",
]  # fmt: skip

REQUEST: Final = "headwater_request"
"""Name of a ``str`` parameter per row that no client sends. A model that declares it learns which rows are of one
request, and accepts any parameters. The value is a number shared by the rows of one request only, a space, and the JSON
of the request's undeclared parameters. The JSON is empty if there are no undeclared parameters."""


COUNT: Final = "{}_count"
"""The name of the ``INT32 [1]`` tensor with the sizes of the rows of a ragged tensor."""
MAX_STATE_BYTES: Final = 64 * 1024**2
"""Most bytes of the states of a sequence."""
CONTEXT: Final = "headwater_context"
"""Name of a ``str`` parameter per row that no client sends: the JSON of the row's `headwater.Request`, for a model that
takes requests. Empty in a warm-up."""


class TensorSpec(msgspec.Struct, frozen=True):
    """A declared tensor. ``shape`` is the shape of one row, without the batch axis; -1 is a dimension that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()
    """The meaning of each position of the last dimension; empty if not declared."""
    dimensions: tuple[str, ...] = ()
    """A name for each dimension, empty for a dimension without a name; no names at all if none is declared."""
    example_shape: tuple[int, ...] = ()
    """The shape of an example row, if the model has no example of this tensor; empty: ``shape`` with 1 for each
    dimension that varies."""
    ragged: bool = False
    """Whether the sizes of rows differ in the first dimension of ``shape``. A tensor of several rows then has the size
    of the longest, and the shorter rows end with ``padding``; another tensor has the `counts`."""
    counts: str = ""
    """The ragged tensor whose rows' sizes this tensor holds; empty for all other tensors."""
    padding: float = 0
    """The value with which the shorter rows of a ragged input end; of an output it is 0."""


class StateSpec(msgspec.Struct, frozen=True):
    """A declared state: an input and an output that only the gateway sends and receives. See `headwater.State`."""

    input: str
    output: str
    datatype: str
    shape: tuple[int, ...]
    """The shape of one row, without the batch axis."""
    initial: float

    @property
    def size_bytes(self) -> int:
        """Bytes of a row."""
        return DATATYPES[self.datatype].size_bytes * math.prod(self.shape)


class HeadSpec(msgspec.Struct, frozen=True):
    """A head of a pipeline."""

    name: str
    outputs: tuple[str, ...]
    """The pipeline's outputs that the head computes."""
    timeout_s: float | None = None
    """Seconds from the request's arrival to the head's deadline; None: only the request has a deadline."""
    on_error: Literal["fail", "omit"] = "fail"
    """``fail``: the head's failure fails the request. ``omit``: the head's outputs are left out, unless all heads fail.
    In a stream a head's failure ends only this head."""


class LanguageModelSpec(msgspec.Struct, frozen=True):
    """Data with which the gateway checks a language model's requests, and turns text into tokens and back."""

    folder: str
    """Absolute path of the Hugging Face folder with tokenizer and chat template."""
    limits: EngineLimits
    tool_parser: ToolParser | None = None
    """The format of the model's tool calls; None: the format of the chat template."""
    sampling: Sampling = Sampling()
    """Values of the fields that a request doesn't set."""
    reasoning: ReasoningName | Literal["none"] | None = None
    """The format of the model's reasoning; ``none``: reasoning is content; None: the format of the chat template."""


class VllmSpec(msgspec.Struct, frozen=True):
    """A model of text or of embeddings that vLLM computes: the gateway relays requests to vLLM's HTTP server."""

    max_sequences: int
    """Maximum number of sequences that a replica computes together."""
    context_length: int
    """Maximum number of tokens of a prompt and its answer together."""
    cache_tokens: int
    """Number of tokens that the key/value cache of a replica holds; 0: there is no cache, or its size isn't known."""
    version: str
    """Version of vLLM."""
    max_lora_rank: int = 0
    """The highest rank of a LoRA adapter that can be loaded; 0: adapters can't be loaded."""
    max_requests: int = 0
    """Maximum number of sequences (inputs, for an embedding model) that a replica computes and queues; requests beyond
    it are refused. 0: not known yet."""
    embedding_length: int = 0
    """Length of an embedding model's embeddings, -1 if not known yet; 0 if the model generates text."""


class TritonSpec(msgspec.Struct, frozen=True):
    """A model repository: the gateway relays requests for its models to the replica's Triton."""

    models: tuple[str, ...]
    """Names of its models, also of models that are not loaded."""
    sequences: dict[str, bool] = {}
    """Its models with sequences, each with whether it has implicit states."""


class Signature(msgspec.Struct, frozen=True):
    """Everything about a model that the gateway needs to check, batch and document requests."""

    name: str
    """The deployment's name."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: tuple[Parameter, ...] = ()
    max_batch_size: int = 1
    idempotent: bool = True
    embedding: Embedding | None = None
    example: dict[str, Any] | None = None
    """A row as nested lists, by input name; None: no example, or an example too long for the gateway."""
    description: str = ""
    """First paragraph of the model's docstring, in one line; for a pipeline, combined from its steps' descriptions;
    for a language model, with the folder's name."""
    heads: tuple[HeadSpec, ...] = ()
    """A pipeline's heads, in the order of the configuration; every output belongs to exactly one head."""
    bare_rows: bool = False
    """See `headwater.Model.bare_rows`."""
    streams: bool = False
    """Whether the model answers a request with any number of results instead of exactly one."""
    language_model: LanguageModelSpec | None = None
    """Set for a language model with replicas that speak `headwater.wire.lm`, once its engine is loaded."""
    vllm: VllmSpec | None = None
    """Set for a model that vLLM computes."""
    triton: TritonSpec | None = None
    """Set for a model repository."""
    by_key: bool = False
    """Whether a replica keeps data per API key, so that calls must carry the name of each row's API key."""
    reranking: Reranking | None = None
    classification: Classification | None = None
    transcription: Transcription | None = None
    headers: tuple[str, ...] = ()
    """Names of the headers that the model gets of each request; see `headwater.Model.takes_requests`."""
    response_headers: tuple[str, ...] = ()
    """Names of the headers that the model may set in an answer."""
    states: tuple[StateSpec, ...] = ()
    """The states that the gateway keeps between the requests of a sequence. Their tensors are also among ``inputs`` and
    ``outputs``."""
    overlaps: bool = False
    """Whether a replica may compute several calls at once, because a ``__call__`` is a coroutine function."""

    @property
    def is_framed(self) -> bool:
        """Whether replicas answer in frames instead of one message for each call: `headwater.wire.frame`, and
        `headwater.wire.lm` for a language model."""
        return self.streams or self.overlaps or bool(self.heads)

    @property
    def public(self) -> Signature:
        """The signature as clients see it: without the tensors of states."""
        if not self.states:
            return self
        hidden = {state.input for state in self.states}, {state.output for state in self.states}
        inputs, outputs = (
            tuple(spec for spec in specs if spec.name not in names)
            for specs, names in zip((self.inputs, self.outputs), hidden, strict=True)
        )
        example = {name: value for name, value in (self.example or {}).items() if name not in hidden[0]}
        return msgspec.structs.replace(self, inputs=inputs, outputs=outputs, example=example or None)

    @property
    def own_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that clients may send by name: all but `REQUEST` and `CONTEXT`."""
        return tuple(parameter for parameter in self.parameters if parameter.name not in (REQUEST, CONTEXT))

    @property
    def takes_any_parameter(self) -> bool:
        """Whether requests may have parameters that aren't declared; see `REQUEST`."""
        return any(parameter.name == REQUEST for parameter in self.parameters)

    @property
    def takes_requests(self) -> bool:
        """See `headwater.Model.takes_requests`."""
        return any(parameter.name == CONTEXT for parameter in self.parameters)

    @property
    def limits(self) -> EngineLimits | VllmSpec | None:
        """The limits of a language model's engine, or of vLLM, once they are known; None before, and for other
        models."""
        return self.vllm if self.language_model is None else self.language_model.limits

    def check_cacheable(self) -> None:
        """Check that answers may be cached for equal requests.

        Raises:
            DeclarationError: the model declares that calls have effects, or it streams, takes requests or has states.
        """
        if self.streams or not self.idempotent or self.takes_requests or self.states:
            why = "is told of each request (`takes_requests`)" if self.takes_requests else "is not idempotent"
            why = "streams its results" if self.streams else why
            why = "has states" if self.states else why
            raise DeclarationError(
                f"cache: expected a model that answers equal requests equally, got `{self.name}`, which {why}",
                fix="remove `cache`",
            )

    @property
    def invented(self) -> list[TensorSpec]:
        """The inputs of an example row for which the model has no example."""
        known = {*(self.example or {}), *(state.input for state in self.states)}
        return [spec for spec in self.inputs if not spec.optional and spec.name not in known]

    def example_row(self) -> dict[str, Any]:
        """A row by input name, as nested lists: the model's example, completed with zeros or the text ``example``.
        Optional inputs without an example are left out."""
        row = dict(self.example or {})
        inputs = {spec.name for spec in self.inputs}
        for state in self.states:
            if state.input in inputs:
                row[state.input] = np.full(state.shape, state.initial).tolist()
        for spec in self.invented:
            shape = spec.example_shape or [max(dim, 1) for dim in spec.shape]
            dtype = np.dtype("f4") if spec.datatype == "BF16" else DATATYPES[spec.datatype].numpy
            neutral = np.full(shape, "example", dtype) if dtype.hasobject else np.zeros(shape, dtype)
            row[spec.name] = neutral.tolist()
        row.update({spec.name: [len(row[spec.counts])] for spec in self.inputs if spec.counts})
        return row

    @classmethod
    def of(cls, model: Model, *, name: str, max_batch_size: int) -> Signature:
        """Read and check a model's declarations.

        Raises:
            DeclarationError: the declarations contradict each other; the message names the model and the field.
        """
        kind = type(model).__name__
        inputs = _tensors(kind, "inputs", model.inputs, model.example_sizes)
        outputs = _tensors(kind, "outputs", model.outputs)
        states = _states(kind, model)
        _check_tensors(kind, model, inputs, outputs, {state.input for state in states})
        inputs = _with_states(kind, "inputs", inputs, states)
        outputs = _with_states(kind, "outputs", outputs, states)
        parameters = tuple(model.parameters)
        for parameter in parameters:
            if not isinstance(parameter, Parameter):
                raise DeclarationError(f"{kind}.parameters: expected a list of Parameter, got {parameter!r}")
        _check_unique(f"{kind}.parameters", [parameter.name for parameter in parameters])
        if model.batch not in ("rows", None):
            raise DeclarationError(f"{kind}.batch: expected 'rows' or None, got {model.batch!r}")
        if parameters and "parameters" in {spec.name for spec in inputs}:
            raise DeclarationError(f"{kind}.inputs, 'parameters': the name is that of the argument with the parameters")
        check_mappings(kind, model)
        example = dict(model.example) if model.example is not None else None
        for key in example or {}:
            if key not in {spec.name for spec in inputs}:
                raise DeclarationError(f"{kind}.example, {key!r}: expected the name of an input")
        arguments = [*(spec.name for spec in inputs), *(["parameters"] if parameters else [])]
        if model.takes_requests:
            if "requests" in arguments:
                raise DeclarationError(
                    f"{kind}.inputs, 'requests': with takes_requests the name is reserved; rename it"
                )
            arguments.append("requests")
            parameters = (*parameters, Parameter(CONTEXT, "str", "", per="row"))
        _check_method(kind, "__call__", model.__call__, ", ".join(["self", *arguments]), **dict.fromkeys(arguments))
        _check_method(kind, "load", model.load, "self, device", "cpu")
        _check_method(kind, "unload", model.unload, "self")
        for hook in (type(model).load, type(model).unload):
            if inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook):
                raise DeclarationError(
                    f"{kind}.{hook.__name__}: expected a function or a coroutine function, got a generator function, "
                    "whose body would never run; remove its `yield`"
                )
        call = type(model).__call__
        if model.response_headers and (
            inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call) or inspect.iscoroutinefunction(call)
        ):
            raise DeclarationError(
                f"{kind}: options.response_headers: expected a plain function __call__, got a coroutine function or a "
                "generator, whose answers are sent in pieces"
            )
        description = (inspect.getdoc(model) or "").split("\n\n")[0].replace("\n", " ")
        return cls(
            name=name,
            inputs=inputs,
            outputs=outputs,
            parameters=parameters,
            max_batch_size=1 if model.takes_one_row or model.batch is None else max_batch_size,
            idempotent=model.idempotent,
            embedding=model.embedding,
            reranking=model.reranking,
            classification=model.classification,
            transcription=model.transcription,
            example=example,
            description=description if type(model).__doc__ else "",
            bare_rows=model.bare_rows or model.batch is None,
            headers=tuple(model.request_headers),
            response_headers=tuple(model.response_headers),
            streams=inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call),
            states=states,
            overlaps=inspect.iscoroutinefunction(call),
        )


def _tensors(
    kind: str, where: str, declared: object, sizes: Mapping[str, int] = MappingProxyType({})
) -> tuple[TensorSpec, ...]:
    if not isinstance(declared, (list, tuple)) or not all(isinstance(tensor, Tensor) for tensor in declared):
        raise DeclarationError(f"{kind}.{where}: expected a list of Tensor, got {declared!r}")
    if not declared:
        raise DeclarationError(f"{kind}.{where}: expected at least one Tensor, got none")
    specs: list[TensorSpec] = []
    for tensor in declared:
        specs.append(TensorSpec(
            tensor.name, tensor.datatype, tuple(tensor.shape), tensor.optional, tuple(tensor.labels),
            tuple(tensor.dimensions), _example_shape(tensor, sizes), tensor.ragged, padding=tensor.padding,
        ))  # fmt: skip
        if tensor.ragged:
            count = TensorSpec(COUNT.format(tensor.name), "INT32", (1,), where == "inputs", counts=tensor.name)
            specs.append(count)
    _check_unique(f"{kind}.{where}", [spec.name for spec in specs])
    return tuple(specs)


def _states(kind: str, model: Model) -> tuple[StateSpec, ...]:
    declared = model.state
    if not isinstance(declared, (list, tuple)) or not all(isinstance(state, State) for state in declared):
        raise DeclarationError(f"{kind}.state: expected a list of State, got {declared!r}")
    call = type(model).__call__
    is_stream = inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)
    mappings = [name for name in MAPPINGS if getattr(model, name) is not None]
    if declared and (is_stream or mappings):
        why = f"{mappings[0]}, whose route has no sequences" if mappings else "a generator, which has many results"
        raise DeclarationError(f"{kind}.state: expected no states beside {why}")
    states = tuple(
        StateSpec(state.name, state.output, state.datatype, tuple(state.shape), state.initial) for state in declared
    )
    _check_unique(f"{kind}.state", [state.input for state in states])
    _check_unique(f"{kind}.state, outputs", [state.output for state in states])
    size_bytes = sum(state.size_bytes for state in states)
    if size_bytes > MAX_STATE_BYTES:
        raise DeclarationError(f"{kind}.state: expected at most {MAX_STATE_BYTES} bytes a row, got {size_bytes}")
    return states


def _with_states(
    kind: str, where: Literal["inputs", "outputs"], specs: tuple[TensorSpec, ...], states: Sequence[StateSpec]
) -> tuple[TensorSpec, ...]:
    """The tensors of one side and the tensors of the states, which may be among them already."""
    by_name = {spec.name: spec for spec in specs}
    for state in states:
        wanted = TensorSpec(state.input if where == "inputs" else state.output, state.datatype, state.shape)
        spec = by_name.setdefault(wanted.name, wanted)
        if (spec.datatype, spec.shape, spec.optional) != (wanted.datatype, wanted.shape, False):
            expected = f"{wanted.datatype} {list(wanted.shape)} as its state, not optional"
            raise DeclarationError(
                f"{kind}.{where}, {spec.name!r}: expected {expected}, got {spec.datatype} {list(spec.shape)}"
            )
    return tuple(by_name.values())


def _check_tensors(
    kind: str, model: Model, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], state_inputs: Collection[str]
) -> None:
    for spec in outputs:
        if spec.optional:
            raise DeclarationError(f"{kind}.outputs, {spec.name!r}: an output can't be optional")
    for spec in (*inputs, *outputs):
        if spec.ragged and (model.batch is None or spec.optional):
            why = "is optional" if spec.optional else "has no batch axis, and so any size"
            raise DeclarationError(f"{kind}, {spec.name!r}: it {why}; leave `ragged` out")
    if not any(not spec.optional and spec.name not in state_inputs for spec in inputs):
        raise DeclarationError(f"{kind}.inputs: expected at least one input that isn't optional")


def _example_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """See `TensorSpec.example_shape`."""
    if sizes.keys().isdisjoint(tensor.dimensions):
        return ()
    named = zip(tensor.shape, tensor.dimensions, strict=True)
    return tuple(sizes.get(name, 1) if dim < 0 else dim for dim, name in named)


def _check_method(kind: str, name: str, method: Callable[..., Any], expected: str, *args: Any, **kwargs: Any) -> None:
    """Refuse a model with a method that can't be called with these arguments. ``expected`` are its parameters."""
    try:
        # A wrapper may call the function that it wraps with more arguments.
        signature = inspect.signature(method, follow_wrapped=False)
    except (TypeError, ValueError):  # a method that isn't written in Python
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DeclarationError(
            f"{kind}.{name}: expected the parameters ({expected}){', named as the inputs' if kwargs else ''}, "
            f"got ({', '.join(['self', *signature.parameters])}): {error}"
        ) from None


def _check_unique(where: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DeclarationError(f"{where}: {name!r} is declared {names.count(name)} times")


def text_signature(
    name: str, folder: Path, language_model: LanguageModelSpec | None = None, vllm: VllmSpec | None = None
) -> Signature:
    """Signature of a language model in a Hugging Face folder. Its input is text; its output is text, or an embedding if
    vLLM reports an embedding length."""
    if vllm is not None and vllm.embedding_length:
        return Signature(
            name=name,
            inputs=(TensorSpec("text_input", "BYTES", (1,)),),
            outputs=(TensorSpec("embedding", "FP32", (vllm.embedding_length,)),),
            embedding=Embedding(input="text_input", output="embedding"),
            description=f"The embedding model {model_name(folder)}.",
            vllm=vllm,
        )
    return Signature(
        name=name,
        inputs=(TensorSpec("text_input", "BYTES", (1,)),),
        outputs=(TensorSpec("text_output", "BYTES", (1,)),),
        max_batch_size=1,
        description=f"The language model {model_name(folder)}.",
        streams=True,
        language_model=language_model,
        vllm=vllm,
    )
