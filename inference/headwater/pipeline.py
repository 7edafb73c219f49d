"""Pipelines: steps joined by their tensors, as a configuration specifies them and as a checked plan.

`check_names` finds the faults that need no model; `make_plan` combines the signatures of the steps into a plan with the
pipeline's signature. Both name the place of each fault. A source is written ``STEP.OUTPUT``, or ``input.NAME`` for an
input of the pipeline itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, Literal

import msgspec

from headwater.errors import DeclarationError, did_you_mean
from headwater.model import Embedding, Parameter, Tensor
from headwater.signature import COUNT, HeadSpec, Signature, TensorSpec

__all__ = [
    "INPUT",
    "FeatureCacheSpec",
    "PipelineSpec",
    "Plan",
    "PlannedStep",
    "StepSpec",
    "Wire",
    "check_names",
    "make_plan",
    "tensor_text",
]

INPUT: Final = "input"
"""Stands for the pipeline itself in place of a step's name; no step may have this name."""


class FeatureCacheSpec(msgspec.Struct, frozen=True):
    """Limits of a fused replica's cache of a step's outputs."""

    max_bytes: int
    ttl_s: float = 0
    """Seconds for which a cached row is used; 0: as long as the replica runs."""
    per_key: bool = False
    """Whether a cached row is used only for the API key of the request for which it was computed."""


class StepSpec(msgspec.Struct, frozen=True):
    """A step, as configured."""

    name: str
    model: str = ""
    """As a deployment's ``model``, except language models; empty if another deployment computes the step."""
    deployment: str = ""
    """Name of the deployment that computes the step (placement ``graph`` only)."""
    options: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    """Source of each input. An input that isn't listed is matched by name."""
    timeout_s: float | None = None
    """For a head: see `HeadSpec.timeout_s`."""
    on_error: Literal["fail", "omit"] = "fail"
    """For a head: see `HeadSpec.on_error`."""
    cache: FeatureCacheSpec | None = None
    """Placement ``fused`` only: with ``graph``, gateways cache the answers of a step."""
    expand: str = ""
    """Name of the step whose ragged outputs this step takes: each element is a row of its own. Empty: the step takes no
    ragged outputs."""


class PipelineSpec(msgspec.Struct, frozen=True):
    """A pipeline, as configured."""

    steps: tuple[StepSpec, ...]
    heads: tuple[str, ...]
    """Steps whose outputs are the pipeline's outputs."""
    placement: Literal["fused", "graph"] = "fused"
    trunk: str | None = None
    """Name of the trunk, if the configuration has a trunk and heads; None: the configuration has a graph of steps."""
    embedding: Embedding | None = None


class Wire(msgspec.Struct, frozen=True):
    """The source of a step's input."""

    input: str
    step: str
    """`INPUT` for the pipeline itself."""
    output: str

    @property
    def source(self) -> str:
        """The source as a configuration writes it."""
        return f"{self.step}.{self.output}"


class PlannedStep(msgspec.Struct, frozen=True):
    """A step with its signature and its inputs' sources."""

    spec: StepSpec
    signature: Signature
    wires: tuple[Wire, ...]
    """The sources of the connected inputs; an input that isn't connected is optional."""
    expected: dict[str, TensorSpec] = {}
    """For each connected input, the tensor that must arrive: the producer's declaration combined with the step's, or
    the step's declaration if the source is an input of the pipeline."""
    elements_of: str = ""
    """Name of the step whose ragged outputs have this step's rows as elements: `StepSpec.expand` of this step or of a
    step before it. Empty: the step's rows are the pipeline's."""

    @property
    def name(self) -> str:
        """The step's name."""
        return self.spec.name

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs as the pipeline has them: if the step's rows are elements, each is ragged, and has its counts."""
        if not self.elements_of:
            return self.signature.outputs
        outputs: list[TensorSpec] = []
        for spec in self.signature.outputs:
            shape, dimensions = (-1, *spec.shape), ("", *spec.dimensions) if spec.dimensions else ()
            outputs.append(msgspec.structs.replace(spec, shape=shape, dimensions=dimensions, ragged=True))
            outputs.append(TensorSpec(COUNT.format(spec.name), "INT32", (1,), counts=spec.name))
        return tuple(outputs)

    @property
    def parents(self) -> tuple[str, ...]:
        """Names of the steps that are sources of this step's inputs, each once."""
        return tuple(dict.fromkeys(wire.step for wire in self.wires if wire.step != INPUT))


class Plan(msgspec.Struct, frozen=True):
    """A pipeline with steps that were checked to fit together."""

    steps: tuple[PlannedStep, ...]
    """In topological order."""
    signature: Signature
    """The pipeline's signature."""

    def needed(self, heads: Iterable[str]) -> set[str]:
        """The given heads and all steps that must run before them."""
        wanted = set(heads)
        for step in reversed(self.steps):
            if step.name in wanted:
                wanted.update(step.parents)
        return wanted


def tensor_text(datatype: str, shape: Sequence[int]) -> str:
    """A tensor as messages show it, such as ``FP32 [8, 384]``."""
    return f"{datatype} [{', '.join(map(str, shape))}]"


def check_names(spec: PipelineSpec) -> None:
    """Check a pipeline as far as its configuration alone allows.

    Raises:
        DeclarationError: there are no heads, a head is listed twice or has a cache, a step or head doesn't exist, a
            source is malformed, a step expands itself, or there is a cycle. Names all faults, except a cycle, which is
            looked for last.
    """
    names = [step.name for step in spec.steps]
    names_text = _listed(names)
    faults: list[str] = []
    if not spec.heads:
        faults.append(f"pipeline, heads: expected at least one of its steps {names_text}, got none")
    for head in dict.fromkeys(spec.heads):
        if head not in names:
            hint = did_you_mean(head, names)
            faults.append(f"pipeline, heads: expected some of its steps {names_text}, got `{head}`{hint}")
        if spec.heads.count(head) > 1:
            faults.append(f"pipeline, heads: `{head}` is listed {spec.heads.count(head)} times")
    for step in spec.steps:
        if step.cache is not None and step.name in spec.heads:
            faults.append(
                f"step `{step.name}`, cache: expected a step that is no head; `cache` of the deployment keeps answers"
            )
        if step.expand and (step.expand == step.name or step.expand not in names):
            hint = did_you_mean(step.expand, names)
            faults.append(f"step `{step.name}`, expand: expected another step, got `{step.expand}`{hint}")
        for input_name, source in step.inputs.items():
            with _noting(faults):
                _split(step.name, input_name, source, names)
    if faults:
        raise DeclarationError(*faults)
    parents = {step.name: {source.partition(".")[0] for source in step.inputs.values()} for step in spec.steps}
    for name, stated in parents.items():
        if spec.trunk is not None and name != spec.trunk:
            stated.add(spec.trunk)
        stated.discard(INPUT)
    _order(parents)


def make_plan(spec: PipelineSpec, signatures: Mapping[str, Signature], *, name: str, max_batch_size: int) -> Plan:
    """Combine the steps, given their signatures by name, into the plan of a deployment.

    Raises:
        DeclarationError: as `check_names`; or the steps don't fit together, a step is neither a head nor a source, a
            cache can't work, or the pipeline's signature contradicts itself. The message names the place of each fault
            that it reports.
    """
    check_names(spec)
    inputs: dict[str, tuple[str, TensorSpec]] = {}
    planned: dict[str, PlannedStep] = {}
    faults: list[str] = []
    wires = {step.name: _wires(spec, step, signatures, faults) for step in spec.steps}
    levels = _levels(spec, wires)
    for step in spec.steps:
        signature = signatures[step.name]
        expected: dict[str, TensorSpec] = {}
        tensors = {tensor.name: tensor for tensor in signature.inputs}
        for wire in wires[step.name]:
            tensor = expected[wire.input] = tensors[wire.input]
            with _noting(faults):
                if wire.step == INPUT:
                    _add_input(inputs, step.name, wire.output, tensor)
                else:
                    expected[wire.input] = _joined(step.name, wire, tensor, signatures[wire.step], levels)
        planned[step.name] = PlannedStep(step, signature, tuple(wires[step.name]), expected, levels[step.name])
        ragged = [tensor.name for tensor in signature.inputs if tensor.ragged]
        if ragged and len(spec.steps) > 1:
            faults.append(
                f"step `{step.name}`, input `{ragged[0]}`: expected no ragged inputs in a pipeline; deploy the model "
                "by itself"
            )
        if signature.states and [step.name for step in spec.steps] != [name]:
            faults.append(
                f"step `{step.name}`, state: a pipeline keeps no states between requests; deploy the model by itself"
            )
        if signature.response_headers and len(spec.steps) > 1:
            faults.append(
                f"step `{step.name}`, options.response_headers: a pipeline's step can't set headers; remove it"
            )
    for planned_step in planned.values():
        faults += (*_cache_faults(planned_step), *_expand_faults(planned_step, planned))
    if faults:
        raise DeclarationError(*faults)
    order = _order({step_name: set(step.parents) for step_name, step in planned.items()})
    used = {*spec.heads, *(parent for step in planned.values() for parent in step.parents)}
    for step_name in planned:
        if step_name not in used:
            raise DeclarationError(
                f"step `{step_name}`: neither a head nor an input of another step; map one of its outputs, list it "
                "under `heads`, or remove it"
            )
    steps = tuple(planned[step_name] for step_name in order)
    pipeline_inputs = tuple(tensor for _, tensor in inputs.values())
    return Plan(steps, _signature(spec, steps, pipeline_inputs, name=name, max_batch_size=max_batch_size))


def _cache_faults(step: PlannedStep) -> Iterator[str]:
    """Reasons why the cache that a step's configuration asks for can't work."""
    if step.spec.cache is None:
        return
    if step.parents:
        yield (
            f"step `{step.name}`, cache: expected a step that reads the pipeline's inputs only, got a step that reads "
            f"{_listed(step.parents)}; move `cache` to a step before it"
        )
    if any(tensor.ragged for tensor in step.signature.outputs):
        yield f"step `{step.name}`, cache: expected a step without ragged outputs; remove `cache`"
    with contextlib.suppress(DeclarationError):
        step.signature.check_cacheable()
        return
    yield f"step `{step.name}`, cache: expected a model that answers equal rows equally; remove `cache`"


def _expand_faults(step: PlannedStep, planned: Mapping[str, PlannedStep]) -> Iterator[str]:
    """Reasons why a step can't have elements as rows."""
    if not step.elements_of:
        return
    where, source = f"step `{step.name}`", planned[step.elements_of]
    if source.elements_of:
        yield (
            f"{where}, expand: expected a step whose rows are the pipeline's, got `{source.name}`, whose rows are "
            f"elements of `{source.elements_of}`; only one level of elements is possible"
        )
    ragged = [tensor.name for tensor in source.signature.outputs if tensor.ragged]
    if not any(wire.step == source.name and wire.output in ragged for wire in step.wires) and not any(
        planned[parent].elements_of for parent in step.parents
    ):
        yield (
            f"{where}, expand: expected an input from a ragged output of `{source.name}`, got none; its ragged outputs "
            f"are: {_listed(ragged) or 'none'}"
        )
    if step.signature.streams or source.signature.streams:
        streaming = step.name if step.signature.streams else source.name
        yield f"{where}, expand: expected no step that streams, got `{streaming}`"
    if any(tensor.ragged for tensor in step.signature.outputs):
        yield f"{where}: expected no ragged outputs of a step whose rows are elements of `{source.name}`"


@contextlib.contextmanager
def _noting(faults: list[str]) -> Iterator[None]:
    """Collect the faults of a check that raises, so that the checks after it run too."""
    try:
        yield
    except DeclarationError as error:
        faults += error.args


def _split(step: str, name: str, source: str, step_names: Sequence[str]) -> tuple[str, str]:
    """The step and the output that a source names.

    Raises:
        DeclarationError: the source is malformed, or names an unknown step.
    """
    where = f"step `{step}`, input `{name}`"
    producer, dot, output = source.partition(".")
    if not dot or not producer or not output:
        raise DeclarationError(f"{where}: expected STEP.OUTPUT or {INPUT}.NAME, got `{source}`")
    if producer != INPUT and producer not in step_names:
        hint = did_you_mean(producer, step_names)
        raise DeclarationError(f"{where}: unknown step `{producer}`; expected {_listed(step_names)} or `{INPUT}`{hint}")
    if producer == INPUT:
        try:
            Tensor(output, "BYTES", [1])
        except DeclarationError as error:  # not a valid tensor name
            raise DeclarationError(f"{where}: {error}") from None
    return producer, output


def _order(parents: Mapping[str, set[str]]) -> list[str]:
    """The steps in topological order; steps that don't depend on each other stay in the order of the configuration.

    Raises:
        DeclarationError: there is a cycle.
    """
    sorter = TopologicalSorter(parents)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " -> ".join(f"`{name}`" for name in error.args[1])
        raise DeclarationError(f"pipeline: expected steps without a cycle, got {circle}") from None
    rank = {name: index for index, name in enumerate(parents)}
    ready: list[str] = []
    order: list[str] = []
    while sorter.is_active():
        ready = sorted((*ready, *sorter.get_ready()), key=rank.__getitem__)
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return order


def _trunk_inputs(spec: PipelineSpec, signatures: Mapping[str, Signature]) -> set[str]:
    """Names of the pipeline's inputs that the trunk takes."""
    trunk = next((step for step in spec.steps if step.name == spec.trunk), None)
    if trunk is None:
        return set()
    names = (tensor.name for tensor in signatures[trunk.name].inputs)
    return {trunk.inputs.get(name, f"{INPUT}.{name}").partition(".")[2] for name in names}


def _wires(spec: PipelineSpec, step: StepSpec, signatures: Mapping[str, Signature], faults: list[str]) -> list[Wire]:
    """The sources of a step's connected inputs; what is wrong with them is added to ``faults``."""
    inputs = signatures[step.name].inputs
    names = [tensor.name for tensor in inputs]
    for input_name in step.inputs:
        if input_name not in names:
            hint = did_you_mean(input_name, names)
            faults.append(
                f"step `{step.name}`, inputs: expected some of its inputs {_listed(names)}, got `{input_name}`{hint}"
            )
    wires: list[Wire] = []
    for tensor in inputs:
        with _noting(faults):
            wire = _wire(spec, step, tensor, signatures)
            if wire is not None:
                wires.append(wire)
    return wires


def _levels(spec: PipelineSpec, wires: Mapping[str, Sequence[Wire]]) -> dict[str, str]:
    """`PlannedStep.elements_of` of each step. There may be a cycle."""
    levels = {step.name: step.expand for step in spec.steps}
    for _ in levels:  # each round reaches at least the next step of a chain
        for name, sources in wires.items():
            levels[name] = levels[name] or next((levels[wire.step] for wire in sources if levels.get(wire.step)), "")
    return levels


def _wire(spec: PipelineSpec, step: StepSpec, tensor: TensorSpec, signatures: Mapping[str, Signature]) -> Wire | None:
    """The source of an input. If it isn't configured: the pipeline's input of the same name for the trunk; for other
    steps the only tensor of that name among the trunk's inputs and outputs or, without a trunk, among the outputs of
    other steps. None for an optional input without a source.

    Raises:
        DeclarationError: there is no such tensor, or more than one.
    """
    where = f"step `{step.name}`, input `{tensor.name}`"
    if tensor.name in step.inputs:
        producer, output = _split(step.name, tensor.name, step.inputs[tensor.name], list(signatures))
        outputs = [output_spec.name for output_spec in signatures[producer].outputs] if producer != INPUT else [output]
        if output not in outputs:
            hint = did_you_mean(output, outputs)
            raise DeclarationError(
                f"{where}: no step produces `{producer}.{output}`; the outputs of `{producer}` are "
                f"{_listed(outputs)}{hint}"
            )
        return Wire(tensor.name, producer, output)
    if step.name == spec.trunk:
        return Wire(tensor.name, INPUT, tensor.name)
    candidates = [
        Wire(tensor.name, producer, tensor.name)
        for producer in signatures
        if producer != step.name
        and (spec.trunk is None or producer == spec.trunk)
        and tensor.name in {output_spec.name for output_spec in signatures[producer].outputs}
    ]
    if tensor.name in _trunk_inputs(spec, signatures):
        candidates.append(Wire(tensor.name, INPUT, tensor.name))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        both = " and ".join(f"`{wire.source}`" for wire in candidates)
        raise DeclarationError(
            f"{where}: doubly mapped, to {both}; say which: `inputs: {{{tensor.name}: {candidates[0].source}}}`"
        )
    if tensor.optional:
        return None
    there = [output_spec.name for name in signatures if name != step.name for output_spec in signatures[name].outputs]
    lacking = "no other step has an output" if spec.trunk is None else f"`{spec.trunk}` has no input or output"
    raise DeclarationError(
        f"{where}: unmapped: {lacking} `{tensor.name}`; say where it comes from: "
        f"`inputs: {{{tensor.name}: STEP.OUTPUT}}`, or `{INPUT}.{tensor.name}` for an input of the pipeline"
        f"{did_you_mean(tensor.name, there)}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _unified(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that fits both shapes, with -1 where both vary; None if the shapes contradict each other."""
    if len(first) != len(second) or any(
        -1 not in pair and pair[0] != pair[1] for pair in zip(first, second, strict=True)
    ):
        return None
    return tuple(max(pair) for pair in zip(first, second, strict=True))


def _joined(step: str, wire: Wire, taken: TensorSpec, producer: Signature, levels: Mapping[str, str]) -> TensorSpec:
    """The tensor that passes from one step to another; of a ragged output each element, which is at least [1]."""
    output_spec = next(tensor for tensor in producer.outputs if tensor.name == wire.output)
    level, source_level = levels[step], wire.step if output_spec.ragged else levels[wire.step]
    if source_level and not level:
        raise DeclarationError(
            f"step `{step}`, input `{wire.input}`: expected an output with an array for all rows, got the ragged "
            f"`{wire.source}`; to take its elements as rows, set `expand: {wire.step}`"
        )
    if source_level and source_level != level:
        raise DeclarationError(
            f"step `{step}`, input `{wire.input}`: expected elements of `{level}`, as in other inputs, got elements of "
            f"`{source_level}` from `{wire.source}`; a step takes elements of one step"
        )
    if output_spec.ragged:
        output_spec = msgspec.structs.replace(output_spec, shape=output_spec.shape[1:] or (1,))
    shape = _unified(taken.shape, output_spec.shape)
    if taken.datatype != output_spec.datatype or shape is None:
        aspect = "datatype" if taken.datatype != output_spec.datatype else "shape"
        raise DeclarationError(
            f"step `{step}`, input `{wire.input}`: {aspect} mismatch: expected "
            f"{tensor_text(taken.datatype, taken.shape)}, got {tensor_text(output_spec.datatype, output_spec.shape)} "
            f"from `{wire.source}`"
        )
    return TensorSpec(wire.input, taken.datatype, shape, taken.optional)


def _add_input(inputs: dict[str, tuple[str, TensorSpec]], step: str, name: str, tensor: TensorSpec) -> None:
    """Add a step's input to the pipeline's inputs. Each pipeline input is stored with the first step that takes it."""
    new = msgspec.structs.replace(tensor, name=name, labels=())
    first, pipeline_input = inputs.setdefault(name, (step, new))
    shape = _unified(pipeline_input.shape, tensor.shape)
    if shape is None or pipeline_input.datatype != tensor.datatype:
        raise DeclarationError(
            f"pipeline, input `{name}`: step `{first}` expects "
            f"{tensor_text(pipeline_input.datatype, pipeline_input.shape)}, "
            f"step `{step}` {tensor_text(tensor.datatype, tensor.shape)}"
        )
    example_shape = pipeline_input.example_shape or tensor.example_shape
    inputs[name] = (
        first,
        msgspec.structs.replace(
            pipeline_input,
            shape=shape,
            optional=pipeline_input.optional and tensor.optional,
            example_shape=tuple(size if dim < 0 else dim for dim, size in zip(shape, example_shape, strict=False)),
        ),
    )


def _signature(
    spec: PipelineSpec, steps: Sequence[PlannedStep], inputs: tuple[TensorSpec, ...], *, name: str, max_batch_size: int
) -> Signature:
    by_name = {step.name: step for step in steps}
    owner: dict[str, str] = {}
    outputs: list[TensorSpec] = []
    for head in spec.heads:
        for tensor in by_name[head].outputs:
            if tensor.name in owner:
                raise DeclarationError(
                    f"pipeline: heads `{owner[tensor.name]}` and `{head}` both have an output `{tensor.name}`; "
                    "rename one"
                )
            owner[tensor.name] = head
            outputs.append(tensor)
    if all(tensor.optional for tensor in inputs):
        optional = _listed(tensor.name for tensor in inputs)
        raise DeclarationError(
            "pipeline, inputs: expected at least one required input, got "
            f"{f'only {optional}' if optional else 'none'}; map a step's input to `{INPUT}.NAME`"
        )
    streaming = [step.name for step in steps if step.signature.streams]
    if streaming and spec.placement == "graph":
        raise DeclarationError(
            f"step `{streaming[0]}` streams, which `placement: graph` can't carry from one deployment to another; "
            "expected `placement: fused`"
        )
    if len(streaming) > 1:
        both = " and ".join(f"`{step}`" for step in streaming)
        raise DeclarationError(f"pipeline: expected at most one step that streams, got {both}")
    example: dict[str, Any] = {}
    for step in steps:
        for wire in step.wires:
            if wire.step == INPUT and wire.output not in example and wire.input in (step.signature.example or {}):
                example[wire.output] = (step.signature.example or {})[wire.input]
    return Signature(
        name=name,
        inputs=inputs,
        outputs=tuple(outputs),
        parameters=_parameters(steps, name),
        max_batch_size=max_batch_size,
        idempotent=all(step.signature.idempotent for step in steps),
        by_key=any(step.spec.cache.per_key for step in steps if step.spec.cache is not None),
        embedding=_embedding(spec.embedding, inputs, outputs),
        example=example or None,
        description=_description(spec, steps),
        heads=tuple(
            HeadSpec(
                head,
                tuple(tensor.name for tensor in by_name[head].outputs),
                by_name[head].spec.timeout_s,
                by_name[head].spec.on_error,
            )
            for head in spec.heads
        ),
        streams=bool(streaming),
        headers=tuple(sorted({name for step in steps for name in step.signature.headers})),
        states=tuple(state for step in steps for state in step.signature.states),
        overlaps=spec.placement == "fused" and any(step.signature.overlaps for step in steps),
    )


def _parameters(steps: Sequence[PlannedStep], name: str) -> tuple[Parameter, ...]:
    """The parameters of a pipeline with this name. A plain model is a single step with the pipeline's name."""
    is_plain = [step.name for step in steps] == [name]
    parameters: dict[str, tuple[str, Parameter]] = {}
    for step in steps:
        for parameter in step.signature.parameters:
            first, earlier = parameters.setdefault(parameter.name, (step.name, parameter))
            if earlier != parameter:
                pairs = [(field, getattr(earlier, field), getattr(parameter, field)) for field in vars(earlier)]
                fields = "; ".join(
                    f"{field}: {value!r} and {other_value!r}"
                    for field, value, other_value in pairs
                    if value != other_value
                )
                raise DeclarationError(
                    f"pipeline, parameter `{parameter.name}`: steps `{first}` and `{step.name}` declare it "
                    f"differently ({fields}); declare it alike, or rename one"
                )
            if parameter.name == "heads" and not is_plain:
                raise DeclarationError(
                    f"step `{step.name}`, parameter `heads`: in a pipeline it picks the heads; rename it"
                )
    return tuple(parameter for _, parameter in parameters.values())


def _embedding(
    embedding: Embedding | None, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Embedding | None:
    if embedding is None:
        return None
    wanted = [("input", embedding.input, inputs, "BYTES", (1,)), ("output", embedding.output, outputs, "FP32", (-1,))]
    if embedding.tokens is not None:
        wanted.append(("tokens", embedding.tokens, outputs, "INT32", (1,)))
    for field, name, tensors, datatype, shape in wanted:
        tensor = next((spec for spec in tensors if spec.name == name), None)
        if tensor is None or tensor.datatype != datatype or _unified(tensor.shape, shape) is None:
            side = "input" if field == "input" else "output"
            expected = f"an {side} {tensor_text(datatype, shape)}"
            got = f"no {side} `{name}`" if tensor is None else tensor_text(tensor.datatype, tensor.shape)
            raise DeclarationError(f"pipeline, embedding.{field}, `{name}`: expected {expected}, got {got}")
    return embedding


def _description(spec: PipelineSpec, steps: Sequence[PlannedStep]) -> str:
    if len(steps) == 1:
        return steps[0].signature.description
    lead = " ".join(step.signature.description for step in steps if step.name not in spec.heads)
    heads = [f"{step.name}: {step.signature.description}".rstrip(".: ") for step in steps if step.name in spec.heads]
    return " ".join(filter(None, (lead, "Heads:", "; ".join(heads)))) + "."
