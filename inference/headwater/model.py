"""The classes with which a user writes a model: `Model`, its declared tensors and parameters, and its mappings to
routes such as that of OpenAI's embeddings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES
from headwater.errors import DeclarationError
from headwater.model_metrics import Metrics, metrics

__all__ = [
    "Classification", "Embedding", "Model", "Parameter", "Request", "Reranking", "Scalar", "State", "Tensor",
    "Transcription",
]  # fmt: skip

Scalar = str | int | float | bool

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
_PARAMETER_TYPES: Final = {"str": str, "int": int, "float": float, "bool": bool}
# Names of request parameters that the protocol defines; a model can't declare them.
_RESERVED_PARAMETERS: Final = frozenset(
    {"binary_data_output", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "headwater"}
)


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise DeclarationError(f"{kind} name: expected letters, digits, '_', '.' or '-', got {name!r}")


def _is_value(value: object, datatype: str) -> bool:
    """Whether a number is a value of a datatype; of ``BYTES``, only 0 is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    dtype = DATATYPES[datatype].numpy
    if dtype.kind == "f" or datatype == "BF16":
        return True
    lowest, highest = (0, dtype.kind == "b") if dtype.kind in "bO" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return value % 1 == 0 and lowest <= value <= highest


@dataclass(frozen=True)
class Tensor:
    """A declared input or output.

    Args:
        name: its name in requests and in the callable.
        datatype: a protocol datatype: ``BOOL``, ``UINT8`` to ``UINT64``, ``INT8`` to ``INT64``, ``FP16``, ``BF16``,
            ``FP32``, ``FP64`` or ``BYTES``.
        shape: the shape of one row, without the batch axis; -1 for a dimension that varies between requests.
        optional: whether a request may leave it out (inputs only); the callable then gets ``None``.
        labels: the meaning of each position of the last dimension, such as the classes of scores; shown in the
            model's metadata.
        dimensions: a name for each dimension of ``shape``, empty for a dimension without a name; shown by ``check``,
            and named by `Model.example_sizes`.
        ragged: whether the rows of a call have different sizes in the first dimension of ``shape``, which must be -1.
            For such an output the callable returns a list with an array for each row. For such an input it gets an
            array in which shorter rows end with ``padding``, and an argument ``NAME_count`` with the rows' sizes, of
            shape [rows, 1].
        padding: the value with which the shorter rows of a ragged input end; of ``BYTES`` it is always an empty text.

    Raises:
        DeclarationError: a field is invalid.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    optional: bool = False
    labels: Sequence[str] = ()
    dimensions: Sequence[str] = ()
    ragged: bool = False
    padding: float = 0

    def __post_init__(self) -> None:
        _check_name("tensor", self.name)
        if self.name == "headwater_report":
            raise DeclarationError(f"tensor {self.name!r}: the name is reserved")
        if self.datatype not in DATATYPES:
            raise DeclarationError(
                f"tensor {self.name!r}, datatype: expected one of {', '.join(DATATYPES)}, got {self.datatype!r}"
            )
        dims = tuple(self.shape)
        for dim in dims:
            if not isinstance(dim, int) or isinstance(dim, bool) or (dim < 1 and dim != -1):
                raise DeclarationError(
                    f"tensor {self.name!r}, shape: expected positive dimensions, or -1 for any size, got {dim!r}"
                )
        if not dims:
            raise DeclarationError(f"tensor {self.name!r}, shape: expected one row's shape such as [1], got []")
        object.__setattr__(self, "shape", dims)
        labels = tuple(self.labels)
        if labels and (isinstance(self.labels, str) or not all(isinstance(label, str) for label in labels)):
            raise DeclarationError(f"tensor {self.name!r}, labels: expected a list of texts, got {self.labels!r}")
        if labels and len(labels) != dims[-1]:
            raise DeclarationError(
                f"tensor {self.name!r}, labels: expected {dims[-1]}, a label for each place of the last dimension, got "
                f"{len(labels)}"
            )
        object.__setattr__(self, "labels", labels)
        if self.dimensions and len(self.dimensions) != len(dims):
            raise DeclarationError(
                f"tensor {self.name!r}, dimensions: expected {len(dims)} names, one for each dimension, got "
                f"{len(self.dimensions)}"
            )
        object.__setattr__(self, "dimensions", tuple(self.dimensions))
        if self.ragged and dims[0] != -1:
            raise DeclarationError(
                f"tensor {self.name!r}, ragged: expected a shape that begins with -1, got {list(dims)}"
            )
        if not _is_value(self.padding, self.datatype) or (self.padding and not self.ragged):
            expected = f"a number that {self.datatype} has" if self.ragged else "no padding: the tensor is not ragged"
            raise DeclarationError(f"tensor {self.name!r}, padding: expected {expected}, got {self.padding!r}")


@dataclass(frozen=True)
class State:
    """A tensor that the server keeps between the requests of a sequence. The callable gets the state after the request
    before as an argument, and returns the new state among its outputs; clients neither send nor receive it. It needs no
    declaration among the model's inputs and outputs, but may have one.

    Args:
        name: its name as an argument of the callable.
        datatype: a datatype of `Tensor` other than ``BYTES``.
        shape: the shape of one row, without the batch axis; all dimensions are fixed.
        initial: the value of all elements at the start of a sequence.
        output: its name in the callable's outputs; empty: ``name``.

    Raises:
        DeclarationError: a field is invalid.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    initial: float = 0
    output: str = ""

    def __post_init__(self) -> None:
        if not self.output:
            object.__setattr__(self, "output", self.name)
        for name in (self.name, self.output):
            object.__setattr__(self, "shape", Tensor(name, self.datatype, self.shape).shape)
        if self.datatype == "BYTES" or -1 in self.shape:
            got = "BYTES" if self.datatype == "BYTES" else list(self.shape)
            expected = "a datatype of numbers, and fixed dimensions"
            raise DeclarationError(f"state {self.name!r}: expected {expected}, got {got}")
        if not _is_value(self.initial, self.datatype):
            expected = f"a number that {self.datatype} has"
            raise DeclarationError(f"state {self.name!r}, initial: expected {expected}, got {self.initial!r}")


@dataclass(frozen=True)
class Parameter:
    """A declared request parameter.

    Args:
        name: its name in a request's ``parameters``.
        type: ``"str"``, ``"int"``, ``"float"`` or ``"bool"``.
        default: the value that the callable gets when a request leaves the parameter out; must fit ``type``.
        per: how requests with different values are batched. A client always sends one value for its request.
            ``"batch"``: the callable gets that value, and requests whose values differ never share a call. ``"row"``:
            such requests may share a call, and the callable gets a list with, for each row, its request's value.
        minimum, maximum: bounds of a number, inclusive; None: no bound.
        choices: the allowed values; None allows all.
        description: shown in the API's documentation.

    Raises:
        DeclarationError: a field is invalid, or ``default`` doesn't fit the other fields.
    """

    name: str
    type: Literal["str", "int", "float", "bool"]
    default: Scalar
    per: Literal["batch", "row"] = "batch"
    minimum: float | None = None
    maximum: float | None = None
    choices: Sequence[Scalar] | None = None
    description: str = ""

    def __post_init__(self) -> None:
        _check_name("parameter", self.name)
        if self.name in _RESERVED_PARAMETERS:
            raise DeclarationError(f"parameter {self.name!r}: the protocol already uses this name")
        if self.type not in _PARAMETER_TYPES:
            raise DeclarationError(
                f"parameter {self.name!r}, type: expected one of {', '.join(_PARAMETER_TYPES)}, got {self.type!r}"
            )
        if self.per not in ("batch", "row"):
            raise DeclarationError(f"parameter {self.name!r}, per: expected 'batch' or 'row', got {self.per!r}")
        if self.choices is not None:
            object.__setattr__(self, "choices", tuple(self.choices))
        object.__setattr__(self, "default", self.check(self.default))

    def check(self, value: object) -> Scalar:
        """Check a value and return it as the callable gets it. An int is converted if the type is float; no other value
        is converted.

        Raises:
            DeclarationError: the value has another type, is out of bounds or is no choice; `DeclarationError.expected`
                says which values are allowed.
        """
        wanted = _PARAMETER_TYPES[self.type]
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an int too large for a float is refused below
                value = float(value)
        if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
            raise self._misfit(self.type, value)
        assert isinstance(value, (str, int, float, bool))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.minimum is not None and not value >= self.minimum:
                raise self._misfit(f"at least {self.minimum}", value)
            if self.maximum is not None and not value <= self.maximum:
                raise self._misfit(f"at most {self.maximum}", value)
        if self.choices is not None and value not in self.choices:
            raise self._misfit(f"one of {', '.join(map(repr, self.choices))}", value)
        return value

    def _misfit(self, expected: str, value: object) -> DeclarationError:
        text = f"parameter {self.name!r}: expected {expected}, got {_shown(value)}"
        return DeclarationError(text, expected=expected)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python doesn't print integers of more than some thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


class Request(msgspec.Struct, frozen=True):
    """The request that a row belongs to, for a model that `Model.takes_requests`. In a warm-up all fields have their
    defaults."""

    id: str = ""
    """The ``X-Request-Id`` of the answer."""
    key: str = ""
    """The name of the API key; empty if there are no keys."""
    priority: int = 5
    """1 is the most urgent."""
    deadline_s: float | None = None
    """Time on the clock of `time.time` after which nobody waits for the answer; None: the answer is a stream."""
    headers: dict[str, str] = {}
    """The headers that ``options.headers`` names, by lower-case name; without the headers that the client left out."""
    response_headers: dict[str, str] = {}
    """Headers of the answer, which the model may set: those that ``options.response_headers`` names, with values of at
    most 1,000 printable ASCII characters."""


@dataclass(frozen=True)
class Embedding:
    """Maps a model's tensors to ``/v1/embeddings``; the model then serves this route too.

    Args:
        input: the ``BYTES [1]`` input that takes one text per row.
        output: the ``FP32`` output of shape ``[dimension]`` that holds the embedding.
        tokens: the ``INT32 [1]`` output with the number of tokens of each text, for ``usage``.
        dimensions: the declared ``int`` parameter (``per="row"``) that shortens an embedding, if the model can; 0 means
            full length. Rows of one batch may ask for different lengths: return all rows with the longest length that a
            row asks for. Each row needs valid values only in as many leading elements as it asked for; the gateway cuts
            off the rest.
        prompt: the declared ``str`` parameter (``per="row"``) that names the prompt before a text; its choices are the
            names.
        truncate: whether a text that is too long is cut if the request doesn't say; otherwise it is refused.

    The gateway recognizes two more features by their names. An optional ``INT32 [-1]`` input ``token_ids`` takes a
    text's tokens instead of the text, which is then empty; shorter rows are filled with -1 at the end. An ``int``
    parameter ``truncate_prompt_tokens`` (``per="row"``) cuts a text to that number of tokens, and -1 to as many as the
    model reads; with 0 a text that is too long must be `BadInput`.
    """

    input: str
    output: str
    tokens: str | None = None
    dimensions: str | None = None
    prompt: str | None = None
    truncate: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Reranking:
    """Maps a model's tensors to ``/v1/rerank``; the model then serves this route too.

    Args:
        query: the ``BYTES [1]`` input that takes the query, the same for all documents of a request.
        document: the ``BYTES [1]`` input that takes one document per row.
        score: the ``FP32 [1]`` output that says how well the document answers the query; higher is better.
        tokens: the ``INT32 [1]`` output with the number of tokens of each pair, for ``usage``.

    The gateway recognizes one more feature by its name: an ``int`` parameter ``max_tokens_per_doc`` (``per="row"``)
    cuts the document to that number of tokens.
    """

    query: str
    document: str
    score: str
    tokens: str | None = None


@dataclass(frozen=True)
class Classification:
    """Maps a model's tensors to ``/v1/classify``; the model then serves this route too.

    Args:
        input: the ``BYTES [1]`` input that takes one text or image per row.
        scores: the ``FP32`` output with a score for each of its ``labels``.
        tokens: the ``INT32 [1]`` output with the number of tokens of each text, for ``usage``.
        media: the kind of input; an image arrives as the base64 or data URL that the client sent.
    """

    input: str
    scores: str
    tokens: str | None = None
    media: Literal["text", "image"] = "text"


@dataclass(frozen=True)
class Transcription:
    """Maps a model's tensors to ``/v1/audio/transcriptions``; the model then serves this route too.

    Args:
        audio: the ``BYTES [1]`` input that takes an audio file per row.
        text: the ``BYTES [1]`` output with the transcript, in UTF-8.
        duration: the ``FP32 [1]`` output with the length of the audio in seconds.
        language: the declared ``str`` parameter (``per="row"``) with the spoken language, if the model takes it.
    """

    audio: str
    text: str
    duration: str | None = None
    language: str | None = None


class Model:
    """Base of a callable: declare its tensors, load it, call it.

    ::

        class Scale(Model):
            inputs = [Tensor("x", "FP32", [-1])]
            outputs = [Tensor("y", "FP32", [-1])]

            def __call__(self, x):
                return {"y": x * 2}

    The constructor gets the deployment's ``options`` as keyword arguments.
    """

    inputs: ClassVar[Sequence[Tensor]] = ()
    """The keyword arguments of `__call__`. Each array has the batch axis first, unless `batch` is None."""

    outputs: ClassVar[Sequence[Tensor]] = ()
    """The keys of the dict that `__call__` returns. All must be present, each with as many rows as the inputs."""

    state: ClassVar[Sequence[State]] = ()
    """States that the server keeps between the requests of a sequence. Each request then has a single row and names its
    sequence by the parameters ``sequence_id``, ``sequence_start`` and ``sequence_end``. Rows of several sequences may
    share a call, and any replica may take the next request of a sequence."""

    parameters: ClassVar[Sequence[Parameter]] = ()
    """Request parameters. If there are any, `__call__` also takes ``parameters``, a dict of name to value."""

    arrays: ClassVar[Literal["numpy", "torch"]] = "numpy"
    """How inputs arrive: numpy arrays, or torch tensors on the deployment's device. ``BYTES`` is always a numpy array
    of ``bytes`` objects. ``BF16`` arrives as float32 in numpy and as ``torch.bfloat16`` in torch. `__call__` may return
    either kind. The memory of an input may be reused for other calls once `__call__` has returned: copy any input that
    you keep."""

    idempotent: ClassVar[bool] = True
    """Whether computing the same rows twice is harmless. If so, the rows of a call that raises are retried in smaller
    groups until only the faulty rows fail, and a request of a lost replica is retried once on another replica. If not,
    or in a stream, all rows of the call fail."""

    mutates_features: ClassVar[bool] = False
    """For a step of a pipeline: whether `__call__` writes into inputs that are outputs of other steps. If it does, it
    gets copies of these inputs. Without this declaration a call that writes into such an input fails."""

    batch: ClassVar[Literal["rows"] | None] = "rows"
    """``"rows"``: arrays have a batch axis, and the rows of several requests may share a call. None: arrays have the
    declared shapes without a batch axis, a request is one call, and the callable gets the value of a ``per="row"``
    parameter instead of a list. A client that sends a batch axis has a call for each row."""

    takes_one_row: ClassVar[bool] = False
    """Whether each call has exactly one row, regardless of ``batching.max_batch_size``; implied by ``batch = None``."""

    takes_requests: ClassVar[bool] = False
    """Whether `__call__` also takes ``requests``, a list with the `Request` of each row. Rows of different requests may
    share a call."""

    request_headers: Sequence[str] = ()
    """``options.headers`` of a model that takes requests."""

    response_headers: Sequence[str] = ()
    """``options.response_headers`` of a model that takes requests."""

    bare_rows: ClassVar[bool] = False
    """Whether a request to ``/infer`` may also be a row without the batch axis; the answer then has no batch axis.
    Implied by ``batch = None``."""

    embedding: ClassVar[Embedding | None] = None
    """Set to serve the model at ``/v1/embeddings`` too."""

    reranking: ClassVar[Reranking | None] = None
    """Set to serve the model at ``/v1/rerank`` too."""

    classification: ClassVar[Classification | None] = None
    """Set to serve the model at ``/v1/classify`` too."""

    transcription: ClassVar[Transcription | None] = None
    """Set to serve the model at ``/v1/audio/transcriptions`` too."""

    example: ClassVar[Mapping[str, Any] | None] = None
    """A row, by input name, as nested lists: used for the warm-up and, unless long, shown in the API's documentation.
    Inputs without an example get zeros or the text ``"example"``; optional inputs are left out. If the warm-up fails
    and an input has no example, the model is served nevertheless, with a warning."""

    example_sizes: ClassVar[Mapping[str, int]] = {}
    """Sizes that dimensions with these names (`Tensor.dimensions`) have in the warm-up, in inputs without an example;
    other dimensions that vary have the size 1."""

    metrics: ClassVar[Metrics] = metrics
    """Declares custom metrics, which appear in the server's ``/metrics``, in `load` or ``__init__``:
    ``self.texts = self.metrics.counter("texts", "Texts read.", labels=["language"])``, and in `__call__`
    ``self.texts.inc(language="en")``. Calls of the warm-up are not counted."""

    def load(self, device: str) -> Awaitable[None] | None:
        """Called once per replica, before the first call. ``device`` is for example ``cpu`` or ``cuda:0``.

        `load` and `unload` may be ``async def``: they are then awaited in the event loop in which the calls run.
        """
        return None

    # `*args` is never used, but with it type checkers accept any signature in a subclass.
    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Compute the outputs, by name, for all rows of a batch. May be ``async def``. A generator, plain or async,
        streams: it yields such a dict for each result."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    def unload(self) -> Awaitable[None] | None:
        """Called once when the replica shuts down in an orderly way."""
        return None
