"""Constrains answers to grammars: processes compile grammars, follow them, and compute which tokens may come next.

The engine's process never parses a client's grammar (see `headwater.lm.grammar_host`). A grammar that takes too much
time or memory, or that crashes its process, ends only the sequences that follow it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch

from headwater.engine import Finish, Grammar, GrammarKind, SequenceRequest
from headwater.errors import ReplicaError
from headwater.lm.compile_queue import LANES, CompileQueue
from headwater.lm.grammar_processes import GrammarProcess, GrammarProcesses
from headwater.lm.grammar_wire import COMPILE_BYTES, FOLLOW_BYTES, MASK_CPU_S, OUT_OF_MEMORY, TOKEN, TOKEN_CPU_S, Reply
from headwater.lm.sampling import Allowed

__all__ = ["KINDS", "Compilation", "Constraint", "Grammars"]

KINDS: Final = frozenset[GrammarKind]({"json_schema", "regex", "lark"})
KEPT: Final = 64
"""The most compiled grammars that are kept while no answer follows them."""
KEPT_BYTES: Final = 64 * 2**20
"""The most bytes by which the compilers of the grammars that `KEPT` counts may have grown, in total."""
MOST_BYTES: Final = 2**30
"""The most bytes by which the processes of all answers may have grown, in total. Beyond this limit the answer with the
largest process ends."""
REFUSED: Final = 1024
"""The most refused grammars that are remembered, with the reasons."""
MOST_WAITING: Final = 64
"""The most grammars of a scope that may wait to be compiled."""
MASK_WAIT_S: Final = 0.05
"""The most seconds that a call of `Grammars.wait` takes. A call beside other work doesn't wait for a sequence with a
mask that once took longer."""
_EXPECTED: Final = {"json_schema": "a JSON schema", "regex": "a regular expression", "lark": "a grammar"}
_COMPILE_LIMITS: Final = (
    f"to compile it takes more than {LANES[-1].cpu_s:g} s of processor time, or {COMPILE_BYTES >> 20} MiB of memory"
)
_FOLLOW_LIMITS: Final = (
    f"the next token takes more than {MASK_CPU_S:g} s of processor time, or {TOKEN_CPU_S:g} s a token on average, "
    f"or more than {FOLLOW_BYTES >> 20} MiB of memory"
)
_CAUSES: Final[dict[int, str]] = {signal.SIGPROF: "time", signal.SIGABRT: "memory", signal.SIGSEGV: "depth"}
_LOST: Final = "the process of the grammar ended; try again"


class Compilation:
    """A grammar and the state of its compilation: waiting, running, succeeded or failed."""

    def __init__(self, grammars: Grammars, grammar: Grammar, scope: str) -> None:
        self._grammars = grammars
        self.kind = grammar.kind
        self.text = grammar.text
        self.before = grammar.before
        self.scope = scope
        """The cache scope of the first request with the grammar."""
        self.lane = 0
        """The index in `LANES` of the lane in which the grammar waits or is compiled."""
        self.users = 0
        """Number of sequences that wait for the grammar or follow it."""
        self.process: GrammarProcess | None = None
        """The compiler, which lives as long as followers may be forked; None before it is started and after its end."""
        self.is_running = False
        """Whether the compiler is working; False while the grammar waits, and after the reply."""
        self.first: Reply | None = None
        """The compiler's reply, with the tokens that an answer may begin with; None until the grammar is compiled."""
        self.error = ""
        """Why the grammar can't be compiled; empty unless the compilation has failed."""
        self.is_lost = False
        """Whether `error` has another cause than the grammar."""
        self.has_ended = False
        """Whether this compilation was dropped; a sequence that waits for the grammar needs another compilation."""

    @property
    def is_done(self) -> bool:
        """Whether the compilation has succeeded or failed."""
        return self.first is not None or bool(self.error)

    def note(self, reply: Reply) -> None:
        """See `Listener.note`."""
        self.is_running = False
        if reply.error:
            self._grammars.refuse(self, reply.error)
        else:
            self.first = reply
        self._grammars.end_compiling(self)

    def end(self, status: int) -> None:
        """See `Listener.end`."""
        self.process = None
        if not self.is_running:
            self._grammars.forget(self)
            return
        self.is_running = False
        cause = _cause(status)
        if not self.users:
            self._grammars.forget(self)
        elif cause is None:
            self.error, self.is_lost = _LOST, True
            self._grammars.forget(self)
        elif cause == "time" and self.lane + 1 < len(LANES):
            self._grammars.end_compiling(self)
            self.lane += 1
            self._grammars.queue(self)
            return
        else:
            self._grammars.refuse(self, "it is nested too deeply" if cause == "depth" else _COMPILE_LIMITS)
        self._grammars.end_compiling(self)


class Constraint:
    """The state of a sequence in its grammar.

    Args:
        request: the sequence's request, which has a grammar.
        compilation: the compiled grammar.
        eos_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, request: SequenceRequest, compilation: Compilation, eos_ids: Sequence[int]) -> None:
        assert request.grammar is not None
        assert compilation.first is not None
        self._grammar = request.grammar
        self._withheld = eos_ids if request.ignore_eos else ()
        """Tokens that are allowed only where the answer must end."""
        self.compilation = compilation
        self.process: GrammarProcess | None = None
        self.mask = b""
        """Which tokens may come next, a bit for each token, as in `Reply.mask`; empty while the mask is computed, or if
        its computation failed."""
        self.size_bytes = 0
        """Bytes by which the sequence's process has grown, as of its last reply."""
        self.is_slow = False
        """Whether a step has waited for a mask for `MASK_WAIT_S` in vain."""
        self.finish: Finish | None = None
        """How the sequence must end: ``rejected`` or ``error``; None while it may continue."""
        self.error = ""
        self.note(compilation.first._replace(size_bytes=0))

    @property
    def is_ready(self) -> bool:
        """Whether the mask is computed, or the sequence must end."""
        return bool(self.mask) or self.finish is not None

    @property
    def is_late(self) -> bool:
        """Whether a step has waited for a mask in vain, and the present mask is still not computed."""
        return self.is_slow and not self.is_ready

    def advance(self, token: int) -> None:
        """Have the mask after this token computed."""
        self.mask = b""
        if self.process is not None:
            self.process.send(TOKEN.pack(token))

    def reject(self, reason: str) -> None:
        """Have the engine end the sequence because of its grammar, unless it must end already."""
        if self.finish is None:
            self.finish, self.error = "rejected", refusal(self._grammar, reason)

    def note(self, reply: Reply) -> None:
        """See `Listener.note`."""
        self.size_bytes = reply.size_bytes
        if reply.error:
            self.reject(reply.error)
        elif self._withheld and not reply.is_stopped:
            bits = bytearray(reply.mask)
            for id in self._withheld:
                bits[id // 8] &= ~(1 << id % 8) & 255
            self.mask = bytes(bits)
        else:
            self.mask = reply.mask

    def end(self, status: int) -> None:
        """See `Listener.end`."""
        if _cause(status) is not None:
            self.reject(_FOLLOW_LIMITS)
        elif self.finish is None:
            self.finish, self.error = "error", f"{self._grammar.field}: {_LOST}"


class Grammars:
    """Has grammars compiled for a tokenizer, and keeps the most recently used. Only a single thread may use it.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: the model's vocabulary size, which may exceed the tokenizer's.
        eos_ids: the model's end-of-sequence tokens.

    Raises:
        ReplicaError: the library can't read the tokenizer, or no token ends a sequence.
        ChildProcessError, OSError: as `GrammarProcesses`.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        if not eos_ids:
            raise ReplicaError("the model has no end-of-sequence token")
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        self._processes = GrammarProcesses(tokenizer, vocab_size, self._eos_ids)
        self._queues = [CompileQueue[Compilation](lane) for lane in LANES]
        self._compilations: OrderedDict[tuple[str, str, str], Compilation] = OrderedDict()
        """Compilations that wait, run or have succeeded, by kind, text and `Grammar.before`; the most recently used is
        last."""
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Why grammars can't be compiled, by `_digest`; the last refused is last."""
        self._constraints: set[Constraint] = set()

    def is_full(self, scope: str) -> bool:
        """Whether a scope has `MOST_WAITING` grammars that wait to be compiled."""
        return sum(queue.waiting(scope) for queue in self._queues) >= MOST_WAITING

    def compile(self, grammar: Grammar, scope: str) -> Compilation:
        """Have a grammar compiled for a sequence, unless its compilation exists already. `leave` ends the sequence's
        use of the grammar. Sequences with the same grammar share the compilation. For a grammar that was refused
        before, the compilation is new, and has an error at once.

        Args:
            scope: the request's cache scope; scopes take turns.
        """
        key = (grammar.kind, grammar.text, grammar.before)
        compilation = self._compilations.get(key)
        if compilation is None:
            compilation = Compilation(self, grammar, scope)
            if (error := self._refused.get(_digest(compilation))) is not None:
                compilation.error = error
                return compilation
            self._compilations[key] = compilation
            self.queue(compilation)
        self._compilations.move_to_end(key)
        compilation.users += 1
        return compilation

    def leave(self, compilation: Compilation) -> None:
        """Note that a sequence no longer needs a grammar. If no other sequence needs it, an unfinished compilation is
        dropped."""
        compilation.users -= 1
        if compilation.users > 0 or compilation.is_done or compilation.has_ended:
            return
        self.forget(compilation)
        if not compilation.is_running:
            self._queues[compilation.lane].discard(compilation.scope, compilation)
        elif compilation.process is not None:
            compilation.process.kill()

    def follow(self, request: SequenceRequest, compilation: Compilation) -> Constraint:
        """Constrain a sequence to a compiled grammar. Call `close` instead of `leave` when the sequence ends."""
        constraint = Constraint(request, compilation, self._eos_ids)
        assert compilation.process is not None
        constraint.process = self._processes.follow(compilation.process, constraint)
        self._constraints.add(constraint)
        return constraint

    def close(self, constraint: Constraint) -> None:
        """End the process that follows a sequence, and the sequence's use of its grammar."""
        self._constraints.discard(constraint)
        self.leave(constraint.compilation)
        if constraint.process is not None:
            if not constraint.mask:  # it may be busy
                constraint.process.kill()
            self._processes.release(constraint.process)

    def poll(self, timeout_s: float = 0) -> None:
        """Read the replies of the processes; if there are no replies yet, wait up to `timeout_s`. If the processes of
        all answers exceed `MOST_BYTES` in total, reject the answer with the largest."""
        self._processes.poll(timeout_s)
        sizes = {constraint: constraint.size_bytes for constraint in self._constraints if constraint.finish is None}
        if sum(sizes.values()) > MOST_BYTES:
            largest = max(sizes, key=sizes.__getitem__)
            largest.reject(f"all grammars together take more than {MOST_BYTES >> 20} MiB of memory, and it the most")

    def wait(self, constraints: Iterable[Constraint], *, is_needed: bool) -> None:
        """Wait for the masks of constraints, at most `MASK_WAIT_S`, and mark the constraints that are not ready as
        slow.

        Args:
            is_needed: whether there is no other work meanwhile; if False, the call does not wait for slow constraints.
        """
        self.poll()
        until_s = time.monotonic() + MASK_WAIT_S
        while waits := [
            constraint
            for constraint in constraints
            if not constraint.is_ready and (is_needed or not constraint.is_slow)
        ]:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                for constraint in waits:
                    constraint.is_slow = True
                return
            self.poll(left_s)

    def allowed(self, rows: Sequence[int], constraints: Sequence[Constraint], device: torch.device) -> Allowed:
        """The masks of constraints, which must have a mask; each belongs to the row at the same index."""
        size = (self._vocab_size + 7) // 8
        masks = bytearray().join(constraint.mask[:size] for constraint in constraints)
        bits = torch.frombuffer(masks, dtype=torch.uint8).view(len(rows), size).to(device)
        powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
        tokens = (bits[:, :, None] & powers).bool().flatten(1)
        return Allowed(rows, tokens[:, : self._vocab_size])

    def trim(self) -> None:
        """End the compilers of kept grammars beyond `KEPT` and `KEPT_BYTES`, the least recently used first. Call it
        when every sequence that can follow its grammar does."""
        followed = {constraint.compilation for constraint in self._constraints}
        kept = [
            compilation
            for compilation in self._compilations.values()
            if compilation.first is not None and compilation not in followed
        ]
        size_bytes = sum(compilation.first.size_bytes for compilation in kept if compilation.first is not None)
        for count, compilation in zip(range(len(kept), 0, -1), kept, strict=True):
            if count <= KEPT and size_bytes <= KEPT_BYTES:
                return
            assert compilation.first is not None
            assert compilation.process is not None
            size_bytes -= compilation.first.size_bytes
            self.forget(compilation)
            self._processes.release(compilation.process)

    def shut(self) -> None:
        """End all processes."""
        self._processes.close()

    # Called by compilations.

    def queue(self, compilation: Compilation) -> None:
        """Add a grammar to the queue of its lane, and start the compilations that may run."""
        self._queues[compilation.lane].add(compilation.scope, compilation)
        self._start()

    def end_compiling(self, compilation: Compilation) -> None:
        """Note that a compilation no longer runs in its lane, and start the next."""
        self._queues[compilation.lane].end()
        self._start()

    def refuse(self, compilation: Compilation, reason: str) -> None:
        """Remember that a grammar can't be compiled."""
        compilation.error = reason
        self.forget(compilation)
        self._refused[_digest(compilation)] = reason
        if len(self._refused) > REFUSED:
            self._refused.popitem(last=False)

    def forget(self, compilation: Compilation) -> None:
        """Drop a grammar, so that the next sequence has it compiled again."""
        compilation.has_ended = True
        key = (compilation.kind, compilation.text, compilation.before)
        if self._compilations.get(key) is compilation:
            del self._compilations[key]

    def _start(self) -> None:
        for lane, queue in zip(LANES, self._queues, strict=True):
            while (compilation := queue.take()) is not None:
                compilation.is_running = True
                compilation.process = self._processes.compile(
                    compilation.kind, compilation.text, compilation.before, lane.cpu_s, compilation
                )


def refusal(grammar: Grammar, reason: str) -> str:
    """The message of a request that is rejected for its grammar."""
    return f"{grammar.field}: expected {_EXPECTED[grammar.kind]} that answers can be held to, but {reason}"


def _digest(compilation: Compilation) -> bytes:
    key = f"{compilation.kind} {len(compilation.text)} {compilation.text} {compilation.before}"
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _cause(status: int) -> str | None:
    """The limit that ended a process: ``time``, ``memory`` or ``depth``; None if the process ended for another reason.
    `status` is as `Listener.end` gets it."""
    if status < 0:
        return None
    if os.WIFSIGNALED(status):
        return _CAUSES.get(os.WTERMSIG(status))
    return "memory" if os.WEXITSTATUS(status) == OUT_OF_MEMORY else None
