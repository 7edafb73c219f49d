"""The texts that train tiny-lm: which files they come from, and the chats made of them."""

from __future__ import annotations

import ast
from pathlib import Path

from examples.training.tiny_lm_data import SYSTEM_PROMPTS, chats, collect, is_held_out


def test_files_are_held_out_by_name() -> None:
    held_out = ["chunk.py", "sched.py", "secrets.py", "zoneinfo/__init__.py"]
    assert all(map(is_held_out, held_out))
    assert not any(map(is_held_out, ["abc.py", "json/decoder.py", "zoneinfo/_common.py"]))


def test_about_one_in_twenty_is_held_out_and_not_trained_on() -> None:
    trained, unseen = collect()
    assert 0.02 < len(unseen) / (len(unseen) + len(trained)) < 0.09
    assert not trained.keys() & unseen.keys()
    assert not set(trained.values()) & set(unseen.values())


def test_tests_packages_and_generated_files_are_left_out(tmp_path: Path) -> None:
    for name in ("kept.py", "test/a.py", "site-packages/b.py", "_sysconfigdata_x.py", "config-3/c.py", "empty.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    trained, unseen = collect(tmp_path)
    assert (trained | unseen) == {"kept.py": "x = 1\n"}


def test_a_chat_asks_for_a_function_or_its_rest() -> None:
    source = 'class A:\n    def twice(self, x):\n        """Double it."""\n        return 2 * x\n'
    function = 'def twice(self, x):\n    """Double it."""\n    return 2 * x'
    seen = set()
    for seed in range(40):
        (chat,) = chats({"a.py": source}, seed)
        request, reply = (message["content"] for message in chat[-2:])
        if request.startswith("Complete"):
            assert request.split("\n", 1)[1] + "\n" + reply == function
        else:
            assert request in {"Write a Python function called twice.", "Write a Python function: Double it."}
            assert reply == function
        seen.add((request.split("\n")[0], len(chat)))
        assert len(chat) == 2 or chat[0]["content"] in SYSTEM_PROMPTS
    assert len(seen) == 6


def test_chats_are_the_same_each_time() -> None:
    files = {"ast.py": Path(ast.__file__).read_text()}
    assert list(chats(files, 0)) == list(chats(files, 0)) != list(chats(files, 1))
