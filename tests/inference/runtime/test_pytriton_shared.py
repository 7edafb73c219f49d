"""What functions of several models have in common."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytriton.decorators import batch

from headwater.runtime.pytriton_shared import shared_objects

pytestmark = pytest.mark.heavy
COUNTS = [0]
WEIGHTS = np.zeros(3)
seen: list[int] = []
network = torch.nn.Linear(1, 1).eval()
trained = torch.nn.Linear(1, 1)
logger = logging.getLogger("x")


class Learner:
    """Two functions and what both use."""

    def __call__(self, requests: Any) -> Any:
        return requests

    @batch
    def train(self, x: Any) -> Any:
        return [x]

    @batch
    def infer(self, x: Any) -> Any:
        return [x]


def note(value: int) -> None:
    seen.append(value)


@batch
def noting(x: Any) -> Any:
    note(1)
    return [x]


@batch
def looking(x: Any) -> Any:
    return [list(seen), COUNTS, WEIGHTS, network]


@batch
def computing(x: Any) -> Any:
    logger.info("%s %s", COUNTS, WEIGHTS)
    return [network(x)]


def locked(lock: Any, function: Any) -> Callable[..., Any]:
    """A user's own decorator."""

    @functools.wraps(function)
    def call(requests: Any) -> Any:
        with lock:
            return function(requests)

    return call


def test_methods_of_one_object_share_it() -> None:
    learner = Learner()
    assert shared_objects({"a": [learner.train], "b": [learner.infer]}) == [("Learner", ("a", "b"))]
    assert shared_objects({"a": [learner], "b": [learner.infer]}) == [("Learner", ("a", "b"))]
    assert shared_objects({"a": [Learner().train, Learner().train], "b": [Learner().infer]}) == []
    assert shared_objects({"a": [learner.train, learner.infer]}) == []


def test_objects_of_one_description_are_all_found() -> None:
    first, second = Learner(), Learner()
    functions = {"a": [first.train], "b": [first.infer], "c": [second.train], "d": [second.infer]}
    assert shared_objects(functions) == [("Learner", ("a", "b")), ("Learner", ("c", "d"))]


def test_functions_share_global_variables_and_those_of_closures() -> None:
    assert shared_objects({"a": [noting], "b": [looking], "c": [computing]}) == [("list `seen`", ("a", "b"))]


def test_a_decorators_own_variables_count() -> None:
    lock = threading.Lock()
    functions = {"a": [locked(lock, noting)], "b": [locked(lock, computing)]}
    assert shared_objects(functions) == [("lock `lock`", ("a", "b"))]


def test_networks_that_are_trained_are_told_from_those_that_are_not() -> None:
    def using(model: Any) -> Callable[..., Any]:
        return lambda requests: model(requests)

    assert shared_objects({"a": [using(trained)], "b": [using(trained)]}) == [("Linear `model`", ("a", "b"))]
    assert shared_objects({"a": [using(network)], "b": [using(network)]}) == []
