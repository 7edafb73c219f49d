"""The memory budget: what may start, and what is taken."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater_server.config.schema import Deployment
from headwater_server.errors import MemoryBudgetExceeded
from headwater_server.process.gpu import gpu_name
from headwater_server.process.machine import HOST
from headwater_server.supervisor.memory_budget import MemoryBudget, ReplicaMemory

GPU = "GPU 0"
MIB = 2**20


def test_a_replica_starts_only_where_its_size_fits() -> None:
    budget = MemoryBudget({HOST: 1000 * MIB})
    assert budget.take(1, "m", HOST, 400 * MIB) is None
    assert budget.take(2, "m", HOST, 400 * MIB) is None
    refusal = budget.take(3, "m", HOST, 400 * MIB)
    assert str(refusal) == (
        "memory of the machine: it takes 400 MiB, and of the 1000 MiB that replicas may take 800 MiB are taken"
    )
    budget.release(1)
    assert budget.take(3, "m", HOST, 400 * MIB) is None


def test_what_was_measured_counts_and_is_expected_of_the_next() -> None:
    budget = MemoryBudget({HOST: 1000})
    assert budget.take(1, "m", HOST, None) is None
    assert budget.taken(HOST) == 0
    budget.note(1, {HOST: 450}, is_ready=True)
    assert (budget.taken(HOST), budget.size("m", HOST, None)) == (450, {HOST: 450})
    assert budget.take(2, "m", HOST, None) is None
    assert budget.taken(HOST) == 900
    assert budget.take(3, "m", HOST, None) is not None
    budget.note(2, {HOST: 300}, is_ready=True)  # smaller than expected: the rest is free again
    assert budget.taken(HOST) == 750
    budget.note(1, {HOST: 500}, is_ready=True)  # it has grown
    assert (budget.taken(HOST), budget.size("m", HOST, None)) == (800, {HOST: 500})


def test_what_a_replica_will_keep_is_reserved_from_its_start_and_counts_once() -> None:
    budget = MemoryBudget({HOST: 1000})
    assert budget.take(1, "m", HOST, None, later=200) is None
    assert budget.taken(HOST) == 200
    budget.note(1, {HOST: 300}, is_ready=True)
    assert (budget.taken(HOST), budget.size("m", HOST, None, 200)) == (500, {HOST: 500})
    budget.note(1, {HOST: 500}, is_ready=True)  # it keeps all that it may
    assert (budget.taken(HOST), budget.size("m", HOST, None, 200)) == (500, {HOST: 500})
    assert budget.take(2, "m", HOST, None, later=200) is None
    assert budget.take(3, "m", HOST, None, later=200) is not None
    budget.forget("m")
    assert budget.size("m", HOST, None, 200) == {HOST: 200}


def test_what_it_will_keep_follows_it_to_another_place() -> None:
    budget = MemoryBudget({HOST: 1000, GPU: 1000})
    assert budget.take(1, "m", HOST, None, later=200) is None
    budget.move(1, GPU)
    budget.note(1, {HOST: 100, GPU: 300}, is_ready=True)
    assert (budget.taken(HOST), budget.taken(GPU)) == (100, 500)


def test_the_second_of_which_nothing_is_known_waits_until_the_first_was_measured() -> None:
    budget = MemoryBudget({HOST: 1000})
    assert not budget.waits("m")
    budget.take(1, "m", HOST, None)
    assert (budget.waits("m"), budget.waits("other")) == (True, False)
    budget.note(1, {HOST: 100}, is_ready=False)  # it still starts
    assert budget.waits("m")
    budget.note(1, {HOST: 300}, is_ready=True)
    assert not budget.waits("m")


def test_the_second_does_not_wait_for_one_that_is_gone_or_whose_size_was_declared() -> None:
    budget = MemoryBudget({HOST: 1000})
    budget.take(1, "m", HOST, None)
    budget.release(1)
    assert not budget.waits("m")
    budget.take(2, "m", HOST, 100)
    assert not budget.waits("m")


def test_more_than_was_declared_is_believed() -> None:
    budget = MemoryBudget({HOST: 1000})
    budget.take(1, "m", HOST, 100)
    budget.note(1, {HOST: 600}, is_ready=True)
    assert budget.taken(HOST) == 600
    refusal = budget.take(2, "m", HOST, 100)
    assert refusal is not None
    assert refusal.needed == 600


def test_a_replica_on_a_gpu_takes_of_both() -> None:
    budget = MemoryBudget({HOST: 1000, GPU: 5000, "GPU 1": 5000})
    budget.take(1, "m", GPU, 3000)
    assert (budget.taken(GPU), budget.taken(HOST)) == (3000, 0)
    budget.note(1, {HOST: 400, GPU: 2800}, is_ready=True)
    assert (budget.taken(GPU), budget.taken(HOST)) == (3000, 400)
    refusal = budget.take(2, "m", GPU, 3000)
    assert refusal is not None
    assert refusal.place == GPU
    assert budget.take(2, "m", "GPU 1", 3000) is None
    refusal = budget.take(3, "m", "GPU 1", None)
    assert refusal is not None
    assert refusal.place == HOST


def test_what_others_have_of_a_gpu_counts() -> None:
    budget = MemoryBudget({GPU: 1000})
    budget.note_whole(GPU, 700)
    assert budget.take(1, "m", GPU, 400) is not None
    assert budget.take(1, "m", GPU, 300) is None
    assert budget.taken(GPU) == 1000
    budget.note_whole(GPU, 1000)
    budget.note(1, {GPU: 300}, is_ready=True)
    assert budget.taken(GPU) == 1000


async def test_a_gpu_is_measured_where_the_machines_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    deployment = Deployment.model_validate({"model": "a:B", "memory": "400MiB"})
    memory = ReplicaMemory(MemoryBudget({GPU: 1000 * MIB}), lambda groups: {}, lambda: {GPU: 700 * MIB})
    with pytest.raises(MemoryBudgetExceeded, match=r"memory of GPU 0: it takes 400 MiB, .* 700 MiB are taken"):
        await memory.reserve("m", deployment, 1)


def test_one_that_turns_out_too_large_is_told_and_no_other_starts() -> None:
    budget = MemoryBudget({HOST: 1000})
    budget.take(1, "m", HOST, None)
    budget.note(1, {HOST: 1200}, is_ready=True)
    excess = budget.excess(1)
    assert excess is not None
    assert (excess.needed, excess.taken, excess.limit) == (1200, 1200, 1000)
    assert budget.take(2, "m", HOST, None) is not None
    assert budget.take(2, "unknown", HOST, None) is not None


def test_a_place_without_a_limit_refuses_nothing() -> None:
    budget = MemoryBudget({})
    for number in range(10):
        assert budget.take(number, "m", HOST, 10**15) is None


class Machine(RuleBasedStateMachine):
    """Replicas of three deployments, none of which ever takes more than its deployment's size."""

    LIMIT = 1000
    SIZES: ClassVar = {"a": 100, "b": 330, "c": 700}

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget({HOST: self.LIMIT})
        self.real: dict[int, tuple[str, int]] = {}
        """What each replica really has."""
        self.ready: set[int] = set()
        self.number = 0

    @rule(name=st.sampled_from(sorted(SIZES)))
    def start(self, name: str) -> None:
        self.number += 1
        size = self.SIZES[name]
        fits = self.budget.taken(HOST) + size <= self.LIMIT
        refusal = self.budget.take(self.number, name, HOST, size)
        assert (refusal is None) == fits
        if refusal is None:
            self.real[self.number] = name, 0

    @precondition(lambda self: self.real)
    @rule(data=st.data(), is_ready=st.booleans())
    def grow(self, data: st.DataObject, is_ready: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.real)))
        name, has = self.real[number]
        has = data.draw(st.integers(has, self.SIZES[name]))
        self.real[number] = name, has
        if is_ready:
            self.ready.add(number)
        self.budget.note(number, {HOST: has}, is_ready=number in self.ready)

    @precondition(lambda self: self.real)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.real)))
        del self.real[number]
        self.ready.discard(number)
        self.budget.release(number)

    @invariant()
    def it_is_never_crossed(self) -> None:
        assert sum(has for _, has in self.real.values()) <= self.budget.taken(HOST) <= self.LIMIT

    @invariant()
    def what_has_ended_takes_nothing(self) -> None:
        if not self.real:
            assert self.budget.taken(HOST) == 0


Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestMachine = pytest.mark.slow(Machine.TestCase)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_learned_sizes_keep_within_the_budget_if_replicas_are_alike(sizes: list[int]) -> None:
    budget = MemoryBudget({HOST: 1000})
    most = 0
    for number, size in enumerate(sizes):
        most = max(most, size)
        if budget.waits("m") or budget.take(number, "m", HOST, None) is not None:
            break
        # No larger than any before it, so that what was learned holds.
        budget.note(number, {HOST: min(size, budget.size("m", HOST, None).get(HOST, size))}, is_ready=True)
        assert budget.taken(HOST) <= 1000


# What the machine says


def test_a_gpu_is_the_one_that_a_replica_sees_under_its_number() -> None:
    assert gpu_name("cuda:1", None) == "GPU 1"
    assert gpu_name("cuda", "2,3") == "GPU 2"
    assert gpu_name("cuda:1", "2,3") == "GPU 3"
    assert gpu_name("cuda:1", "2") is None
    assert gpu_name("cuda:0", "") is None
    assert gpu_name("cpu", None) is None
