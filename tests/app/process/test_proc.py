"""What process groups have of the machine's memory."""

from __future__ import annotations

import os
import subprocess
import sys

from headwater_server.process.proc import GroupUse, group_members, group_uses

TWO = """
import os
forked = os.fork()
taken = bytearray(b".") * 100_000_000
os.write(1, b".")
os.read(0, 1)  # until the test closes it
if forked:
    os.waitpid(forked, 0)
"""


def test_a_groups_memory_is_counted_while_it_lives_and_gone_with_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TWO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b".."
        members = group_members({process.pid})
        assert (process.pid in members, len(members)) == (True, 2)
        memory = group_uses({process.pid})[process.pid]
        assert 200_000_000 < memory.resident_bytes < 400_000_000
        assert memory.gpu_bytes in (None, 0)
    assert group_members({process.pid}) == []
    assert group_uses({process.pid})[process.pid].resident_bytes == 0


def test_without_groups_nothing_is_counted() -> None:
    assert group_members(set()) == []
    assert group_uses(set()) == {}
    assert os.getpid() in group_members({os.getpgrp()})


def test_groups_together_have_the_sum_and_on_gpus_what_is_known() -> None:
    assert GroupUse(1, 20, None) + GroupUse(2, 30, 400) == GroupUse(3, 50, 400)
    assert GroupUse(1, 20, 5) + GroupUse(2, 30, 400) == GroupUse(3, 50, 405)
    assert (GroupUse() + GroupUse()).gpu_bytes is None
