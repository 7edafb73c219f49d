"""Models whose torch modules are compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater import Model, Tensor
from headwater.errors import LoadError, ReplicaError
from headwater.runtime.compiled import begin_graphs, compile_modules, compiler_problem
from headwater.signature import Signature

pytestmark = pytest.mark.heavy
TORCHS_OWN_WARNING = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


class Net(Model):
    """Two layers."""

    inputs = (Tensor("x", "FP32", [8]),)
    outputs = (Tensor("y", "FP32", [4]),)
    arrays = "torch"

    def load(self, device: str) -> None:
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).eval()

    def __call__(self, *, x: Any) -> Any:
        return {"y": self.net(x)}


class Aside(Net):
    """A network that ``__call__`` reaches without its attribute."""

    def load(self, device: str) -> None:
        super().load(device)
        self.nets = [self.net]


def loaded(model: Model | None = None) -> tuple[Model, Signature]:
    model = model or Net()
    model.load("cpu")
    return model, Signature.of(model, name="m", max_batch_size=8)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each module was to be compiled with; it is not."""
    asked: list[dict[str, Any]] = []

    def compile(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        asked.append(options)
        return module

    monkeypatch.setattr(torch, "compile", compile)
    return asked


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """The number of graphs that torch has compiled."""
    counters = torch._dynamo.utils.counters  # private: torch shows the number nowhere else
    torch.compiler.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    counters.clear()


@TORCHS_OWN_WARNING
@torch.no_grad()
def test_the_numbers_are_those_of_the_model_as_it_is_for_any_batch_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graphs: Callable[[], int]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, _ = loaded()
    model, signature = loaded()
    modules = compile_modules(model, signature, "cpu", [1, 2, 8])
    assert modules.sizes == ()
    with pytest.raises(ReplicaError, match="nothing was compiled in the warm-up"):
        modules.check()
    for rows in (1, 2, 8, 5):
        x = torch.linspace(-2, 2, rows * 8).reshape(rows, 8)
        assert torch.allclose(model(x=x)["y"], plain(x=x)["y"], atol=1e-6)
    modules.check()
    assert graphs() == 2  # of one row, and of any number
    uncalled = compile_modules(*loaded(Aside()), "cpu", [1])
    with pytest.raises(ReplicaError, match=r"^model .*:Aside: options.compile: nothing was compiled in the warm-up"):
        uncalled.check()


def test_on_a_gpu_each_size_is_compiled_for_a_cuda_graph(compiled: list[dict[str, Any]]) -> None:
    model, signature = loaded()
    assert compile_modules(model, signature, "cuda:0", [1, 2, 4]).sizes == [1, 2, 4, 8]
    assert [(one["mode"], one["dynamic"]) for one in compiled] == [("reduce-overhead", False)]


@pytest.mark.parametrize("inputs", [(Tensor("x", "FP32", [-1]),), (Tensor("x", "BYTES", [1]),)], ids=["-1", "text"])
def test_where_rows_differ_in_size_there_is_no_graph(compiled: list[dict[str, Any]], inputs: Any) -> None:
    class Varying(Net): ...

    Varying.inputs = inputs
    assert compile_modules(*loaded(Varying()), "cuda:0", [1, 2]).sizes == ()
    assert ["mode" in one for one in compiled] == [False]


@TORCHS_OWN_WARNING
@torch.no_grad()
def test_no_size_is_beyond_what_torch_compiles_for_one_module(
    monkeypatch: pytest.MonkeyPatch, graphs: Callable[[], int]
) -> None:
    """In the thread that calls the model: the setting is per thread."""
    compile = torch.compile

    @functools.wraps(compile)
    def without_a_gpu(module: torch.nn.Module, *, mode: str, **options: Any) -> Any:
        return compile(module, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", without_a_gpu)
    sizes = list(range(1, 21))
    model, signature = loaded()
    compile_modules(model, signature, "cuda:0", sizes)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: [model(x=torch.ones(size, 8)) for size in sizes]).result()
    assert graphs() == len(sizes)


@TORCHS_OWN_WARNING
def test_cuda_graphs_are_kept_for_whichever_thread_asks() -> None:
    from torch._inductor import cudagraph_trees

    def kept() -> tuple[bool, Any]:
        was_there = hasattr(cudagraph_trees.local, "tree_manager_containers")
        begin_graphs()
        containers = cudagraph_trees.local.tree_manager_containers
        steps = cudagraph_trees.MarkStepBox.mark_step_counter
        begin_graphs()
        assert cudagraph_trees.local.tree_manager_containers is containers
        assert cudagraph_trees.MarkStepBox.mark_step_counter != steps
        return was_there, cudagraph_trees.get_container(0)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        found = [one.submit(kept).result(), other.submit(kept).result()]
    assert [was_there for was_there, _ in found] == [False, False]
    assert found[0][1] is not found[1][1]


class Bare(Net):
    def load(self, device: str) -> None:
        self.scale = torch.ones(4)


@pytest.mark.parametrize(
    ("model", "sizes", "reason"),
    [
        (Bare(), [1], "expected a torch.nn.Module among the attributes that load() sets, found none"),
        (Net(), [], "expected a warm-up, in which modules are compiled, got `warmup_batch_sizes: []`"),
    ],
)
def test_what_can_not_be_compiled_keeps_the_replica_from_starting(model: Model, sizes: list[int], reason: str) -> None:
    with pytest.raises(LoadError) as raised:
        compile_modules(*loaded(model), "cpu", sizes)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("device", "variable", "reason"),
    [
        ("cpu", "CXX", "it needs a C++ compiler, and there is no no-such-compiler"),
        ("cuda:0", "CC", "it needs a C compiler, and there is no no-such-compiler"),
    ],
)
def test_a_missing_compiler_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, device: str, variable: str, reason: str
) -> None:
    monkeypatch.setenv(variable, "no-such-compiler")
    problem = compiler_problem("m", device)
    assert problem is not None
    assert reason in problem.reason
    assert f"name a compiler in {variable}" in problem.fix
    with pytest.raises(LoadError, match="no-such-compiler"):
        compile_modules(*loaded(), device, [1])


def test_missing_headers_of_python_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headwater.runtime.compiled.sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", "true")
    problem = compiler_problem("m", "cpu")
    assert problem is not None
    assert f"there is no {tmp_path}/Python.h" in problem.reason
