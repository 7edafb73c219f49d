"""The file of keys, and ``headwater keys``, which changes it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater_server.cli.main import main
from headwater_server.errors import ConfigError
from headwater_server.security.keys import Key
from headwater_server.security.keys_file import change_file, keys_are_wanted, known_keys, read_file

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def run(file: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on the file: its status, and what it printed."""

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["keys", *arguments, "--file", str(file)])
        printed = capsys.readouterr()
        return int(str(caught.value.code)), printed.out, printed.err

    return command


def a_key(name: str) -> Key:
    return Key(name, hashlib.sha256(name.encode()).hexdigest(), ("infer",))


def test_a_new_key_is_printed_once_and_only_its_hash_is_stored(file: Path, run: Run) -> None:
    status, out, _ = run(
        "add", "alice", "--scopes", "infer,metrics", "--requests-per-second", "2.5", "--concurrent", "3",
        "--tokens-per-minute", "1000",
    )  # fmt: skip
    assert status == 0
    text = out.strip()
    assert text not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (key,) = read_file(file)
    assert key.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert (key.name, key.scopes) == ("alice", ("infer", "metrics"))
    assert (key.requests_per_second, key.concurrent, key.tokens_per_minute) == (2.5, 3, 1000)
    status, out, _ = run("list")
    assert out.startswith("alice  infer,metrics  2.5 requests a second, 3 at once, 1000 tokens a minute  20")
    assert key.sha256 not in out


def test_a_name_is_given_once_and_can_be_revoked(file: Path, run: Run) -> None:
    for name in ("alice", "bob"):
        assert run("add", name)[0] == 0
    before = file.read_text()
    status, out, err = run("add", "alice")
    assert (status, out) == (1, "")
    assert "key `alice` exists already" in err
    status, _, err = run("revoke", "carol")
    assert status == 1
    assert "'carol'" in err
    assert file.read_text() == before
    assert run("revoke", "alice")[0] == 0
    assert [key.name for key in read_file(file)] == ["bob"]


@pytest.mark.parametrize(
    "arguments",
    [("a b",), ("a", "--scopes", "root"), ("a", "--scopes", ""), ("a", "--concurrent", "0"),
     ("a", "--requests-per-second", "nan")],
)  # fmt: skip
def test_what_no_server_would_take_is_not_written(file: Path, run: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = run("add", *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("headwater: ")
    assert not file.exists()


def test_a_file_in_no_folder_is_an_error(run: Run, file: Path) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "add", "a", "--file", str(file / "no" / "keys.json")])
    assert run("list")[0] == 1


def test_changes_at_once_lose_nothing(file: Path) -> None:
    def add(name: str) -> None:
        change_file(file, lambda keys: [*keys, a_key(name)])

    threads = [threading.Thread(target=add, args=(f"key-{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_file(file)} == {f"key-{index}" for index in range(8)}
    assert [path.name for path in file.parent.iterdir()] == ["keys.json"]


def test_a_link_stays_one(file: Path, run: Run, tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_text('{"keys": []}')
    real.chmod(0o600)
    file.symlink_to(real)
    assert run("add", "alice")[0] == 0
    assert file.is_symlink()
    assert [key.name for key in read_file(real)] == ["alice"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(file: Path, mode: int) -> None:
    file.write_text('{"keys": []}')
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{mode:04o}.*chmod 600"):
        read_file(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", [b"{keys: [", b"\xff\xfe", b"", b"keys", b"{keys: {}}", b"[" * 5000, b"keys: [{name: hw_secret-key]"]
)
def test_a_broken_file_is_an_error_that_quotes_nothing_of_it(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"keys\.json") as caught:
        read_file(file)
    assert "hw_secret-key" not in str(caught.value)


def test_yaml_will_do(file: Path) -> None:
    file.write_text(f"# ours\nkeys:\n  - name: alice\n    sha256: '{'0' * 64}'\n    scopes: [admin]\n")
    file.chmod(0o600)
    assert [key.name for key in read_file(file)] == ["alice"]


@pytest.mark.parametrize("created", ["2026-02-28", "2026-02-30", "!!timestamp x", "~", "0x_"])
def test_a_date_is_text_whatever_it_says(file: Path, created: str) -> None:
    digits = "12345678e" + "0" * 55  # YAML's number
    file.write_text(
        f"keys:\n  - {{name: alice, sha256: {digits}, scopes: [infer], created: {created}, "
        "requests_per_second: 2.5, concurrent: 3, tokens_per_minute: null}\n"
    )
    file.chmod(0o600)
    (key,) = read_file(file)
    assert (key.sha256, key.created) == (digits, created.removeprefix("!!timestamp "))
    assert (key.requests_per_second, key.concurrent, key.tokens_per_minute) == (2.5, 3, None)


def test_a_servers_keys_come_from_its_file_and_its_environment(file: Path) -> None:
    change_file(file, lambda keys: [a_key("alice")])
    bob = {"name": "bob", "sha256": "0" * 64, "scopes": ["admin"]}
    environment = {"HEADWATER_KEYS": json.dumps({"keys": [bob]})}
    assert [key.name for key in known_keys(file, environment)] == ["bob", "alice"]
    assert [key.name for key in known_keys(None, environment)] == ["bob"]
    with pytest.raises(ConfigError, match="alice twice"):
        known_keys(file, {"HEADWATER_KEYS": file.read_text()})
    with pytest.raises(ConfigError, match="HEADWATER_KEYS"):
        known_keys(file, {"HEADWATER_KEYS": ""})
    assert not keys_are_wanted(None, {})
    assert keys_are_wanted(None, environment)
    assert keys_are_wanted(file, {})


def test_a_fifo_in_place_of_the_file_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys.json", 0o600)
    with pytest.raises(ConfigError, match="expected a regular file"):
        read_file(tmp_path / "keys.json")
