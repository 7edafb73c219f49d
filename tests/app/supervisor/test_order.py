"""The order of the supervisor's classes: a class holds and calls only classes in the rows below its own row.

What a class refers to is read from its code: annotations of parameters, attributes and results, calls, bases, and what
the module's functions that it calls refer to. A protocol stands for all classes that have its methods. Events go up as
values that a caller iterates over or awaits, or through the functions in `CALLBACKS`.
"""

from __future__ import annotations

import ast
import contextlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from headwater_server import supervisor

PACKAGE = "headwater_server.supervisor"
ORDER = """
Supervisor                              the server: both sides together
Front                                   the side towards clients
Backend                                 the deployments, as the front sees them: the orchestrator
Workers RuntimeFolder                   gateway workers; the folder
Orchestrator                            all deployments
Reloader                                reloads deployments when files change
Lifecycle                               operators' commands
Replacement                             a reload beside the replicas that serve
Autoscaler Canaries                     scaling by load; rollback by itself
Deployments                             deployments by name
Scripts                                 PyTriton scripts of deployments
ReplicaSet VersionsState GraphState     the state of a deployment
Composite
Served
Slots                                   the slots of a replica set
Slot                                    keeps a replica running
EndedServing FailedStart Failure HasCapacity Lost NoCapacity Serving    what a slot reports
Crashes ReplicaStarter                  losses of a deployment; starts and ends of replicas
Retired                                 the result of ending replicas
Preloads                                processes that fork replicas
Preloaded
ChildProcesses                          processes and tasks of all deployments
ReplicaMemory                           capacity
Place MemoryBudget
MemoryRefusal _Holding
_Child
ReplicaProcess ReplicaHandle            a replica
Forked _StartPriority ReplicaLog        parts of a replica's process
Backoff Comparison ScalingPolicy _Model    computations
Demand _ScriptRun
KindProgram                             what a deployment's kind decides
"""
"""Rows of classes, from the top; the words behind two spaces are for readers."""

CALLBACKS = {
    "on_change": "a deployment has changed: the front publishes all routes at once, whichever class changed one",
    "on_serving": "the server serves for the first time: the command line prints it",
    "on_progress": "a replica's start has reached a stage, while all of the start's callers wait for its end",
    "on_utilization": "a tick's result, for metrics",
    "on_record": "a log record is complete, perhaps only after a time without further lines",
    "drain": "gateway workers finish their requests: the control socket has no part in the order",
    "end_orphans": "a guardian was killed: only the owner of all children knows whose processes are left",
    "is_busy": "a question at each tick; a command runs longer than the tick",
    "is_hurried": "a question during a stop, which a second signal answers",
    "loads": "the control socket's reports at each tick",
    "tallies": "the control socket's reports at each tick",
    "read": "reads the configuration again, as the command line did",
    "measure": "measures the machine; tests replace it",
    "used": "measures GPUs; tests replace it",
    "clock": "the time; tests replace it",
    "fork": "forks a guardian: the process that it is forked from is above a replica",
}
"""Functions that a class gets as parameters, and why they are no calls of a class above."""

LONGEST_ANNOTATION = 80
"""Characters of a quoted annotation; a longer text is no annotation."""

Sources = Mapping[str, ast.Module]
"""Modules by name."""


def sources() -> dict[str, ast.Module]:
    """The modules of the package, by their last names."""
    folder = Path(supervisor.__path__[0])
    return {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}


def rows(order: str) -> dict[str, int]:
    """The row of each class, counted from the top."""
    lines = order.strip().splitlines()
    return {name: row for row, line in enumerate(lines) for name in line.split("  ")[0].split()}


def classes(modules: Sources) -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in modules.values() for node in tree.body if isinstance(node, ast.ClassDef)}


def names_in(node: ast.AST) -> Iterator[str]:
    """Names that are read anywhere below a node, also in quoted annotations."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and len(child.value) < LONGEST_ANNOTATION:
            with contextlib.suppress(SyntaxError, ValueError):  # other text
                yield from names_in(ast.parse(child.value.strip(), mode="eval"))


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names that a module imports from the package, also for types only, each with its module and its name there."""
    return {
        alias.asname or alias.name: (node.module.removeprefix(f"{PACKAGE}."), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(f"{PACKAGE}.")
        for alias in node.names
    }


def references(modules: Sources) -> dict[str, set[str]]:
    """The classes of the package that each class refers to; a protocol is replaced by the classes that have its
    methods."""
    definitions: dict[tuple[str, str], ast.AST] = {}
    scopes = {}
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                definitions[module, node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                definitions[module, node.targets[0].id] = node.value  # the alias of a type, or a constant
        own = {name: (module, name) for place, name in definitions if place == module}
        scopes[module] = own | imported(tree)

    def classes_of(key: tuple[str, str], seen: set[tuple[str, str]]) -> Iterator[str]:
        for name in names_in(definitions[key]):
            target = scopes[key[0]].get(name)
            if target is None or target not in definitions or target in seen:
                continue
            if isinstance(definitions[target], ast.ClassDef):
                yield target[1]
            else:
                seen.add(target)
                yield from classes_of(target, seen)

    nodes = classes(modules)
    implementers = {name: set(implementers_of(node, nodes)) for name, node in nodes.items() if is_protocol(node)}
    return {
        name: {
            implementer
            for reference in classes_of((module, name), set())
            for implementer in {reference, *implementers.get(reference, ())}
        }
        - {name}
        for module, name in definitions
        if name in nodes
    }


def is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}


def implementers_of(protocol: ast.ClassDef, nodes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """The classes that have all methods of a protocol."""
    for name, node in nodes.items():
        if node is not protocol and methods(protocol) and methods(protocol) <= methods(node):
            yield name


def upward(modules: Sources, order: str) -> list[str]:
    """References to classes that are not in a row below, as text."""
    row = rows(order)
    return sorted(
        f"{name} -> {reference}"
        for name, refers_to in references(modules).items()
        for reference in refers_to
        if row[reference] <= row[name]
    )


def callbacks(nodes: Iterable[ast.ClassDef], aliases: Iterable[str]) -> set[str]:
    """The parameters of methods that are functions."""
    kinds = {"Callable", *aliases}
    arguments = [
        argument
        for node in nodes
        for item in node.body
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
        for argument in (*item.args.args, *item.args.kwonlyargs)
    ]
    return {
        argument.arg
        for argument in arguments
        if argument.annotation is not None and kinds & set(names_in(argument.annotation))
    }


def test_no_class_holds_or_calls_a_class_above_it() -> None:
    modules = sources()
    assert sorted(rows(ORDER)) == sorted(classes(modules))
    assert upward(modules, ORDER) == []


def test_functions_that_a_class_gets_have_a_reason() -> None:
    modules = sources()
    assert callbacks(classes(modules).values(), ["Fork", "Measure"]) == set(CALLBACKS)


def of(**texts: str) -> dict[str, ast.Module]:
    return {name: ast.parse(textwrap.dedent(text)) for name, text in texts.items()}


LOW = """
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        from headwater_server.supervisor.high import High
    class Low:
        {}
"""
HIGH = """
    from headwater_server.supervisor.low import Low
    class High:
        def __init__(self) -> None:
            self.low = Low(self)
        def note_end(self) -> None: ...
"""


def test_what_refers_to_a_class_above_is_found() -> None:
    for line in (
        "def __init__(self, owner: High) -> None: ...",
        "def __init__(self, owner: 'High | None') -> None: ...",
        "owner: High | None = None",
        "def owner(self) -> High: ...",
        "def end(self) -> None: High().note_end()",
    ):
        assert upward(of(low=LOW.format(line), high=HIGH), "High\nLow") == ["Low -> High"], line
    assert upward(of(low=LOW.format("pass"), high=HIGH), "High\nLow") == []


def test_a_protocol_or_a_function_hides_no_class_above() -> None:
    low = """
        from typing import Protocol
        class Owner(Protocol):
            def note_end(self) -> None: ...
        class Low:
            def __init__(self, owner: Owner) -> None: ...
    """
    assert upward(of(low=low, high=HIGH), "High\nLow\nOwner") == ["Low -> High"]
    low = LOW.format("def end(self) -> None: tell()") + "\n    def tell() -> None: High().note_end()\n"
    assert upward(of(low=low, high=HIGH), "High\nLow") == ["Low -> High"]


def test_a_parameter_that_is_a_function_is_found() -> None:
    (tree,) = of(low="class Low:\n    def run(self, *, on_end: Callable[[], None] | None) -> None: ...").values()
    assert callbacks([node for node in tree.body if isinstance(node, ast.ClassDef)], []) == {"on_end"}
