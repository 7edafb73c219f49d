"""LoRA adapters' folders: what is wrong with one is known before vLLM gets it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import LoadError
from headwater.wire.handshake import failure_of
from headwater_server.config.vllm_options import VllmOptions
from headwater_server.process.adapter_folders import Adapter, find_adapters, lora_rank
from headwater_server.process.vllm_program import VllmInstall, folder_problem, serve_command

INSTALL = VllmInstall("/env/python", "0", is_cpu=True)


def adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    (folder / "adapter_model.safetensors").touch()
    return folder


def options(**given: Any) -> dict[str, Any]:
    return VllmOptions.model_validate(given).model_dump(mode="json")


def flags(adapters: dict[str, Adapter], **given: Any) -> list[str]:
    command = serve_command(INSTALL, Path("/m"), "base", Path("/s"), options(**given), adapters)
    return command[command.index("--enable-lora") :] if "--enable-lora" in command else []


def test_folders_are_found_in_the_folders_of_the_configuration_with_their_ranks(tmp_path: Path) -> None:
    adapter(tmp_path / "a", r=4, rank_pattern={"q_proj": 24})
    found = find_adapters({"x": "a", "y": str(adapter(tmp_path / "b"))}, [str(tmp_path)])
    assert found == {"x": Adapter(tmp_path / "a", 24), "y": Adapter(tmp_path / "b", 8)}


def test_a_shortage_is_not_the_folders_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    folder = adapter(tmp_path / "a")
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(LoadError) as caught:
        find_adapters({"x": str(folder)}, [])
    failure = failure_of(caught.value)
    assert (failure.is_shortage, failure.is_permanent) == (True, False)
    problem = folder_problem(tmp_path, options(), INSTALL)  # the model's own folder
    assert problem is not None
    failure = failure_of(LoadError(problem))
    assert (failure.is_shortage, failure.is_permanent) == (True, False)


def test_what_is_no_adapter_is_refused_by_name(tmp_path: Path) -> None:
    for text, config in (
        ("expected peft_type LORA and r from 1 to 512, got IA3", {"peft_type": "IA3"}),
        ("got LORA, [513]", {"r": 513}),
        ("got LORA, [None]", {"r": None}),
    ):
        folder = adapter(tmp_path / text[-3:-1], **config)
        with pytest.raises(LoadError) as caught:
            find_adapters({"x": str(folder)}, [])
        assert str(caught.value).startswith("adapters.x: ")
        assert text in str(caught.value)
    with pytest.raises(LoadError, match=r"adapters\.x: there is no folder"):
        find_adapters({"x": str(tmp_path / "none")}, [])
    with pytest.raises(LoadError, match=r"adapter_config\.json can't be read"):
        find_adapters({"x": str(tmp_path)}, [])
    folder = adapter(tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(LoadError, match=r"expected adapter_model\.safetensors in .*, which lacks this file"):
        find_adapters({"x": str(folder)}, [])


def test_the_rank_is_the_lowest_of_vllms_that_fits_all() -> None:
    def ranked(*ranks: int) -> dict[str, Adapter]:
        return {str(rank): Adapter(Path("/a"), rank) for rank in ranks}

    assert [lora_rank(options(), ranked(*ranks)) for ranks in ([], [1], [8, 9], [257, 4], [512])] == [
        0,
        8,
        16,
        320,
        512,
    ]
    assert lora_rank(options(max_loras=2), {}) == 8
    assert lora_rank(options(max_loras=2, max_lora_rank=64), {}) == 64
    with pytest.raises(
        LoadError, match=r"adapters\.32: expected a rank of at most options\.max_lora_rank = 16, got 32"
    ):
        lora_rank(options(max_lora_rank=16), ranked(8, 32))


def test_vllm_gets_what_it_needs_to_serve_them() -> None:
    assert flags({}) == []
    assert flags({}, max_loras=3) == ["--enable-lora", "--max-loras=3", "--max-cpu-loras=32", "--max-lora-rank=8"]
    two = {"x": Adapter(Path("/a,b=c"), 8), "y": Adapter(Path("/d"), 12)}
    modules = ['{"name": "x", "path": "/a,b=c"}', '{"name": "y", "path": "/d"}']
    assert flags(two)[1:] == ["--max-loras=2", "--max-cpu-loras=32", "--max-lora-rank=16", "--lora-modules", *modules]
    assert "--max-loras=1" in flags(two, max_loras=1)
    assert "--max-cpu-loras=40" in flags(two, max_loras=40)
