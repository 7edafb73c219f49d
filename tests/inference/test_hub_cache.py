"""Models are found in huggingface_hub's cache, where the hub's own variables put it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import LoadError
from headwater.hub_cache import HubModel, hub_model, model_name
from headwater.reference import find_folder, find_path, named_at_hub
from headwater.signature import text_signature

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model, of which the branch main and a tag are known."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "home" / "hub" / "models--org--tiny-1.5"
    for reference, commit in (("main", COMMIT), ("v1", "older")):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / reference).write_text(commit)
    return model


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("org/tiny-1.5", HubModel("org/tiny-1.5", "main")),
        ("org/tiny@v1.0", HubModel("org/tiny", "v1.0")),
        ("tiny", None),
        ("a/b/c", None),
        ("/org/tiny", None),
        ("./tiny", None),
        ("../tiny", None),
        ("~/tiny", None),
        ("org/tiny@../x", None),
        ("org/tiny\n", None),
        ("", None),
    ],
)
def test_names(path: str, model: HubModel | None) -> None:
    assert hub_model(path) == model


def test_a_model_is_found_by_its_revision(cache: Path) -> None:
    assert find_folder("lm:org/tiny-1.5") == cache / "snapshots" / COMMIT
    assert find_folder("vllm:org/tiny-1.5@v1") == cache / "snapshots" / "older"
    assert find_path("m", f"org/tiny-1.5@{COMMIT}", (), "folder") == cache / "snapshots" / COMMIT


def test_a_folder_is_found_first(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "org" / "tiny-1.5"
    folder.mkdir(parents=True)
    assert find_folder("lm:org/tiny-1.5", [str(tmp_path / "models")]) == folder
    assert named_at_hub("org/tiny-1.5", [str(tmp_path / "models")]) is None
    assert named_at_hub("org/tiny-1.5", []) == HubModel("org/tiny-1.5", "main")


def test_what_is_not_there_is_named_with_its_command(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        find_folder("lm:org/tiny-1.5@v2")
    assert f"there is no folder {tmp_path}/org/tiny-1.5@v2" in str(caught.value)
    fix = f"which is not in {cache}, download it: `hf download org/tiny-1.5 --revision v2`, or `headwater serve --down"
    assert fix in str(caught.value)
    with pytest.raises(LoadError, match=r"there is no file .*; correct the path; a relative one"):
        find_path("m", "org/tiny-1.5", (), "file")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HF_HUB_CACHE", "$ROOT/a", "a"),
        ("HUGGINGFACE_HUB_CACHE", "~/b", "b"),
        ("HF_HOME", "~/c", "c/hub"),
        ("XDG_CACHE_HOME", "~/d", "d/huggingface/hub"),
        ("UNRELATED", "e", ".cache/huggingface/hub"),
    ],
)
def test_where_the_cache_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, content in (("HOME", str(tmp_path)), ("ROOT", str(tmp_path)), (variable, value)):
        monkeypatch.setenv(name, content)
    assert HubModel("org/tiny", "main").folder == tmp_path / expected / "models--org--tiny"


def test_a_language_model_is_described_by_its_name_at_the_hub(cache: Path) -> None:
    snapshot = cache / "snapshots" / COMMIT
    assert model_name(snapshot) == "org/tiny-1.5"
    assert text_signature("m", snapshot).description == "The language model org/tiny-1.5."
    assert model_name(Path("models/tiny")) == "tiny"
