"""Finds objects that several models of a PyTriton script share; each replica has a separate copy of them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np

__all__ = ["shared_objects"]

_HARMLESS: Final = (
    str, bytes, int, float, complex, tuple, frozenset, type(None), type, range,
    ModuleType, FunctionType, BuiltinFunctionType, logging.Logger,
)  # fmt: skip
"""Types of objects that can't change, or whose changes no answer depends on."""


def shared_objects(functions: Mapping[str, Sequence[Callable[..., Any]]]) -> list[tuple[str, tuple[str, ...]]]:
    """The objects that the functions of two or more models use and may change, each with the names of these models.

    Returns:
        Each object's description and models, without repetitions. The description is the name of its class, and the
            name of its variable unless a bound method belongs to the object. These objects are found: objects with
            bound methods; and objects that functions, and the functions of their module that they call, use in a
            closure or as a global variable. Constants in capitals and torch networks in evaluation mode are left out.
    """
    names: dict[int, str] = {}
    users: dict[int, list[str]] = {}
    for model, bound in functions.items():
        used_names = {id(thing): name for function in bound for name, thing in _used_by(function, set())}
        names |= used_names
        for object_id in used_names:
            users.setdefault(object_id, []).append(model)
    return [*dict.fromkeys((names[object_id], (*models,)) for object_id, models in users.items() if len(models) > 1)]


def _used_by(function: Any, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Objects that a function uses and that may change, with their names."""
    if id(function) in visited:
        return
    visited.add(id(function))
    if hasattr(function, "__wrapped__"):  # the variables of the decorated function count, too
        yield from _used_by(function.__wrapped__, visited)
    if not inspect.isfunction(function):
        owner = getattr(function, "__self__", function)
        if not isinstance(owner, _HARMLESS):
            yield type(owner).__name__, owner
        called = function.__func__ if inspect.ismethod(function) else type(owner).__call__
        if inspect.isfunction(called):
            yield from _used_by(called, visited)
        return
    for name, thing in _variables(function):
        if isinstance(thing, FunctionType):
            if thing.__globals__ is function.__globals__:  # libraries manage their caches themselves
                yield from _used_by(thing, visited)
        elif _may_change(name, thing):
            yield f"{type(thing).__name__} `{name}`", thing


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that a function's code names, and the variables of its closure."""
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _global_names(code: CodeType) -> Iterator[str]:
    """Names of global variables, and of attributes, that code and the functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _may_change(name: str, thing: Any) -> bool:
    if isinstance(thing, _HARMLESS) or (name.isupper() and isinstance(thing, (dict, list, set, np.ndarray))):
        return False
    return getattr(thing, "training", True) is not False  # a network of torch that isn't trained
