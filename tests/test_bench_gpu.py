"""`benchmarks.gpu`: how parts are run, cut and taken up again, and the report that is made of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import benchmarks.gpu.__main__ as commands
from benchmarks.gpu.record import BROKEN_DEVICE, Part, Recorder, Report, Step, read
from benchmarks.gpu.report import markdown
from benchmarks.gpu.runner import Command, Runner
from headwater_server.process.gpu import gpu_capacities
from tests.running import wait_for

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
MACHINE = {"cores": 2, "system": "Linux", "python": "3.11.7", "cuda": None, "packages": {"torch": "2"}, "commit": "abc"}
HEAD = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.record import Recorder

recorder = Recorder(Path(sys.argv[1]), float(sys.argv[2]))
marks = Path(sys.argv[3])

def mark(name):
    with marks.open("a") as file:
        file.write(name + " ")

def fine(step):
    step.check("it holds", True)

def step(name, measure=fine, needs_s=0):
    recorder.step(name, lambda one: (mark(name), measure(one)), needs_s)

def fail(step):
    raise ValueError("expected more")

def hang(step):
    time.sleep(60)

def die(step):
    os._exit(9)

def break_device(step):
    raise RuntimeError("CUDA error: device-side assert triggered")
"""


class Parts:
    """Runs a part whose steps a script has; what steps have begun is written down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._marks = folder / "marks"
        self._marks.touch()
        self.path = folder / "gpu.json"
        self.report = Report("cpu", True, MACHINE)
        self.limit_s = 30.0

    def command(self, script: str) -> Command:
        path = self._folder / "script.py"
        path.write_text(HEAD + script)
        self._marks.write_text("")
        return lambda name, file, limit_s: [sys.executable, str(path), str(file), str(limit_s), str(self._marks)]

    def run(self, script: str, within_s: float = float("inf")) -> Part:
        return Runner(self.report, self.path, self.command(script), self.limit_s).run("a", within_s)

    @property
    def begun(self) -> list[str]:
        """The steps that the last run has begun."""
        return self._marks.read_text().split()


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Parts(tmp_path)


class TestAPart:
    def test_passes_and_is_written(self, parts: Parts) -> None:
        assert parts.run("step('one'); step('two'); recorder.end()").status == "passed"
        assert read(parts.path, Report).parts["a"].steps["two"].has_passed

    def test_goes_on_after_a_step_that_fails(self, parts: Parts) -> None:
        part = parts.run("step('one', fail); step('two'); recorder.end()")
        assert part.status == "failed"
        assert "ValueError: expected more" in part.steps["one"].error
        assert part.steps["two"].has_passed

    def test_goes_on_in_another_process_after_a_step_that_ends_it(self, parts: Parts) -> None:
        part = parts.run("step('one'); step('two', die); step('three'); recorder.end()")
        assert parts.begun == ["one", "two", "three"]
        assert "ended with status 9" in part.steps["two"].error
        assert (part.status, part.is_whole) == ("failed", True)

    def test_goes_on_in_another_process_after_a_step_that_breaks_the_device(self, parts: Parts) -> None:
        script = "import os; step('one', break_device); step(f'in {os.getpid()}'.replace(' ', '')); recorder.end()"
        part = parts.run(script)
        assert [step.has_passed for step in part.steps.values()] == [False, True]
        assert (part.error, part.is_whole) == ("", True)

    def test_that_fails_between_its_steps_says_why(self, parts: Parts) -> None:
        part = parts.run("step('one')\nraise SystemExit('no server')")
        assert part.status == "failed"
        assert part.error.endswith("no server\n")

    def test_that_takes_too_long_is_ended(self, parts: Parts) -> None:
        parts.limit_s = 4
        part = parts.run("step('one'); step('two', hang); step('three'); recorder.end()")
        assert part.steps["one"].has_passed
        assert part.steps["two"].error == "the part's time, 4 s, was over"
        assert part.status == "failed"

    def test_that_is_ended_leaves_no_process(self, parts: Parts, tmp_path: Path) -> None:
        """A test's server, say, which pytest had no time to end."""
        parts.limit_s = 4
        note = tmp_path / "pid"
        server = f"one = subprocess.Popen(['sleep', '600'], start_new_session=True); pathlib.Path({str(note)!r})"
        parts.run(f"import pathlib, subprocess\n{server}.write_text(str(one.pid))\nstep('one', hang)")
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(note.read_text())).wait(10)


class TestAnotherRun:
    def test_runs_what_was_not_begun(self, parts: Parts) -> None:
        assert parts.run("step('one'); step('two', needs_s=1000); recorder.end()").status == "unfinished"
        part = parts.run("step('one'); step('two'); recorder.end()")
        assert parts.begun == ["two"]
        assert part.status == "passed"

    def test_begins_anew_what_had_no_time_left(self, parts: Parts) -> None:
        part = parts.run("step('one'); step('two', hang); recorder.end()", within_s=4)
        assert (list(part.steps), part.status) == (["one"], "unfinished")
        assert parts.run("step('one'); step('two'); recorder.end()").status == "passed"
        assert parts.begun == ["two"]

    def test_begins_anew_what_ctrl_c_has_ended(self, parts: Parts) -> None:
        def interrupt() -> None:
            wait_for(lambda: "two" in parts.begun)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                parts.run("step('one'); step('two', hang); recorder.end()")
            thread.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert list(read(parts.path, Report).parts["a"].steps) == ["one"]


def test_what_a_part_had_no_time_for_comes_after_the_others(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "needs_s = 0 if recorder.has('one') else 1000; step('one'); step('two', needs_s=needs_s); recorder.end()"
    command = parts.command(script)
    monkeypatch.setattr(commands, "part_command", lambda device, is_tiny: command)
    assert commands.run(["d", "a"], tmp_path, parts.report, float("inf"), is_anew=False) == 0
    assert parts.begun == ["one", "one", "two", "two"]
    assert commands.run(["d", "a"], tmp_path, parts.report, float("inf"), is_anew=False) == 0
    assert parts.begun == ["one", "one", "two", "two"]
    assert (tmp_path / "gpu.md").read_text() == markdown(read(parts.path, Report))


def test_an_error_of_cuda_ends_the_process_of_a_part(tmp_path: Path) -> None:
    def broken(step: Step) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    recorder = Recorder(tmp_path / "part.json", 10)
    with pytest.raises(SystemExit) as ended:
        recorder.step("one", broken)
    assert ended.value.code == BROKEN_DEVICE
    assert recorder.has("one")


class TestTheReport:
    def report(self) -> Report:
        step = Step(took_s=1.5, profile="copy in 3 ms")
        step.figure("bare", "rows/s", 1000, 1200, 1100)
        step.check("the trunk ran once", True, "9 runs")
        step.goal("Headwater / bare", [0.7, 0.8, 0.75], at_least=0.9)
        step.goal("memory", [0.05], at_most=0.1)
        failed = Step(took_s=0.1, error="Traceback\nValueError: expected more\n")
        parts = {"c": Part({"vision": step, "text": failed}, is_whole=True, took_s=12), "b": Part(left=["cycle 7"])}
        return Report("cuda:0", False, MACHINE, parts)

    def test_names_what_failed_and_what_missed_its_goal_first_with_its_profile(self) -> None:
        bad = markdown(self.report()).split("## b:")[0].split("## Failed, or missed its goal")[1]
        assert "**c, vision** missed its goal: Headwater / bare: 0.750 (0.700 to 0.800), goal at least 0.9" in bad
        assert "copy in 3 ms" in bad
        assert "ValueError: expected more" in bad
        assert "**b**, no time was left for: cycle 7" in bad
        assert "memory" not in bad

    def test_has_every_figure_with_its_range(self) -> None:
        text = markdown(self.report())
        assert "| bare | 1,100 | 1,000 to 1,200 | rows/s |" in text
        assert "- ok: the trunk ran once (9 runs)" in text
        assert "- met: memory: 0.050 (0.050 to 0.050), goal at most 0.1" in text

    def test_counts_and_says_what_was_not_run(self) -> None:
        text = markdown(self.report())
        assert "| failed | 12 s | 1 of 1 | 1 of 2 |" in text
        assert "| a | check, the tests marked gpu, and the demo against the CPU | not run | | | |" in text

    def test_says_that_tiny_sizes_mean_nothing(self) -> None:
        report = self.report()
        report.is_tiny = True
        assert "no figure means anything" in markdown(report)
        assert "no figure means anything" not in markdown(self.report())


@pytest.mark.skipif(bool(gpu_capacities()), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_exits_3(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (3, "", 1)
    assert "no NVIDIA GPU" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_there_is_not_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--only", "a,z", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 2
    assert ended.stderr.rstrip().endswith("--only: expected some of a, b, c, e, d, f, got z")
