"""Finds values of a file of torch that change when the file is called: state that requests would share.

`script_writes` and `program_writes` read a file's graph: an operator's schema says which arguments it writes into, and
which results are views of arguments. `changed` compares buffers after calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import LoadError, Problem

if TYPE_CHECKING:
    import torch

__all__ = ["STATEFUL", "asks_stateful", "changed", "copies", "program_writes", "script_writes", "state_problem"]

STATEFUL: Final = "stateful"
"""The option that declares that the state is intended."""

_STATISTICS: Final = ("running_mean", "running_var")
"""Arguments that norms write into in training mode, although no schema says so."""


def asks_stateful(title: str, options: Mapping[str, Any]) -> bool:
    """Whether a deployment's options say that its model may keep state between calls.

    Raises:
        LoadError: the option is neither true nor false.
    """
    stateful = options.get(STATEFUL, False)
    if not isinstance(stateful, bool):
        reason = f"options.{STATEFUL}: expected true or false, got {stateful!r:.80}"
        raise LoadError(Problem(title, reason, f"correct or remove `options.{STATEFUL}`"))
    return stateful


def state_problem(title: str, names: Iterable[str]) -> Problem:
    """The problem of a file that changes these values, so that it isn't served."""
    listed = ", ".join(map(repr, names))
    return Problem(
        title,
        f"its call changes its own {listed}, so an answer would depend on other clients' requests",
        "make the state an input and an output, or export the module in eval mode; if all clients are meant to share "
        f"the state, set `options.{STATEFUL}: true`",
    )


def copies(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of a module's buffers."""
    return {name: buffer.clone() for name, buffer in buffers.items()}


def changed(buffers: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the buffers that differ from their copies."""
    return [name for name, buffer in buffers.items() if not _is_same(buffer, before[name])]


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same values; NaN is the same as NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def script_writes(module: Any) -> list[str]:
    """The attributes that the ``forward`` of a loaded TorchScript module may write into, in eval mode, by name."""
    graph = _ScriptGraph()
    graph.read(module.inlined_graph)
    return list(dict.fromkeys(graph.writes))


def program_writes(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers, parameters and constants that an exported program may write into, by name."""
    its = program.graph_signature
    named = {**its.inputs_to_parameters, **its.inputs_to_buffers, **its.inputs_to_lifted_tensor_constants}
    paths = {node: named[node.name] for node in program.graph.nodes if node.name in named}
    names = [*its.buffers_to_mutate.values(), *_graph_writes(program.graph_module, paths)]
    return list(dict.fromkeys(names))


def _graph_writes(graph: torch.fx.GraphModule, paths: dict[Any, str]) -> Iterator[str]:
    """Names of the values in `paths` that a graph writes into. Nodes that are views of them are added to `paths`."""
    from torch.fx import GraphModule, Node

    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function":
            continue
        if schema is not None:
            names = [argument.name for argument in schema.arguments]
            arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            is_training = True in (arguments.get("training"), arguments.get("use_input_stats"))
            yield from (paths[value] for value in _written(schema, arguments, is_training) if value in paths)
            if sources := [paths[value] for value in _viewed(schema, arguments) if value in paths]:
                paths[node] = sources[0]
            continue
        # A region with another gradient mode, or a branch, is a separate graph.
        given_nodes = [value for value in node.all_input_nodes if value.op != "get_attr"]
        for inner in node.all_input_nodes:
            target = getattr(graph, str(inner.target), None) if inner.op == "get_attr" else None
            if isinstance(target, GraphModule):
                taken = [placeholder for placeholder in target.graph.nodes if placeholder.op == "placeholder"]
                operands = given_nodes[len(given_nodes) - len(taken) :]
                pairs: Iterable[tuple[Node, Node]] = zip(taken, operands, strict=False)
                yield from _graph_writes(
                    target, {placeholder: paths[value] for placeholder, value in pairs if value in paths}
                )


def _written(schema: Any, arguments: Mapping[str, Any], is_training: bool) -> list[Any]:
    """The arguments that an operator writes into."""
    names = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    names += _STATISTICS if is_training else ()
    return [arguments[name] for name in names if _is_value(arguments.get(name))]


def _viewed(schema: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator's results are views or elements of."""
    sets = set[str]().union(
        *(returned.alias_info.before_set for returned in schema.returns if returned.alias_info is not None)
    )
    return [
        arguments[argument.name]
        for argument in schema.arguments
        if _is_value(arguments.get(argument.name))
        and ("*" in sets or (argument.alias_info is not None and sets & argument.alias_info.before_set))
    ]


def _is_value(argument: Any) -> bool:
    """Whether an argument is a value of the graph, and not a constant, a list or missing."""
    return isinstance(argument, str) or type(argument).__name__ == "Node"


@functools.cache
def _schema(text: str) -> Any:
    """An operator's schema; None if torch's parser can't read it."""
    import torch

    try:
        return torch._C.parse_schema(text)
    except RuntimeError:  # writes are still found, because buffers are compared after the warm-up
        return None


class _ScriptGraph:
    """Reads a TorchScript graph. A value is known by its name in the graph."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self._paths: dict[str, str] = {}
        """The attribute's name for each value that was read from the module, or is a view of such a value."""
        self._constants: dict[str, object] = {}

    def read(self, block: Any) -> None:
        """Read a graph, or a block of a graph."""
        for node in block.nodes():
            kind = node.kind()
            if kind == "prim::Constant":
                self._constants[node.output().debugName()] = node.output().toIValue()
            elif kind == "prim::GetAttr":
                self._read_attribute(node)
            elif kind == "prim::SetAttr":
                self.writes.append(self._path(node))
            elif kind == "prim::If":
                self._read_if(node)
            elif kind == "prim::Loop":
                self._read_loop(node)
            else:
                self._read_call(node)
                for inner in node.blocks():
                    self.read(inner)

    def _path(self, node: Any) -> str:
        """The attribute that a node gets or sets, as ``named_buffers`` names it."""
        parent = self._paths.get(next(node.inputs()).debugName(), "")
        return f"{parent}.{node.s('name')}" if parent else str(node.s("name"))

    def _read_attribute(self, node: Any) -> None:
        value = node.output().debugName()
        self._paths[value] = self._path(node)
        if node.s("name") == "training":
            self._constants[value] = False

    def _read_if(self, node: Any) -> None:
        """Read the blocks of an ``if``, except a block that is never entered."""
        then, otherwise = node.blocks()
        condition = self._constants.get(next(node.inputs()).debugName())
        blocks = [then, otherwise] if condition is None else [then if condition else otherwise]
        for block in blocks:
            self.read(block)
        for place, output in enumerate(node.outputs()):
            results = [list(block.outputs())[place].debugName() for block in blocks]
            if len(results) == 1 and results[0] in self._constants:
                self._constants[output.debugName()] = self._constants[results[0]]
            self._alias(output.debugName(), results)

    def _read_loop(self, node: Any) -> None:
        """Read the block of a loop. Its values are the values before the loop, or the values of its last iteration."""
        (block,) = node.blocks()
        before = [value.debugName() for value in node.inputs()][2:]
        inside = [value.debugName() for value in block.inputs()][1:]
        for value, source in zip(inside, before, strict=True):
            self._alias(value, [source])
        self.read(block)
        after = [value.debugName() for value in block.outputs()][1:]
        for output, *sources in zip(node.outputs(), before, after, strict=True):
            self._alias(output.debugName(), sources)

    def _read_call(self, node: Any) -> None:
        schema = _schema(node.schema()) if node.schema() != "(no schema)" else None
        if schema is None:
            return
        values = [value.debugName() for value in node.inputs()]
        arguments = {argument.name: value for argument, value in zip(schema.arguments, values, strict=False)}
        modes = [self._constants.get(arguments.get(name, "")) for name in ("training", "use_input_stats")]
        self.writes += [
            self._paths[value] for value in _written(schema, arguments, True in modes) if value in self._paths
        ]
        for output in node.outputs():
            self._alias(output.debugName(), _viewed(schema, arguments))

    def _alias(self, value: str, sources: Iterable[str]) -> None:
        for source in sources:
            if source in self._paths:
                self._paths[value] = self._paths[source]
