"""Where a language model lies, and what is said if it doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwater.zoo
from headwater.errors import LoadError
from headwater.reference import LmReference, find_folder, find_path, is_language_model, parse_reference

ZOO = Path(headwater.zoo.__file__).parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model's folder and a file in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "file").touch()
    return tmp_path


def failure(reference: str, *search: str) -> str:
    with pytest.raises(LoadError) as caught:
        find_folder(reference, search)
    assert caught.value.problem.fix
    return str(caught.value)


def test_what_is_a_language_model() -> None:
    assert is_language_model("lm:x")
    assert not is_language_model("lm.models:Scale")
    assert not is_language_model("onnx:x")


@pytest.mark.parametrize(
    ("reference", "package", "path"),
    [
        ("lm:models/one", "", "models/one"),
        ("lm:/models/one", "", "/models/one"),
        ("lm:~/one", "", "~/one"),
        ("lm:headwater.zoo:weights/tiny_lm", "headwater.zoo", "weights/tiny_lm"),
        ("lm:a:b:c", "a", "b:c"),
    ],
)
def test_both_forms(reference: str, package: str, path: str) -> None:
    assert parse_reference(reference) == LmReference(package, path)


@pytest.mark.parametrize("reference", ["lm:", "lm: ", "lm:a:", "lm::b", "lm:a/b:c", "lm:a..b:c", "lm:a:/b"])
def test_neither_form(reference: str) -> None:
    with pytest.raises(ValueError, match="expected lm:PATH such as"):
        parse_reference(reference)
    assert "expected lm:PATH such as" in failure(reference)


def test_a_path_starts_in_the_working_folder_and_then_in_those_given(here: Path, tmp_path: Path) -> None:
    other = tmp_path / "models"
    (other / "models" / "one").mkdir(parents=True)
    (other / "models" / "two").mkdir()
    assert find_folder("lm:models/one", [str(other)]) == here / "models" / "one"
    assert find_folder("lm:models/two", [str(other)]) == other / "models" / "two"
    assert find_folder(f"lm:{here}/models/one") == here / "models" / "one"


def test_a_path_in_the_home_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert find_folder("lm:~/models/one") == here / "models" / "one"


def test_a_folder_of_a_package() -> None:
    assert find_folder("lm:headwater.zoo:weights/tiny_lm") == ZOO / "weights" / "tiny_lm"


def test_no_folder_there(here: Path) -> None:
    message = failure("lm:models/two", str(here / "models"))
    assert f"there is no folder {here}/models/two or {here}/models/models/two" in message
    assert f"expected a folder, got the file {here}/file" in failure("lm:file")
    message = failure("lm:headwater.zoo:weights/huge_lm")
    assert f"there is no folder {ZOO}/weights/huge_lm" in message
    assert "or install a version of headwater.zoo that has it" in message


def test_no_package_there() -> None:
    assert "there is no package 'no_such_package'" in failure("lm:no_such_package:weights")
    assert "there is no package 'no_such.package'" in failure("lm:no_such.package:weights")
    assert "expected a package, which is a folder, got the module 'headwater.wire.frame'" in failure(
        "lm:headwater.wire.frame:x"
    )


def test_a_package_above_it_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_above").mkdir()
    (tmp_path / "failing_above" / "__init__.py").write_text("1 / 0\n")
    message = failure("lm:failing_above.below:x")
    assert "importing the parent package of failing_above.below raised ZeroDivisionError" in message
    assert "__init__.py:1" in message


def test_a_pointer_of_git_lfs_is_no_file(here: Path) -> None:
    (here / "net.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(
        LoadError, match=r"net\.onnx is a pointer of Git LFS in place of the file; run `git lfs pull` in"
    ):
        find_path("model", "net.onnx", (), "file")
