"""The guardian of one replica: starts it, watches its processes and calls, ends all its processes, and sweeps.

Run as ``python -m headwater_server.process.guardian NAME FOLDER STATUS_FD COMMAND_FD NICE -- ARGUMENTS...``, where NICE
is the priority with which the replica's session begins. With a process id in place of ``-- ARGUMENTS...``, the replica
is a child that is already running (`headwater.replica.preloaded`). The supervisor holds the other end of the command
pipe. When it writes ``stop\\n``, the guardian ends the replica gracefully (SIGTERM first) if it is ready, or else at
once; when it closes the pipe or dies, the guardian ends the replica at once. When the guardian has ended, nothing of
the replica remains, except for files that it reports as leftovers.

Like the modules that it imports, it needs only the standard library, so that a process per replica costs little.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from headwater_server.process.priority import set_session_priority
from headwater_server.process.probe import Probe
from headwater_server.process.sweep import (
    Journal,
    kill_group,
    process_stat,
    process_stats,
    segments_mapped_by,
    sweep_replica,
)

__all__ = ["CallWatch", "main"]

WATCHDOG_FILE: Final = "watchdog"
"""File in the replica's folder, maintained by `headwater.runtime.watchdog`."""
READY_FILE: Final = "ready"
"""File that the replica creates in its folder when it is ready. What it contains replaces `VITAL`."""
PR_SET_CHILD_SUBREAPER: Final = 36
CHECK_INTERVAL_S: Final = 0.5
"""Maximum time between two checks of the replica's processes."""
FULL_CHECK_EVERY: Final = 8
"""Every how many checks the guardian searches for new processes, which costs more than checking the known processes."""
UNLOAD_TIMEOUT_S: Final = 10.0
"""Time in which the host must end after SIGTERM; then its group is killed."""
SUSPECT_S: Final = 0.25
"""Time for which the host or a process of `VITAL` must stay in one of `BAD_STATES` before the replica is ended, even if
Triton still answers "ready". A debugger stops a process for a shorter time."""


class CallWatch:
    """Watchdog over the calls of the user's code; reads the watchdog file in a replica's folder, which has the limit of
    a call's time and the start times of the calls in progress."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / WATCHDOG_FILE
        self._late: set[int] = set()
        """Start times of the calls that were late at the last check."""
        self.is_busy = False
        """Whether a call was in progress at the last check."""

    def look(self, now_ns: int) -> str | None:
        """Return why the replica hangs; None if it doesn't, or if its calls have no limit. ``now_ns`` is a time of the
        monotonic clock.

        A call must be late at two checks in succession: a single late check may be due to a pause of the machine.
        """
        slots = array("q")
        with contextlib.suppress(OSError):  # vLLM's host has no such file
            slots.frombytes(self._path.read_bytes())
        if not slots:
            return None
        limit_ns = slots[0]
        self.is_busy = any(slots[1:])
        if not limit_ns:
            return None
        late = {began_ns for began_ns in slots[1:] if began_ns and now_ns - began_ns > limit_ns}
        is_hanging = bool(late & self._late)
        self._late = late
        return f"a call has taken longer than max_compute_s = {limit_ns / 1e9:g} s" if is_hanging else None


class _ReplicaChild:
    """A child that this process forked before it executed the guardian; has the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        """The child's exit status, as for `wait`; None while it runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, flags))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self) -> int | None:
        """Wait until the child has ended. Returns its exit status; negative: minus the number of the signal that killed
        it."""
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        """Send the child a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


VITAL: Final = ("tritonserver", "triton_python_b", "VLLM::")
"""Prefixes of the names of processes that a replica depends on: Triton and its stubs, vLLM's engine and its workers."""
BAD_STATES: Final = {"T": "is stopped", "t": "is stopped", "Z": "has ended", "X": "has ended", "": "has ended"}
"""States that a process doesn't leave by itself, as in proc(5), with their descriptions. The empty state: there is no
such process any more."""


class Guardian:
    """Guards a replica.

    Args:
        directory: the replica's folder; removed at the end.
        status_fd: descriptor to which status lines are written (see `headwater.wire.handshake.ReplicaStatus`).
        command_fd: read end of the supervisor's command pipe.
        session_nice: the priority with which the replica's session begins, on the scale of `nice`.
        replica: the command line that starts the replica's host, or the process id of a host that is already a child.
    """

    def __init__(
        self, directory: Path, status_fd: int, command_fd: int, session_nice: int, replica: list[str] | int
    ) -> None:
        self._directory = directory
        self._status_fd = status_fd
        self._command_fd = command_fd
        self._session_nice = session_nice
        self._replica = replica
        self._journal = Journal(directory)
        self._members: dict[int, str] = {}
        self._vital: tuple[str, ...] = VITAL
        """Beginnings of the names of processes that the replica depends on."""
        self._suspects: dict[int, float] = {}
        """Members in one of `BAD_STATES`: the monotonic time of the check that found the state first, by process id."""
        self._watchdog = CallWatch(directory)
        self._probe = Probe(directory)
        self._next_look_s = 0.0
        """Earliest monotonic time of the next check of the calls; wake-ups in between may come at any rate."""
        self._checks = 0
        self._host: subprocess.Popen[bytes] | _ReplicaChild

    def run(self) -> int:
        """Guard until the replica has ended and is swept. Returns the host's exit status: 128 plus the signal's
        number if a signal killed it, 1 if it couldn't be started."""
        # The guardian adopts the replica's orphans, so that it can wait until the last of them is gone.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        if isinstance(self._replica, int):
            self._host = _ReplicaChild(self._replica)
        else:
            try:
                self._host = subprocess.Popen(
                    self._replica, pass_fds=(self._status_fd,), stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                self._fail("its process can't be started", error)
                self._send(event="ended", leftovers=sweep_replica(self._directory))
                return 1
        set_session_priority(self._host.pid, self._session_nice)
        # Only the supervisor ends the guardian, over the pipe. The signals are ignored only after the replica has
        # started, since children inherit ignored signals.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            self._journal.note(self._host.pid, ())
        except OSError as error:
            reason = self._fail("its folder can't be written", error)
        else:
            reason = self._watch(wakeup_read)
        self._send(event="ending", text=reason)
        self._end_group()
        leftovers = sweep_replica(self._directory, self._journal.segments)
        exit_status = self._host.returncode
        assert exit_status is not None  # `_end_group` has waited
        self._send(event="ended", text=reason, exit_status=exit_status, leftovers=leftovers)
        return exit_status if exit_status >= 0 else 128 - exit_status

    def _watch(self, wakeup: int) -> str:
        """Wait for a reason to end the replica, and return that reason."""
        selector = selectors.DefaultSelector()
        selector.register(self._command_fd, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        stop_before: float | None = None
        while True:
            for key, _ in selector.select(CHECK_INTERVAL_S):
                if key.fd == self._command_fd:
                    if not os.read(self._command_fd, 64):
                        return "the supervisor is gone"
                    if not self._is_ready():
                        return "stopped before it was ready"
                    if stop_before is None:
                        stop_before = time.monotonic() + UNLOAD_TIMEOUT_S
                        self._host.send_signal(signal.SIGTERM)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup, 512)
                    self._reap_orphans()
            if (status := self._host.poll()) is not None:
                return "stopped" if stop_before is not None else _describe_exit(status)
            if stop_before is not None and time.monotonic() > stop_before:
                return f"stopped, but unload() took more than {UNLOAD_TIMEOUT_S:g} s"
            if stop_before is None and (reason := self._inspect()) is not None:
                return reason

    def _reap_orphans(self) -> None:
        """Reap orphans that the callable left; `_watch` reaps the host."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self._host.pid:
                    return
                os.waitpid(ended.si_pid, 0)

    def _inspect(self) -> str | None:
        """Inspect the group's processes and calls. Returns a problem that persists; None if there is no such
        problem."""
        # Until the replica is ready, only its segments are noted: the replica itself reports a failed start.
        if not self._members and self._is_ready():
            self._vital = tuple((self._directory / READY_FILE).read_text().split()) or VITAL
        elif not self._members:
            self._checks += 1
            if self._checks % FULL_CHECK_EVERY == 1:
                self._note_segments(_group_states(self._host.pid))
            return None
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + CHECK_INTERVAL_S / 2
            if (reason := self._watchdog.look(time.monotonic_ns())) is not None:
                return reason
            if (reason := self._probe.look(is_busy=self._watchdog.is_busy)) is not None:
                return reason
        current = self._states()
        for pid, (name, _) in current.items():
            self._members.setdefault(pid, name)
        suspects: dict[int, float] = {}
        for pid, name in list(self._members.items()):
            state = current.get(pid, (name, ""))[1]
            if state not in BAD_STATES:
                continue
            if pid != self._host.pid and not name.startswith(self._vital):
                if pid not in current:
                    del self._members[pid]
                continue
            since_s = suspects[pid] = self._suspects.get(pid, now_s)
            if now_s - since_s >= SUSPECT_S:
                return f"its process {name} ({pid}) {BAD_STATES[state]}"
        self._suspects = suspects
        return None

    def _is_ready(self) -> bool:
        return (self._directory / READY_FILE).exists()

    def _states(self) -> dict[int, tuple[str, str]]:
        """Name and state of the group's members, by process id. Most calls check only the known members; see
        `FULL_CHECK_EVERY`."""
        self._checks += 1
        if self._checks % FULL_CHECK_EVERY != 1 and len(self._members) > 1:
            return {
                pid: (name, stat.state)
                for pid, name in self._members.items()
                if (stat := process_stat(pid)) is not None and stat.name == name
            }
        current = _group_states(self._host.pid)
        self._note_segments(current)
        return current

    def _note_segments(self, pids: Iterable[int]) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end a replica that serves
            self._journal.note(self._host.pid, segments_mapped_by(pids))

    def _end_group(self) -> None:
        self._note_segments(_group_states(self._host.pid))
        kill_group(self._host.pid)
        self._host.wait()
        # Processes that the callable started in other sessions have become children of the guardian by now.
        while True:
            for pid in [pid for pid, stat in process_stats() if stat.parent == os.getpid()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                os.wait()
            except ChildProcessError:
                return

    def _fail(self, failure: str, error: OSError) -> str:
        """Report why the replica can't start, and return that reason."""
        reason = f"{failure}: {error}"
        lacks = not isinstance(error, (FileNotFoundError, PermissionError))  # a lack of processes, space or descriptors
        self._send(event="failed", text=reason, cause=f"{failure}: {error.strerror}", is_shortage=lacks)
        return reason

    def _send(self, **status: object) -> None:
        with contextlib.suppress(OSError):  # the supervisor may be gone
            os.write(self._status_fd, json.dumps(status).encode() + b"\n")


def _describe_exit(returncode: int) -> str:
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"


def _group_states(group: int) -> dict[int, tuple[str, str]]:
    """Name and state of every process of a group, by process id."""
    return {pid: (stat.name, stat.state) for pid, stat in process_stats() if stat.group == group}


def main() -> None:
    """Entry point; see the module's docstring."""
    _, directory, status_fd, command_fd, nice, child, *arguments = sys.argv[1:]
    replica = arguments if child == "--" else int(child)
    sys.exit(Guardian(Path(directory), int(status_fd), int(command_fd), int(nice), replica).run())


if __name__ == "__main__":
    main()
