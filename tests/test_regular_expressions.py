"""No regular expression's work grows faster than the text that it reads, whoever sent that."""

from __future__ import annotations

import re

import pytest

from tests.regular_expressions import MODULES, Automaton, Expression, expressions


@pytest.mark.parametrize("expression", expressions(), ids=[one.where for one in expressions()])
def test_work_grows_with_the_text_only(expression: Expression) -> None:
    word = Automaton(expression).growing_word()
    assert word is None, f"{expression.where}: {expression.pattern!r} tries ever more paths through {word!r} repeated"


def test_the_configuration_s_patterns_are_run_by_rust_s_crate_which_is_linear() -> None:
    assert not [path for path in MODULES if "regex_engine" in path.read_text()]


def found(pattern: str, how: str = "search", flags: int = 0) -> str | None:
    expression = Expression("", pattern, flags, how not in ("match", "fullmatch"), how == "fullmatch")
    return Automaton(expression).growing_word()


@pytest.mark.parametrize(
    ("pattern", "how"),
    [
        (r"(a+)+b", "match"),
        (r"(a|a)*b", "match"),
        (r"(a*)*b", "match"),
        (r"(?:a|ab)(?:c|bcd)*d*d*e", "match"),
        (r"[A-Za-z0-9+/\s]{16,}={0,2}\s*\Z", "match"),
        (r"\s*x", "search"),
        (r"\s+$", "search"),
        (r"b(?:b*c)?", "findall"),
        (r".*,.*,.*;", "match"),
        (r"(?=a*a*b)a", "match"),
        (r'"(?:\\.|[^"\\\n])*"', "search"),
        (r"\w*\d*!", "fullmatch"),
    ],
)
def test_a_growing_expression_is_found(pattern: str, how: str) -> None:
    assert found(pattern, how)


@pytest.mark.parametrize(
    ("pattern", "how"),
    [
        (r"a*b", "match"),
        (r"\S+", "search"),
        (r"\s*\[\s*\[", "match"),
        (r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z", "match"),
        (r"a{2,5}a{2,5}b", "fullmatch"),
        (r"(?:ab)*a", "fullmatch"),
        (r'"(?:\\.?|[^"\\\n])*"?', "search"),
        (r"\nx:[^\n]*;", "search"),
    ],
)
def test_a_linear_expression_is_not(pattern: str, how: str) -> None:
    assert found(pattern, how) is None


def test_case_is_ignored_where_the_expression_ignores_it() -> None:
    assert found("a*A*b", "match", re.IGNORECASE)
    assert found("a*A*b", "match") is None


def test_paths_are_counted() -> None:
    assert Automaton(Expression("", "a*b", 0, False, True)).paths("aaaa") == 4
    assert Automaton(Expression("", "a*a*b", 0, False, True)).paths("aaaa") == 2 + 3 + 4 + 5
