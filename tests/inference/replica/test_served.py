"""Language models as a replica serves them: options, files, engines of the user's, and a real Triton."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.engine import EngineLimits, Sampling, SequenceRequest
from headwater.errors import DeclarationError, LoadError
from headwater.lm.engine_host import EngineHost
from headwater.lm.loading import SlotOptions, lm_signature, plan_language_model
from headwater.lm.null_engine import NullEngine
from headwater.lm.slot_engine import SlotEngine
from headwater.pipeline import PipelineSpec, StepSpec
from headwater.replica.callee import Answers, CalleeRequest
from headwater.replica.served import load_language_model, load_served
from headwater.runtime.compiled import CompiledModules
from headwater.signature import Signature
from headwater.wire.frame import FRAME, decode_frame
from headwater.wire.handshake import ReplicaSpec, ReplicaStatus
from headwater_server.binder.warmup_lm import counts, submits
from headwater_server.process.sweep import Journal, segments_mapped_by, sweep_replica
from tests.inference.lm.llamas import request, run
from tests.running import processes_of

pytestmark = pytest.mark.heavy
TINY = "lm:headwater.zoo:weights/tiny_lm"
ENGINES = """
from pathlib import Path
from headwater.lm.null_engine import NullEngine
from headwater.engine import EngineLimits

def null(folder, *, device, on_broken, length=100, **rest):
    assert isinstance(folder, Path)
    engine = NullEngine(EngineLimits(2, 0, length, 2 * length, 50))
    engine.asked = (device, on_broken, rest)
    return engine

def strict(folder, *, device, on_broken, size):
    raise ValueError(f"size {size} on purpose")

def failing(folder, *, device, on_broken):
    class Failing(NullEngine):
        def step(self):
            raise RuntimeError("no step on purpose")
    return Failing()

def deviceless(folder, *, on_broken):
    return NullEngine()

def limitless(folder, **rest):
    class Limitless:
        @property
        def limits(self):
            raise ValueError("no limits on purpose")
    return Limitless()

def mistaken(folder, **rest):
    return len(5)

def awaited(folder, **rest):
    class Awaited(NullEngine):
        async def close(self):
            pass
    return Awaited()

def none(folder, **rest):
    return 5

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer and no model, and beside it a module of engines that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lm_case_engines.py").write_text(ENGINES)
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


def spec_of(model: str, **options: Any) -> ReplicaSpec:
    return ReplicaSpec("served", model, "token", (), ".", options=options, device="cpu")


def failure(model: str, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        plan_language_model(model, options)
    assert caught.value.problem.fix
    return str(caught.value)


def test_options_have_defaults_and_are_taken() -> None:
    assert plan_language_model(TINY, {}).options == SlotOptions(attention="sdpa")
    options = {"dtype": "bfloat16", "attention": "eager", "max_waiting": 0, "context_length": None, "cache_tokens": 16}
    assert msgspec.structs.asdict(plan_language_model(TINY, options).options) == {  # type: ignore[arg-type]
        **msgspec.structs.asdict(SlotOptions()), **options,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_sequence": 4}, "unknown option 'max_sequence'; its options are dtype, attention, max_sequences"),
        ({"max_sequences": 0}, "options.max_sequences: expected `int` >= 1, got 0; correct `options.max_sequences`"),
        ({"max_sequences": 100_000_000}, "options.max_sequences: expected `int` <= 4096, got 100000000"),
        ({"max_waiting": -1}, "options.max_waiting: expected `int` >= 0, got -1"),
        ({"max_waiting": 1_000_001}, "options.max_waiting: expected `int` <= 1000000, got 1000001"),
        ({"cache_tokens": 15}, "options.cache_tokens: expected `int` >= 16, got 15; correct `options.cache_tokens`"),
        ({"cache_tokens": 2**41}, f"options.cache_tokens: expected `int` <= {2**40}, got {2**41}"),
        ({"context_length": 1}, "options.context_length: expected `int` >= 2, got 1"),
        (
            {"context_length": 513},
            "options.context_length: expected at most 512, the max_position_embeddings of the model's configuration, "
            "got 513; correct `options.context_length`",
        ),
        ({"prefill_chunk": 2.5}, "options.prefill_chunk: expected `int`, got 2.5"),
        ({"prefix_cache": "on"}, "options.prefix_cache: expected `bool`, got 'on'"),
        ({"context_length": "all"}, "options.context_length: expected `int | null`, got 'all'"),
        ({"max_step_s": 0}, "options.max_step_s: expected `float` > 0.0, got 0; correct `options.max_step_s`"),
        ({"max_step_s": "long", "engine": "lm_case_engines:null"}, "options.max_step_s: expected `float`, got 'long'"),
        ({"dtype": "int8"}, "options.dtype: expected auto or float32 or bfloat16 or float16, got 'int8'"),
        ({"attention": 3}, "options.attention: expected auto or sdpa or eager, got 3"),
        ({"engine": "engines"}, "options.engine: expected module:callable, got 'engines'"),
        ({"engine": 3}, "options.engine: expected module:callable, got 3"),
        ({"engine": "no_such_engines:make"}, "options.engine: there is no module 'no_such_engines'"),
        ({"engine": "lm_case_engines:make"}, "expected a callable 'make' in lm_case_engines, found none"),
        ({"engine": "lm_case_engines:number"}, "expected a callable 'number' in lm_case_engines, got 3"),
        ({"engine": "lm_case_engines:strict"}, "option 'size' is required, but missing"),
        ({"engine": "lm_case_engines:strict", "length": 3}, "unknown option 'length'; its options are size"),
        (
            {"engine": "lm_case_engines:deviceless"},
            "options.engine lm_case_engines:deviceless: it must take (folder, *, device, on_broken, **options): "
            "got an unexpected keyword argument 'device'",
        ),
        ({"engine": "os:getcwd"}, "options.engine os:getcwd: it must take (folder, *, device, on_broken, **options)"),
        ({"engine": "lm_case_engines:null", "device": "cpu"}, "unknown option 'device': the engine gets it"),
    ],
)
def test_wrong_options_are_named(folder: Path, options: dict[str, Any], says: str) -> None:
    assert says in failure(TINY, **options)


def test_files_that_must_be_there(folder: Path) -> None:
    message = failure(f"lm:{folder}")
    assert f"expected config.json, the model's configuration, in {folder}: No such file" in message
    (folder / "config.json").write_text("{")
    assert "expected config.json, the model's configuration, to be JSON" in failure(f"lm:{folder}")
    (folder / "tokenizer.json").unlink()
    message = failure(f"lm:{folder}", engine="lm_case_engines:null")
    assert f"expected tokenizer.json, the tokenizer, which the gateway needs, in {folder}" in message


def test_an_engine_of_the_users(folder: Path) -> None:
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:null", "length": 7, "more": [1]})
    told: list[str] = []
    engine = plan.load("cpu", told.append)
    assert engine.limits.context_length == 7
    device, on_broken, rest = engine.asked  # type: ignore[attr-defined]
    assert (device, rest) == ("cpu", {"more": [1]})
    on_broken("x")
    assert told == ["x"]


def test_the_format_of_tool_calls_is_told_to_the_gateway_and_to_no_engine(folder: Path) -> None:
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:null", "tool_parser": "mistral"})
    assert plan.load("cpu", lambda reason: None).asked[2] == {}  # type: ignore[attr-defined]
    spec = lm_signature("lm", folder, EngineLimits(2, 0, 100, 200, 50), plan.tool_parser).language_model
    assert spec is not None
    assert spec.tool_parser == plan_language_model(TINY, {"tool_parser": "mistral"}).tool_parser == "mistral"
    assert plan_language_model(TINY, {}).tool_parser is None
    said = failure(TINY, tool_parser="qwen")
    assert "options.tool_parser: expected harmony, kimi-k3, " in said
    assert ", xlam, got 'qwen'" in said


def test_the_format_of_reasoning_is_told_to_the_gateway_and_to_no_engine(folder: Path) -> None:
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:null", "reasoning": "none"})
    assert plan.load("cpu", lambda reason: None).asked[2] == {}  # type: ignore[attr-defined]
    limits = EngineLimits(2, 0, 100, 200, 50)
    spec = lm_signature("lm", folder, limits, reasoning=plan.reasoning).language_model
    assert spec is not None
    assert spec.reasoning == "none"
    assert plan_language_model(TINY, {"reasoning": "granite"}).reasoning == "granite"
    assert plan_language_model(TINY, {"reasoning": "auto"}).reasoning is None
    assert "options.reasoning: expected auto, none, harmony, " in failure(TINY, reasoning="on")


def test_how_long_a_step_may_take_is_told_to_the_host_and_to_no_engine(folder: Path) -> None:
    engine = "lm_case_engines:null"
    assert plan_language_model(TINY, {}).max_step_s == 300
    plan = plan_language_model(f"lm:{folder}", {"engine": engine, "max_step_s": 2})
    assert plan.max_step_s == 2
    assert plan.load("cpu", lambda reason: None).asked[2] == {}  # type: ignore[attr-defined]
    broken: list[str] = []
    options = {"engine": engine, "max_step_s": 0.3}
    served = load_language_model(spec_of(f"lm:{folder}", **options), lambda said: None, broken.append)
    try:
        assert isinstance(served.runner, EngineHost)
        assert served.runner.max_step_s == 0.3
    finally:
        served.unload()


def test_engines_that_can_not_be_made(folder: Path) -> None:
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:strict", "size": 3})
    with pytest.raises(LoadError, match=r"making its engine raised ValueError: size 3 on purpose at .*:13"):
        plan.load("cpu", lambda reason: None)
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:none"})
    with pytest.raises(LoadError, match=r"options\.engine: expected an engine, which has `limits`, got 5"):
        plan.load("cpu", lambda reason: None)
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:limitless"})
    with pytest.raises(LoadError, match=r"its engine's limits raised ValueError: no limits on purpose at .*engines.py"):
        plan.load("cpu", lambda reason: None)
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:awaited"})
    with pytest.raises(LoadError, match=r"expected a function `close`, got a coroutine function"):
        plan.load("cpu", lambda reason: None)


def test_a_callable_that_makes_no_engine_is_named_and_not_headwaters_own_code(folder: Path) -> None:
    plan = plan_language_model(f"lm:{folder}", {"engine": "json:dumps"})
    with pytest.raises(LoadError) as caught:
        plan.load("cpu", lambda reason: None)
    assert (
        "options.engine json:dumps: it must take (folder, *, device, on_broken, **options): making its engine raised "
        "TypeError: " in str(caught.value)
    )
    assert "loading.py" not in str(caught.value)
    plan = plan_language_model(f"lm:{folder}", {"engine": "lm_case_engines:mistaken"})
    with pytest.raises(LoadError, match=r"making its engine raised TypeError: object of type 'int' .*_engines\.py"):
        plan.load("cpu", lambda reason: None)


def test_the_signature(folder: Path) -> None:
    progress: list[str] = []
    spec = spec_of(f"lm:{folder}", engine="lm_case_engines:null")
    known: list[Signature] = []

    def note(signature: Signature) -> None:
        known.append(signature)
        progress.append("known")

    served = load_language_model(spec, progress.append, lambda reason: None, on_known=note)
    try:
        signature = served.signature
        assert known == [msgspec.structs.replace(signature, language_model=None)]
        assert signature == lm_signature("served", folder, EngineLimits(2, 0, 100, 200, 50))
        assert msgspec.convert(msgspec.to_builtins(signature), Signature) == signature
        assert signature.description == "The language model some-model."
        assert signature.language_model is not None
        assert signature.language_model.folder == str(folder)
        assert (signature.streams, signature.max_batch_size) == (True, 1)
        assert progress == [f"importing lm:{folder}", "known", "loading on cpu"]
    finally:
        served.unload()


def test_the_engine_that_is_built_in_has_the_models_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[SlotEngine] = []
    check = SlotEngine.check

    def watched(engine: SlotEngine) -> None:
        checked.append(engine)
        check(engine)

    monkeypatch.setattr(SlotEngine, "check", watched)
    engine = plan_language_model(TINY, {"max_sequences": 2, "max_waiting": 1, "context_length": 30}).load(
        "cpu", lambda reason: None
    )
    assert checked == [engine]
    assert (engine.limits.max_sequences, engine.limits.max_waiting, engine.limits.context_length) == (2, 1, 30)
    generation = json.loads((plan_language_model(TINY, {}).folder / "generation_config.json").read_text())
    ends = np.atleast_1d(generation["eos_token_id"]).tolist()
    other = next(token for token in range(9) if token not in ends)
    biased = {token: Sampling(temperature=0, logit_bias={token: 1000.0}) for token in (*ends, other)}
    answers = run(engine, *(request(str(token), [5], 2, sampling) for token, sampling in biased.items()))
    assert {id for id, events in answers.items() if events[-1].finish == "stop"} == set(map(str, ends))


@pytest.mark.parametrize("context_length", [1, 2, 5, 1000])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_warm_up_fits_the_engine_whatever_its_limits(context_length: int, count: int) -> None:
    limits = EngineLimits(8, 0, context_length, max(context_length, 8), 3)
    engine = NullEngine(limits)
    for submit in submits(count, limits, itertools.count()):
        engine.submit(SequenceRequest(str(submit.number), submit.prompt, submit.max_tokens, submit.sampling))
    assert engine.active == count


@pytest.mark.parametrize(
    ("limits", "wanted", "expected"),
    [
        (EngineLimits(8, 0, 100, 800, 3), None, [1, 2, 4, 8]),
        (EngineLimits(8, 0, 100, 800, 3), (3, 30, 50), [3, 8]),
        (EngineLimits(8, 0, 100, 800, 3), (), []),
        (EngineLimits(8, 0, 100, 16, 3), None, [1, 2, 3]),
        (EngineLimits(8, 0, 100, 16, 3), (2, 3, 4), [2, 3]),
        (EngineLimits(8, 0, 2, 8, 3), None, [1, 2, 4]),
        (EngineLimits(8, 0, 100, 4, 3), None, [1]),
        (EngineLimits(4096, 0, 100, 10**6, 3), None, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        (EngineLimits(4096, 0, 100, 10**6, 3), (1000,), [1000]),
    ],
)
def test_a_warm_up_has_no_more_sequences_than_the_cache_has_room_for(
    limits: EngineLimits, wanted: tuple[int, ...] | None, expected: list[int]
) -> None:
    assert counts(limits, wanted) == expected
    for count in expected:
        for submit in submits(count, limits, itertools.count()):
            assert submit.max_tokens > 0 or limits.cache_tokens < 5


@pytest.mark.parametrize("options", [{"cache_tokens": 16}, {"max_sequences": 1}, {"context_length": 2}])
def test_the_least_that_may_be_asked_for_can_be_served(options: dict[str, Any]) -> None:
    engine = plan_language_model(TINY, options).load("cpu", lambda reason: None)
    for count in counts(engine.limits, None):
        waiting = submits(count, engine.limits, itertools.count())
        for submit in waiting:
            engine.submit(SequenceRequest(str(submit.number), submit.prompt, submit.max_tokens, submit.sampling))
        assert engine.active == count
        finishes = []
        for _ in range(100):
            if not engine.has_work:
                break
            finishes += [event.finish for event in engine.step() if event.finish is not None]
        assert len(finishes) == count
        assert set(finishes) <= {"stop", "length"}


@contextlib.contextmanager
def replica(model: str, path: Path, **options: Any) -> Iterator[list[ReplicaStatus]]:
    """A replica's process until it is ready or has failed; what it said until then."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="hw-") as directory:
        spec = ReplicaSpec("served", model, "token", (str(path),), str(path), options=options, device="cpu")
        (Path(directory) / "spec.json").write_bytes(msgspec.json.encode(spec))
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater_server.process.launcher", "", "served", directory, str(write)],
            env={**os.environ, "TMPDIR": directory},
            pass_fds=[write],
            start_new_session=True,
        )
        try:
            os.close(write)
            said: list[ReplicaStatus] = []
            with os.fdopen(read) as lines:
                for line in lines:
                    said.append(msgspec.json.decode(line, type=ReplicaStatus))
                    if said[-1].event in ("ready", "failed"):
                        break
                yield said
        finally:
            journal = Journal(Path(directory))
            journal.note(process.pid, segments_mapped_by(processes_of(Path(directory))))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            assert sweep_replica(Path(directory)) == []


def test_a_replica_warms_up_through_its_own_triton(folder: Path) -> None:
    with replica(f"lm:{folder}", folder.parent, engine="lm_case_engines:null") as said:
        assert [status.text for status in said if status.text.startswith("warming")] == [
            "warming up, 1 sequence (1/2)", "warming up, 2 sequences (2/2)",
        ]  # fmt: skip
        assert said[-1].event == "ready"
        assert said[-1].signature is not None
        assert said[-1].signature["language_model"]["folder"] == str(folder)


def test_a_replica_whose_engine_fails_says_so(folder: Path) -> None:
    with replica(f"lm:{folder}", folder.parent, engine="lm_case_engines:failing") as said:
        assert said[-1].event == "failed"
        assert said[-1].text == "warm-up: a sequence ended with 'error': RuntimeError: no step on purpose"


@pytest.mark.parametrize(
    ("asked", "options", "expected"),
    [
        (None, {}, [1, 2, 4, 5]),
        ((9, 1, 1), {}, [5, 1, 1]),
        ((3, 1), {"compile": True}, [1, 1, 3, 3, 4, 4]),
    ],
    ids=["default", "asked", "compiled"],
)
def test_the_warm_up_has_the_sizes_that_are_asked_for_and_records_every_graph(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[int, ...] | None, options: dict[str, Any], expected: list[int]
) -> None:
    monkeypatch.setattr(
        "headwater.replica.served.compile_modules",
        lambda model, signature, device, sizes: CompiledModules("m", (), [*sizes, 4]),
    )
    spec = ReplicaSpec(
        "m", "headwater.zoo.scale:Scale", "", (), "", device="cpu", options=options, max_batch_size=5,
        warmup_batch_sizes=asked,
    )  # fmt: skip
    assert load_served(spec, lambda text: None, lambda reason: None).warmup_sizes == expected


def test_a_model_whose_answers_can_not_be_kept_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from headwater.zoo.scale import Scale\nclass Effects(Scale):\n    idempotent = False\n"
    (tmp_path / "effects_of_calls.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Scale", "Effects"):
        spec = ReplicaSpec("m", f"effects_of_calls:{name}", "", (), "", device="cpu", is_cached=True)
        if name == "Scale":
            load_served(spec, lambda text: None, lambda reason: None)
            continue
        with pytest.raises(DeclarationError, match=r"cache: expected .* got `m`, which is not idempotent; remove"):
            load_served(spec, lambda text: None, lambda reason: None)


AWAITED = """
import asyncio
from headwater import Model, Tensor

class Awaited(Model):
    inputs = [Tensor("x", "FP32", [1])]
    outputs = [Tensor("y", "FP32", [1])]
    noted = []

    async def load(self, device):
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()

    async def __call__(self, x):
        assert asyncio.get_running_loop() is self.loop
        return {"y": x + 1}

    async def unload(self):
        await asyncio.sleep(0)
        self.noted.append(asyncio.get_running_loop() is self.loop)

class Second(Awaited):
    inputs = [Tensor("y", "FP32", [1])]
    outputs = [Tensor("z", "FP32", [1])]

    async def __call__(self, y):
        return {"z": (await super().__call__(y))["y"]}
"""


@pytest.mark.parametrize("is_pipeline", [False, True], ids=["model", "pipeline"])
def test_an_async_load_has_ended_before_the_first_call_in_the_loop_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pipeline: bool
) -> None:
    (tmp_path / "awaited_hooks.py").write_text(AWAITED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "awaited_hooks", raising=False)
    steps = (StepSpec("trunk", "awaited_hooks:Awaited"), StepSpec("head", "awaited_hooks:Second"))
    pipeline = PipelineSpec(steps, ("head",), trunk="trunk") if is_pipeline else None
    model = "" if is_pipeline else "awaited_hooks:Awaited"
    spec = ReplicaSpec("m", model, "", (), "", device="cpu", pipeline=pipeline)
    served = load_served(spec, lambda text: None, lambda reason: None)
    found = served.loop.wait(answers_of(served.handlers[0]))
    assert found == ([[3.0]] if is_pipeline else [[2.0]])
    served.unload()
    noted = sys.modules["awaited_hooks"].Awaited.noted
    assert noted == [True] * len(served.models)


async def answers_of(handle: Answers) -> list[Any]:
    """What is answered to one row, 1.0."""
    answers = handle([CalleeRequest({"x": np.ones((1, 1), np.float32)}, {})])
    if isinstance(answers, AsyncIterator):
        (frame,) = [outputs[0][FRAME] async for outputs in answers]
        decoded, data = decode_frame(frame.tobytes())
        assert not decoded.pieces[0].failures
        (tensor,) = decoded.pieces[0].tensors
        return [np.frombuffer(data[0][0], np.float32).tolist() for _ in range(tensor.shape[0])]
    (outputs,) = await answers
    return list(outputs["y"].tolist())
