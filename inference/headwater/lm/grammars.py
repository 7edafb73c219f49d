"""Answers in a given form: which tokens may come next, by processes that compile grammars and follow them.

Nothing of a client's grammar is read in the engine's process (see `headwater.lm.grammar_host`): one that takes too
much time or memory, or that ends its process, ends only the sequences that follow it.
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
"""How many compiled grammars are kept that no answer follows."""
KEPT_BYTES: Final = 64 * 2**20
"""How much they may have grown together."""
MOST_BYTES: Final = 2**30
"""How much all processes may have grown. Beyond it the largest answer's ends."""
REFUSED: Final = 1024
"""How many refused grammars are remembered."""
MOST_WAITING: Final = 64
"""How many grammars of a scope may wait to be compiled."""
MASK_WAIT_S: Final = 0.05
"""How long a step waits for a mask, once for each sequence."""
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
    """A grammar that waits to be compiled, is compiled, was, or can't be."""

    def __init__(self, grammars: Grammars, grammar: Grammar, scope: str) -> None:
        self._grammars = grammars
        self.kind = grammar.kind
        self.text = grammar.text
        self.scope = scope
        self.lane = 0
        self.users = 0
        """Sequences that wait for it, or follow it."""
        self.process: GrammarProcess | None = None
        self.is_running = False
        self.first: Reply | None = None
        """What an answer may begin with, once it is compiled."""
        self.error = ""
        """Why it can't be compiled."""
        self.is_lost = False
        """Whether something else is to blame than the grammar."""
        self.has_ended = False
        """Whether it must be compiled again."""

    @property
    def is_done(self) -> bool:
        """Whether it was compiled, or can't be."""
        return self.first is not None or bool(self.error)

    def note(self, reply: Reply) -> None:
        """As `Listener.note`."""
        self.is_running = False
        if reply.error:
            self._grammars.refuse(self, reply.error)
        else:
            self.first = reply
        self._grammars.end_compiling(self)

    def end(self, status: int) -> None:
        """As `Listener.end`."""
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
        request: the sequence's, with a grammar.
        compilation: the grammar, compiled.
        eos_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, request: SequenceRequest, compilation: Compilation, eos_ids: Sequence[int]) -> None:
        assert request.grammar is not None
        assert compilation.first is not None
        self._grammar = request.grammar
        self._withheld = eos_ids if request.ignore_eos else ()
        """Tokens that are allowed only where nothing else is."""
        self.compilation = compilation
        self.process: GrammarProcess | None = None
        self.mask = b""
        """Which tokens may come next, one bit each; empty while it is computed."""
        self.size_bytes = 0
        """How much its process has grown."""
        self.is_slow = False
        """Whether a step has waited for it for too long."""
        self.finish: Finish | None = None
        """How the sequence must end: ``rejected`` or ``error``."""
        self.error = ""
        self.note(compilation.first._replace(size_bytes=0))

    @property
    def is_ready(self) -> bool:
        """Whether it is known what may come next, or that nothing will be."""
        return bool(self.mask) or self.finish is not None

    @property
    def is_late(self) -> bool:
        """Whether a step has waited for it for too long, and it is still not known what may come next."""
        return self.is_slow and not self.is_ready

    def advance(self, token: int) -> None:
        """Begin to compute what may come after this token."""
        self.mask = b""
        if self.process is not None:
            self.process.send(TOKEN.pack(token))

    def reject(self, reason: str) -> None:
        """End the sequence for its grammar."""
        if self.finish is None:
            self.finish, self.error = "rejected", refusal(self._grammar, reason)

    def note(self, reply: Reply) -> None:
        """As `Listener.note`."""
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
        """As `Listener.end`."""
        if _cause(status) is not None:
            self.reject(_FOLLOW_LIMITS)
        elif self.finish is None:
            self.finish, self.error = "error", f"{self._grammar.field}: {_LOST}"


class Grammars:
    """Has grammars compiled for one tokenizer, and remembers the last ones; used by one thread.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: the model's; it may exceed the tokenizer's.
        eos_ids: the model's end-of-sequence tokens.

    Raises:
        ReplicaError: the tokenizer is of a kind that the library doesn't know, or no token ends a sequence.
        OSError: the processes can't be started.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        if not eos_ids:
            raise ReplicaError("the model has no end-of-sequence token")
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        self._processes = GrammarProcesses(tokenizer, vocab_size, self._eos_ids)
        self._queues = [CompileQueue[Compilation](lane) for lane in LANES]
        self._compilations: OrderedDict[tuple[str, str], Compilation] = OrderedDict()
        """Those that wait, run or succeeded; the last used one is last."""
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Why grammars can't be compiled, by digest."""
        self._constraints: set[Constraint] = set()

    def is_full(self, scope: str) -> bool:
        """Whether a scope has as many grammars waiting as it may."""
        return sum(queue.waiting(scope) for queue in self._queues) >= MOST_WAITING

    def compile(self, grammar: Grammar, scope: str) -> Compilation:
        """Have a grammar compiled for a sequence, unless that was done; `leave` ends the sequence's use.

        Args:
            scope: whose it is; scopes take turns.
        """
        key = (grammar.kind, grammar.text)
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
        """Note that a sequence no longer needs a grammar. To compile it ends if no other does."""
        compilation.users -= 1
        if compilation.users > 0 or compilation.is_done or compilation.has_ended:
            return
        self.forget(compilation)
        if not compilation.is_running:
            self._queues[compilation.lane].discard(compilation.scope, compilation)
        elif compilation.process is not None:
            compilation.process.kill()

    def follow(self, request: SequenceRequest, compilation: Compilation) -> Constraint:
        """Hold a sequence to a compiled grammar, in place of `leave`; `close` ends it."""
        constraint = Constraint(request, compilation, self._eos_ids)
        assert compilation.process is not None
        constraint.process = self._processes.follow(compilation.process, constraint)
        self._constraints.add(constraint)
        return constraint

    def close(self, constraint: Constraint) -> None:
        """End what follows a sequence."""
        self._constraints.discard(constraint)
        self.leave(constraint.compilation)
        if constraint.process is not None:
            if not constraint.mask:  # it may be busy
                constraint.process.kill()
            self._processes.release(constraint.process)

    def poll(self, timeout_s: float = 0) -> None:
        """Take what the processes say; wait for it if they say nothing yet."""
        self._processes.poll(timeout_s)
        sizes = {one: one.size_bytes for one in self._constraints if one.finish is None}
        if sum(sizes.values()) > MOST_BYTES:
            largest = max(sizes, key=sizes.__getitem__)
            largest.reject(f"all grammars together take more than {MOST_BYTES >> 20} MiB of memory, and it the most")

    def wait(self, constraints: Iterable[Constraint], *, is_needed: bool) -> None:
        """Wait for the masks of constraints, at most `MASK_WAIT_S`.

        Args:
            is_needed: whether nothing else can be done meanwhile; if not, it isn't waited for slow ones.
        """
        self.poll()
        until_s = time.monotonic() + MASK_WAIT_S
        while waits := [one for one in constraints if not one.is_ready and (is_needed or not one.is_slow)]:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                for one in waits:
                    one.is_slow = True
                return
            self.poll(left_s)

    def allowed(self, rows: Sequence[int], constraints: Sequence[Constraint], device: torch.device) -> Allowed:
        """The masks of constraints that are ready, which are of these rows."""
        size = (self._vocab_size + 7) // 8
        masks = bytearray().join(one.mask[:size] for one in constraints)
        bits = torch.frombuffer(masks, dtype=torch.uint8).view(len(rows), size).to(device)
        powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
        tokens = (bits[:, :, None] & powers).bool().flatten(1)
        return Allowed(rows, tokens[:, : self._vocab_size])

    def trim(self) -> None:
        """End the compilers of grammars that are kept beyond the bounds. Call it when all sequences that may follow a
        grammar do."""
        followed = {one.compilation for one in self._constraints}
        kept = [one for one in self._compilations.values() if one.first is not None and one not in followed]
        size_bytes = sum(one.first.size_bytes for one in kept if one.first is not None)
        for count, one in zip(range(len(kept), 0, -1), kept, strict=True):
            if count <= KEPT and size_bytes <= KEPT_BYTES:
                return
            assert one.first is not None
            assert one.process is not None
            size_bytes -= one.first.size_bytes
            self.forget(one)
            self._processes.release(one.process)

    def shut(self) -> None:
        """End all processes."""
        self._processes.close()

    # Called by compilations.

    def queue(self, compilation: Compilation) -> None:
        """Let a grammar wait for its turn."""
        self._queues[compilation.lane].add(compilation.scope, compilation)
        self._start()

    def end_compiling(self, compilation: Compilation) -> None:
        """Note that a process is free."""
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
        """Have the next sequence compile a grammar anew."""
        compilation.has_ended = True
        key = (compilation.kind, compilation.text)
        if self._compilations.get(key) is compilation:
            del self._compilations[key]

    def _start(self) -> None:
        for lane, queue in zip(LANES, self._queues, strict=True):
            while (compilation := queue.take()) is not None:
                compilation.is_running = True
                compilation.process = self._processes.compile(
                    compilation.kind, compilation.text, lane.cpu_s, compilation
                )


def refusal(grammar: Grammar, reason: str) -> str:
    """The message of a request that is rejected for its grammar."""
    return f"{grammar.field}: expected {_EXPECTED[grammar.kind]} that answers can be held to, but {reason}"


def _digest(compilation: Compilation) -> bytes:
    return hashlib.sha256(f"{compilation.kind} {compilation.text}".encode("utf-8", "surrogatepass")).digest()


def _cause(status: int) -> str | None:
    """Why the library ended a process: ``time``, ``memory`` or ``depth``; None: something else did."""
    if status < 0:
        return None
    if os.WIFSIGNALED(status):
        return _CAUSES.get(os.WTERMSIG(status))
    return "memory" if os.WEXITSTATUS(status) == OUT_OF_MEMORY else None
