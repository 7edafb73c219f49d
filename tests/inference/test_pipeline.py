"""Joining the steps of a pipeline: what is refused, with every name, and what comes of those that fit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import DeclarationError
from headwater.model import Embedding, Parameter
from headwater.pipeline import INPUT, FeatureCacheSpec, PipelineSpec, Plan, StepSpec, Wire, check_names, make_plan
from headwater.signature import HeadSpec, Signature, TensorSpec


def tensor(text: str) -> TensorSpec:
    """From ``x FP32 [8, -1]``, with ``?`` at its end if it is optional, ``*`` if it is ragged; ``x`` alone is FP32
    [4]."""
    found = re.fullmatch(r"(\S+?)(?: (\w+) \[(.*)\])?([?*]?)", text)
    assert found is not None
    name, datatype, dims, mark = found.groups()
    shape = tuple(map(int, dims.split(","))) if dims else (4,)
    return TensorSpec(name, datatype or "FP32", shape, mark == "?", ragged=mark == "*")


def model(inputs: str, outputs: str, **fields: Any) -> Signature:
    """A step's signature; tensors stand between semicolons."""
    taken, given = (tuple(tensor(one.strip()) for one in side.split(";")) for side in (inputs, outputs))
    return Signature("any", taken, given, **fields)


TRUNK = model("x", "features FP32 [8]")
HEAD_A = model("features FP32 [8]", "a")
HEAD_B = model("features FP32 [8]", "b")

Steps = Mapping[str, Signature]
Inputs = Mapping[str, dict[str, str]]


def graph(
    steps: Steps,
    heads: tuple[str, ...],
    inputs: Inputs | None = None,
    expands: Mapping[str, str] | None = None,
    **fields: Any,
) -> PipelineSpec:
    mapped, expanded = inputs or {}, expands or {}
    specs = (StepSpec(name, "m:M", inputs=mapped.get(name, {}), expand=expanded.get(name, "")) for name in steps)
    return PipelineSpec(tuple(specs), heads, **fields)


def planned(
    steps: Steps,
    heads: tuple[str, ...] | None = None,
    inputs: Inputs | None = None,
    expands: Mapping[str, str] | None = None,
    **fields: Any,
) -> Plan:
    """A trunk and its heads if one step is called ``trunk``, else a graph."""
    if "trunk" in steps:
        heads = heads or tuple(name for name in steps if name != "trunk")
        fields = {"trunk": "trunk", **fields}
    assert heads is not None
    return make_plan(graph(steps, heads, inputs, expands, **fields), steps, name="whole", max_batch_size=16)


def refused(*arguments: Any, **fields: Any) -> str:
    with pytest.raises(DeclarationError) as caught:
        planned(*arguments, **fields)
    return str(caught.value)


def wires(plan: Plan, step: str) -> dict[str, str]:
    return {wire.input: wire.source for one in plan.steps if one.name == step for wire in one.wires}


# What is refused.


def test_an_unmapped_tensor_in_a_graph() -> None:
    message = refused({"a": model("image", "y")}, ("a",))
    assert message == (
        "step `a`, input `image`: unmapped: no other step has an output `image`; say where it comes from: "
        "`inputs: {image: STEP.OUTPUT}`, or `input.image` for an input of the pipeline"
    )


def test_an_unmapped_tensor_beside_a_trunk_although_another_head_has_it() -> None:
    message = refused({"trunk": TRUNK, "a": HEAD_A, "b": model("a", "b")})
    assert "step `b`, input `a`: unmapped: `trunk` has no input or output `a`; say where it comes from" in message


def test_a_tensor_that_two_steps_produce() -> None:
    steps = {"left": model("x", "y"), "right": model("x", "y"), "join": model("y", "z")}
    source = {"x": "input.x"}
    message = refused(steps, ("join",), {"left": source, "right": source})
    assert message == (
        "step `join`, input `y`: doubly mapped, to `left.y` and `right.y`; say which: `inputs: {y: left.y}`"
    )


def test_a_tensor_that_the_trunk_produces_and_the_pipeline_has() -> None:
    message = refused({"trunk": model("x", "x"), "a": model("x", "y")})
    assert (
        "step `a`, input `x`: doubly mapped, to `trunk.x` and `input.x`; say which: `inputs: {x: trunk.x}`" in message
    )


def test_an_optional_input_that_could_come_from_two_steps() -> None:
    steps = {"left": model("x", "y"), "right": model("x", "y"), "join": model("z; y?", "w")}
    source = {"x": "input.x"}
    message = refused(steps, ("join",), {"left": source, "right": source, "join": {"z": "input.z"}})
    assert "step `join`, input `y`: doubly mapped, to `left.y` and `right.y`" in message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.y", "step `a`, input `features`: unknown step `gone`; expected `trunk`, `a` or `input`"),
        ("features", "step `a`, input `features`: expected STEP.OUTPUT or input.NAME, got `features`"),
        ("trunk.", "step `a`, input `features`: expected STEP.OUTPUT or input.NAME, got `trunk.`"),
        (".features", "step `a`, input `features`: expected STEP.OUTPUT or input.NAME, got `.features`"),
        ("", "step `a`, input `features`: expected STEP.OUTPUT or input.NAME, got ``"),
        ("input.two words", "step `a`, input `features`: tensor name: expected letters, digits"),
        ("input.headwater_report", "step `a`, input `features`: tensor 'headwater_report': the name is reserved"),
    ],
)
def test_a_source_that_is_none_is_known_without_any_model(source: str, message: str) -> None:
    spec = graph({"trunk": TRUNK, "a": HEAD_A}, ("a",), {"a": {"features": source}}, trunk="trunk")
    with pytest.raises(DeclarationError) as caught:
        check_names(spec)
    assert message in str(caught.value)


def test_an_output_that_nobody_produces() -> None:
    message = refused({"trunk": model("x", "features; norm"), "a": HEAD_A}, None, {"a": {"features": "trunk.feature"}})
    assert message == (
        "step `a`, input `features`: no step produces `trunk.feature`; the outputs of `trunk` are `features`, `norm`; "
        "did you mean `features`?"
    )


def test_an_input_that_the_step_does_not_have() -> None:
    message = refused({"trunk": TRUNK, "a": HEAD_A}, None, {"a": {"feature": "trunk.features"}})
    assert (
        message == "step `a`, inputs: expected some of its inputs `features`, got `feature`; did you mean `features`?"
    )


def test_a_stated_cycle_is_told_in_the_direction_of_the_tensors() -> None:
    steps = {name: model("x", "y") for name in "abc"}
    spec = graph(steps, ("a",), {"a": {"x": "c.y"}, "b": {"x": "a.y"}, "c": {"x": "b.y"}})
    with pytest.raises(DeclarationError) as caught:
        check_names(spec)
    circle = str(caught.value).removeprefix("pipeline: expected steps without a cycle, got ").split(" -> ")
    assert len(circle) == 4
    follows = {"`a`": "`b`", "`b`": "`c`", "`c`": "`a`"}
    assert all(follows[one] == other for one, other in itertools.pairwise(circle))


def test_a_step_that_reads_itself() -> None:
    message = refused({"a": model("x", "y")}, ("a",), {"a": {"x": "a.y"}})
    assert message == "pipeline: expected steps without a cycle, got `a` -> `a`"


def test_a_trunk_that_reads_a_head() -> None:
    message = refused({"trunk": TRUNK, "a": HEAD_A}, None, {"trunk": {"x": "a.a"}})
    assert "expected steps without a cycle, got " in message
    assert "`trunk`" in message
    assert "`a`" in message


def test_a_cycle_through_names_alone() -> None:
    message = refused({"a": model("x", "y"), "b": model("y", "x")}, ("b",))
    assert message in {
        "pipeline: expected steps without a cycle, got `a` -> `b` -> `a`",
        "pipeline: expected steps without a cycle, got `b` -> `a` -> `b`",
    }


def test_datatypes_that_differ() -> None:
    message = refused({"trunk": TRUNK, "a": model("features FP16 [8]", "a")})
    assert message == (
        "step `a`, input `features`: datatype mismatch: expected FP16 [8], got FP32 [8] from `trunk.features`"
    )


@pytest.mark.parametrize("shape", ["9", "8,1", "-1,8", "8,8"])
def test_shapes_that_differ(shape: str) -> None:
    message = refused({"trunk": TRUNK, "a": model(f"features FP32 [{shape}]", "a")})
    expected = shape.replace(",", ", ")
    assert message == (
        f"step `a`, input `features`: shape mismatch: expected FP32 [{expected}], got FP32 [8] from `trunk.features`"
    )


def test_two_heads_with_an_output_of_one_name() -> None:
    message = refused({"trunk": TRUNK, "a": model("features FP32 [8]", "p; y"), "b": model("features FP32 [8]", "y")})
    assert message == "pipeline: heads `a` and `b` both have an output `y`; rename one"


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((), "pipeline, heads: expected at least one of its steps `trunk`, `a`, got none"),
        (("b",), "pipeline, heads: expected some of its steps `trunk`, `a`, got `b`"),
        (("a", "a"), "pipeline, heads: `a` is listed 2 times"),
    ],
)
def test_heads_that_are_none(heads: tuple[str, ...], message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        check_names(graph({"trunk": TRUNK, "a": HEAD_A}, heads))
    assert str(caught.value) == message


def test_a_step_that_feeds_nothing() -> None:
    steps = {"trunk": model("x", "features"), "spare": model("features", "s"), "a": model("features", "a")}
    message = refused(steps, ("a",))
    assert message.startswith("step `spare`: neither a head nor an input of another step; map one of its outputs")


def test_a_trunk_that_no_head_reads() -> None:
    message = refused({"trunk": TRUNK, "a": model("x", "a")})
    assert message.startswith("step `trunk`: neither a head nor an input of another step")


def test_a_parameter_that_two_steps_declare_differently() -> None:
    one, other = (Parameter("k", "int", default, "batch", maximum=9) for default in (1, 2))
    trunk = model("x", "features FP32 [8]", parameters=(one,))
    message = refused({"trunk": trunk, "a": model("features FP32 [8]", "a", parameters=(other,))})
    assert message == (
        "pipeline, parameter `k`: steps `trunk` and `a` declare it differently (default: 1 and 2); declare it alike, "
        "or rename one"
    )


def test_a_parameter_called_heads() -> None:
    head = model("features FP32 [8]", "a", parameters=(Parameter("heads", "int", 8, "batch"),))
    message = refused({"trunk": TRUNK, "a": head})
    assert message == "step `a`, parameter `heads`: in a pipeline it picks the heads; rename it"


@pytest.mark.parametrize("other", ["x FP32 [5]", "x INT32 [4]", "x FP32 [4, 1]"])
def test_an_input_of_the_pipeline_on_which_steps_disagree(other: str) -> None:
    steps = {"a": model("x FP32 [4]", "a"), "b": model(other, "b")}
    message = refused(steps, ("a", "b"), {name: {"x": "input.x"} for name in steps})
    wanted = other.removeprefix("x ")
    assert message == f"pipeline, input `x`: step `a` expects FP32 [4], step `b` {wanted}"


def test_no_input_of_the_pipeline() -> None:
    message = refused({"a": model("x?", "a")}, ("a",))
    assert message == (
        "pipeline, inputs: expected at least one required input, got none; map a step's input to `input.NAME`"
    )


def test_optional_inputs_of_the_pipeline_only() -> None:
    message = refused({"trunk": model("x?; z?", "features FP32 [8]"), "a": HEAD_A})
    assert "pipeline, inputs: expected at least one required input, got only `x`, `z`" in message


TEXT_TRUNK = model("text BYTES [1]; n", "features FP32 [8]")
EMBEDDER = model("features FP32 [8]", "vector FP32 [384]; count INT32 [1]; matrix FP32 [2, 3]")


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (("txt", "vector"), "embedding.input, `txt`: expected an input BYTES [1], got no input `txt`"),
        (("vector", "vector"), "embedding.input, `vector`: expected an input BYTES [1], got no input `vector`"),
        (("n", "vector"), "embedding.input, `n`: expected an input BYTES [1], got FP32 [4]"),
        (("text", "vec"), "embedding.output, `vec`: expected an output FP32 [-1], got no output `vec`"),
        (("text", "features"), "embedding.output, `features`: expected an output FP32 [-1], got no output `features`"),
        (("text", "count"), "embedding.output, `count`: expected an output FP32 [-1], got INT32 [1]"),
        (("text", "matrix"), "embedding.output, `matrix`: expected an output FP32 [-1], got FP32 [2, 3]"),
        (("text", "vector", "n"), "embedding.tokens, `n`: expected an output INT32 [1], got no output `n`"),
        (("text", "vector", "vector"), "embedding.tokens, `vector`: expected an output INT32 [1], got FP32 [384]"),
    ],
)
def test_an_embedding_that_maps_to_nothing(embedding: tuple[str, ...], message: str) -> None:
    got = refused({"trunk": TEXT_TRUNK, "a": EMBEDDER}, embedding=Embedding(*embedding))
    assert got == f"pipeline, {message}"


def test_two_steps_that_stream() -> None:
    steps = {"trunk": TRUNK, "a": model("features FP32 [8]", "a", streams=True)}
    steps["b"] = model("features FP32 [8]", "b", streams=True)
    assert refused(steps) == "pipeline: expected at most one step that streams, got `a` and `b`"


def test_a_step_that_streams_from_one_deployment_to_another() -> None:
    message = refused({"trunk": TRUNK, "a": model("features FP32 [8]", "a", streams=True)}, placement="graph")
    assert message.startswith("step `a` streams, which `placement: graph` can't carry")
    assert "expected `placement: fused`" in message


# What fits.


def test_names_alone_join_a_trunk_and_its_heads() -> None:
    plan = planned({"trunk": TRUNK, "a": HEAD_A, "b": HEAD_B})
    assert [step.name for step in plan.steps] == ["trunk", "a", "b"]
    assert wires(plan, "trunk") == {"x": "input.x"}
    assert wires(plan, "a") == wires(plan, "b") == {"features": "trunk.features"}
    assert plan.steps[1].wires == (Wire("features", "trunk", "features"),)
    assert (plan.steps[0].parents, plan.steps[1].parents) == ((), ("trunk",))


def test_a_head_may_read_what_the_trunk_reads() -> None:
    plan = planned({"trunk": TRUNK, "a": model("features FP32 [8]; x", "a")})
    assert wires(plan, "a") == {"features": "trunk.features", "x": "input.x"}
    assert [one.name for one in plan.signature.inputs] == ["x"]
    assert plan.steps[1].parents == ("trunk",)


def test_what_the_trunk_reads_has_the_pipelines_name_for_heads_too() -> None:
    plan = planned({"trunk": TRUNK, "a": model("features FP32 [8]; image", "a")}, None, {"trunk": {"x": "input.image"}})
    assert wires(plan, "trunk") == {"x": "input.image"}
    assert wires(plan, "a") == {"features": "trunk.features", "image": "input.image"}
    assert [one.name for one in plan.signature.inputs] == ["image"]
    message = refused({"trunk": TRUNK, "a": model("features FP32 [8]; x", "a")}, None, {"trunk": {"x": "input.image"}})
    assert "step `a`, input `x`: unmapped" in message


def test_what_is_said_wins_over_names() -> None:
    steps = {"trunk": model("x", "x; y"), "a": model("x", "a"), "b": model("y", "b")}
    plan = planned(steps, None, {"a": {"x": "trunk.x"}, "b": {"y": "a.a"}})
    assert wires(plan, "a") == {"x": "trunk.x"}
    assert wires(plan, "b") == {"y": "a.a"}
    assert plan.needed(["b"]) == {"trunk", "a", "b"}


def test_an_output_may_have_a_dot_in_its_name() -> None:
    plan = planned({"trunk": model("x", "f.1"), "a": model("f", "a")}, None, {"a": {"f": "trunk.f.1"}})
    assert plan.steps[1].wires == (Wire("f", "trunk", "f.1"),)


def test_a_diamond() -> None:
    steps = {
        "join": model("left; right", "sum"),
        "a": model("f", "left"),
        "b": model("f", "right"),
        "root": model("x", "f"),
    }
    plan = planned(steps, ("join",), {"root": {"x": "input.x"}})
    assert [step.name for step in plan.steps] == ["root", "a", "b", "join"]
    assert plan.steps[-1].parents == ("a", "b")
    assert plan.needed(["join"]) == set(steps)


def test_steps_that_stand_in_a_possible_order_keep_it() -> None:
    steps = {"a": model("x", "f"), "b": model("f", "g"), "c": model("x", "h"), "d": model("h", "i")}
    mapped = {"a": {"x": "input.x"}, "c": {"x": "input.x"}}
    assert [step.name for step in planned(steps, ("b", "d"), mapped).steps] == ["a", "b", "c", "d"]


def test_only_what_heads_need_is_needed() -> None:
    steps = {"a": model("x", "f"), "b": model("f", "g"), "c": model("x", "h"), "d": model("h", "i")}
    plan = planned(steps, ("b", "d"), {"a": {"x": "input.x"}, "c": {"x": "input.x"}})
    assert plan.needed(["b"]) == {"a", "b"}
    assert plan.needed(["d"]) == {"c", "d"}
    assert plan.needed(["b", "d"]) == {"a", "b", "c", "d"}
    assert plan.needed([]) == set()


def test_an_optional_input_that_nobody_has_gets_nothing() -> None:
    plan = planned({"trunk": TRUNK, "a": model("features FP32 [8]; mask BOOL [4]?", "a")})
    assert wires(plan, "a") == {"features": "trunk.features"}
    assert set(plan.steps[1].expected) == {"features"}


def test_an_optional_input_of_the_pipeline_is_required_if_one_step_requires_it() -> None:
    steps = {"trunk": model("x; mask?", "features"), "a": model("features; mask?", "a")}
    assert [(one.name, one.optional) for one in planned(steps).signature.inputs] == [("x", False), ("mask", True)]
    steps["a"] = model("features; mask", "a")
    assert [(one.name, one.optional) for one in planned(steps).signature.inputs] == [("x", False), ("mask", False)]


@pytest.mark.parametrize(
    ("given", "taken", "known"),
    [("-1", "8", (8,)), ("8", "-1", (8,)), ("-1", "-1", (-1,)), ("-1,3", "4,-1", (4, 3))],
)
def test_a_dimension_that_one_side_knows_is_known(given: str, taken: str, known: tuple[int, ...]) -> None:
    plan = planned({"trunk": model("x", f"f FP32 [{given}]"), "a": model(f"f FP32 [{taken}]", "a")})
    assert plan.steps[1].expected == {"f": TensorSpec("f", "FP32", known)}


def test_a_dimension_of_an_input_that_one_step_knows_is_known() -> None:
    steps = {"trunk": model("x FP32 [-1, 3]", "f"), "a": model("f; x FP32 [4, -1]", "a")}
    assert planned(steps).signature.inputs == (TensorSpec("x", "FP32", (4, 3)),)


def test_the_signature_of_the_whole() -> None:
    per_row = Parameter("k", "int", 1, "row")
    steps = {
        "trunk": model("x; z?", "features FP32 [8]", description="Looks.", example={"x": [1.0] * 4}),
        "b": model("features FP32 [8]", "b2; b1", parameters=(per_row,), description="Guesses."),
        "a": model("features FP32 [8]; x", "a", parameters=(per_row,), description="Tells.", example={"x": [2.0] * 4}),
    }
    signature = planned(steps).signature
    assert (signature.name, signature.max_batch_size) == ("whole", 16)
    assert [one.name for one in signature.inputs] == ["x", "z"]
    assert [one.name for one in signature.outputs] == ["b2", "b1", "a"]
    assert signature.heads == (HeadSpec("b", ("b2", "b1")), HeadSpec("a", ("a",)))
    assert signature.parameters == (per_row,)
    assert signature.example == {"x": [1.0] * 4}
    assert signature.description == "Looks. Heads: b: Guesses; a: Tells."
    assert (signature.idempotent, signature.streams, signature.embedding) == (True, False, None)
    assert msgspec.json.decode(msgspec.json.encode(signature), type=Signature) == signature


def test_heads_stand_in_their_own_order_and_not_in_that_of_the_steps() -> None:
    steps = {"t": model("x", "f"), "a": model("f", "a"), "b": model("f", "b")}
    signature = planned(steps, ("b", "a"), {"t": {"x": "input.x"}}).signature
    assert [head.name for head in signature.heads] == [one.name for one in signature.outputs] == ["b", "a"]


def test_a_step_between_others_can_be_a_head_too() -> None:
    plan = planned({"t": model("x", "f"), "a": model("f", "a")}, ("t", "a"), {"t": {"x": "input.x"}})
    assert [one.name for one in plan.signature.outputs] == ["f", "a"]
    assert plan.needed(["t"]) == {"t"}


def test_an_example_takes_the_pipelines_names() -> None:
    trunk = model("x; z", "features FP32 [8]", example={"x": [1.0] * 4})
    signature = planned({"trunk": trunk, "a": HEAD_A}, None, {"trunk": {"x": "input.image"}}).signature
    assert signature.example == {"image": [1.0] * 4}
    assert signature.example_row() == {"image": [1.0] * 4, "z": [0.0] * 4}
    assert planned({"trunk": TRUNK, "a": HEAD_A}).signature.example is None


def test_deadlines_of_heads_and_whether_they_may_be_missing() -> None:
    on_error: Literal["omit"] = "omit"
    spec = PipelineSpec(
        (StepSpec("trunk", "m:M"), StepSpec("a", "m:M", timeout_s=0.5), StepSpec("b", "m:M", on_error=on_error)),
        ("a", "b"),
        trunk="trunk",
    )
    plan = make_plan(spec, {"trunk": TRUNK, "a": HEAD_A, "b": HEAD_B}, name="whole", max_batch_size=1)
    assert plan.signature.heads == (HeadSpec("a", ("a",), 0.5), HeadSpec("b", ("b",), None, "omit"))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_the_whole_is_idempotent_only_if_every_step_is() -> None:
    steps = {"trunk": TRUNK, "a": HEAD_A, "b": model("features FP32 [8]", "b", idempotent=False)}
    assert not planned(steps).signature.idempotent


@pytest.mark.parametrize("streaming", ["trunk", "a"])
def test_the_whole_streams_if_one_step_does(streaming: str) -> None:
    steps = {"trunk": TRUNK, "a": HEAD_A}
    steps[streaming] = msgspec.structs.replace(steps[streaming], streams=True)
    assert planned(steps).signature.streams


def test_an_embedding_of_a_pipeline() -> None:
    embedding = Embedding("text", "vector", "count")
    trunk = model("text BYTES [1]", "features FP32 [8]")
    assert planned({"trunk": trunk, "a": EMBEDDER}, embedding=embedding).signature.embedding == embedding


def test_a_pipeline_of_one_step_is_described_as_that_step() -> None:
    one = model("x", "y", description="Streams words.")
    plan = make_plan(graph({"m": one}, ("m",), trunk="m"), {"m": one}, name="m", max_batch_size=1)
    assert plan.signature.description == "Streams words."
    assert wires(plan, "m") == {"x": "input.x"}


# Any graph.


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, set[str]], list[str], list[str]]:
    """Parents by step, the steps in any order, and some of them to ask for."""
    names = draw(st.lists(st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True), min_size=1, max_size=8, unique=True))
    names = [name for name in names if name != INPUT] or ["only"]
    parents = {
        name: set(draw(st.lists(st.sampled_from(names[:index]), unique=True))) if index else set()
        for index, name in enumerate(names)
    }
    return parents, draw(st.permutations(names)), draw(st.lists(st.sampled_from(names), unique=True))


def ancestors(parents: Mapping[str, set[str]], wanted: list[str]) -> set[str]:
    found: set[str] = set()
    pending = list(wanted)
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += parents[one]
    return found


@given(graphs(), st.booleans())
def test_every_step_comes_after_its_parents_and_what_is_needed_are_ancestors(
    drawn: tuple[dict[str, set[str]], list[str], list[str]], by_name: bool
) -> None:
    parents, order, wanted = drawn
    # Inputs named after outputs are found by their names; the others must be mapped.
    prefix = "out" if by_name else "in"
    steps = {
        name: model("; ".join(["x", *(f"{prefix}_{one}" for one in parents[name])]), f"out_{name}") for name in order
    }
    mapped = {
        name: {"x": "input.x"} | ({} if by_name else {f"in_{one}": f"{one}.out_{one}" for one in parents[name]})
        for name in order
    }
    spec = graph(steps, tuple(order), mapped)
    check_names(spec)
    plan = make_plan(spec, steps, name="whole", max_batch_size=1)
    done: set[str] = set()
    for step in plan.steps:
        assert set(step.parents) == parents[step.name] <= done
        done.add(step.name)
    assert done == set(order)
    assert plan.needed(wanted) == ancestors(parents, wanted)


def test_all_faults_are_named_at_once_with_the_names_that_may_be_meant() -> None:
    steps = {"trunk": TRUNK, "a": HEAD_A, "b": model("features FP32 [8]", "b")}
    with pytest.raises(DeclarationError) as caught:
        planned(steps, None, {"a": {"features": "trunk.featurs"}, "b": {"feature": "trunk.features"}})
    first, second = caught.value.args
    assert "no step produces `trunk.featurs`" in first
    assert first.endswith("; did you mean `features`?")
    assert second == "step `b`, inputs: expected some of its inputs `features`, got `feature`; did you mean `features`?"


def test_all_unknown_steps_and_heads_are_named_at_once() -> None:
    spec = PipelineSpec(
        (StepSpec("trunk", "m:T"), StepSpec("digit", "m:D", inputs={"x": "trunc.x"})), heads=("digits",), trunk="trunk"
    )
    with pytest.raises(DeclarationError) as caught:
        check_names(spec)
    first, second = caught.value.args
    assert first.endswith("got `digits`; did you mean `digit`?")
    assert second.endswith("unknown step `trunc`; expected `trunk`, `digit` or `input`; did you mean `trunk`?")


# Elements of ragged outputs as rows.

DETECT = model("image", "boxes FP32 [-1, 6]*; names BYTES [-1]*; size INT64 [2]")
CROP = model("image; boxes FP32 [6]; size INT64 [2]", "crop FP32 [8]")
RECOGNISE = model("crop FP32 [8]; names BYTES [1]", "text BYTES [1]; scores FP32 [-1]")
READING: Steps = {"detect": DETECT, "crop": CROP, "recognise": RECOGNISE}
IMAGES = {"detect": {"image": "input.image"}, "crop": {"image": "input.image"}}


def test_what_follows_an_expanded_step_has_its_elements_and_a_head_of_elements_is_ragged() -> None:
    plan = planned(READING, ("recognise",), IMAGES, {"crop": "detect"})
    assert {step.name: step.elements_of for step in plan.steps} == {
        "detect": "", "crop": "detect", "recognise": "detect",
    }  # fmt: skip
    assert plan.steps[1].expected["boxes"].shape == (6,)
    assert plan.steps[1].expected["size"].shape == (2,)
    assert plan.steps[2].expected["names"].shape == (1,)
    assert [(spec.name, spec.shape, spec.ragged, spec.counts) for spec in plan.signature.outputs] == [
        ("text", (-1, 1), True, ""), ("text_count", (1,), False, "text"),
        ("scores", (-1, -1), True, ""), ("scores_count", (1,), False, "scores"),
    ]  # fmt: skip
    assert plan.signature.heads == (HeadSpec("recognise", ("text", "text_count", "scores", "scores_count")),)
    assert [spec.name for spec in plan.signature.inputs] == ["image"]


@pytest.mark.parametrize(
    ("steps", "expands", "message"),
    [
        (
            {}, {},
            "step `crop`, input `boxes`: expected an output with an array for all rows, got the ragged "
            "`detect.boxes`; to take its elements as rows, set `expand: detect`",
        ),
        ({}, {"crop": "detector"}, "step `crop`, expand: expected another step, got `detector`; did you mean `detect`"),
        ({}, {"crop": "crop"}, "step `crop`, expand: expected another step, got `crop`"),
        (
            {"crop": model("image; boxes FP32 [5]", "crop FP32 [8]")}, {"crop": "detect"},
            "step `crop`, input `boxes`: shape mismatch: expected FP32 [5], got FP32 [6] from `detect.boxes`",
        ),
        (
            {"crop": model("image; boxes FP32 [6]", "crop FP32 [8]; words BYTES [-1]*")}, {"crop": "detect"},
            "step `crop`: expected no ragged outputs of a step whose rows are elements of `detect`",
        ),
        (
            {}, {"crop": "detect", "recognise": "crop"},
            "step `recognise`, expand: expected a step whose rows are the pipeline's, got `crop`, whose rows are "
            "elements of `detect`; only one level of elements is possible",
        ),
        (
            {"crop": model("image", "crop FP32 [8]")}, {"crop": "detect"},
            "step `crop`, expand: expected an input from a ragged output of `detect`, got none; its ragged outputs "
            "are: `boxes`, `names`",
        ),
        (
            {"crop": msgspec.structs.replace(CROP, streams=True)}, {"crop": "detect"},
            "step `crop`, expand: expected no step that streams, got `crop`",
        ),
        (
            {"detect": msgspec.structs.replace(DETECT, streams=True)}, {"crop": "detect"},
            "step `crop`, expand: expected no step that streams, got `detect`",
        ),
    ],
)  # fmt: skip
def test_elements_that_a_step_can_not_take(steps: Steps, expands: Mapping[str, str], message: str) -> None:
    assert message in refused({**READING, **steps}, ("recognise",), IMAGES, expands)


def test_a_head_that_takes_the_elements_of_a_trunk() -> None:
    steps = {"trunk": DETECT, "crop": CROP}
    plan = planned(steps, expands={"crop": "trunk"})
    assert [spec.name for spec in plan.signature.outputs] == ["crop", "crop_count"]
    assert wires(plan, "crop") == {"image": "input.image", "boxes": "trunk.boxes", "size": "trunk.size"}


def test_elements_of_two_steps() -> None:
    steps = {
        **READING,
        "find": model("image", "faces FP32 [-1, 6]*"),
        "both": model("crop FP32 [8]; faces FP32 [6]", "y"),
    }
    inputs = {**IMAGES, "find": {"image": "input.image"}}
    message = (
        "step `both`, input `faces`: expected elements of `detect`, as in other inputs, got elements of `find` from "
        "`find.faces`; a step takes elements of one step"
    )
    assert message in refused(steps, ("both", "recognise"), inputs, {"crop": "detect"})


def test_no_cache_of_ragged_outputs() -> None:
    spec = graph(READING, ("recognise",), IMAGES, {"crop": "detect"})
    steps = (msgspec.structs.replace(spec.steps[0], cache=FeatureCacheSpec(1)), *spec.steps[1:])
    with pytest.raises(DeclarationError, match="step `detect`, cache: expected a step without ragged outputs"):
        make_plan(msgspec.structs.replace(spec, steps=steps), READING, name="p", max_batch_size=1)
