"""Reads regular expressions as Python's `re` runs them, to prove that the work grows only with the text's length.

`re` tries one path through an expression after the other. A text that does not match costs all its paths, whose number
grows faster than the text if and only if there are two different states p and q and a word v with p -v-> p, p -v-> q
and q -v-> q (Weber and Seidl, "On the degree of ambiguity of finite automata", 1991). A search begins anew at each
place: its first state is a loop over all characters.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

if sys.version_info >= (3, 11):
    from re import _parser as parser  # private: Python has no public parser of expressions
else:
    import sre_parse as parser

__all__ = ["EXEMPT", "MODULES", "Automaton", "Expression", "expressions", "expressions_of"]

_ROOT: Final = Path(__file__).parents[1]
MODULES: Final = sorted(path for room in ("app", "inference") for path in (_ROOT / room).rglob("*.py"))
EXEMPT: Final = {
    "app/headwater_server/cli/report/plots.py": "reads what matplotlib has written",
    "app/headwater_server/binder/environment.py": "reads what ldd says of the interpreter",
    "app/headwater_server/triton/repository_dispatcher.py": "the operator's own expression, for short names of headers",
    "app/headwater_server/config/triton_options.py": "only compiles the operator's own expression",
    "inference/headwater/runtime/onnx_model.py": "reads why ONNX Runtime refuses a file that is being loaded",
}

_MANY: Final = 6
"""A quantifier that allows more than this counts as one without a limit."""
_LETTERS: Final = [*map(chr, range(256)), "ſ", "Ā", "٣", "\u2028", "\u3000", "漢", "🙂"]
"""Stand for all characters: beyond latin-1 a letter, a digit, spaces, and more of each class of `re`."""
_ALL: Final = frozenset(_LETTERS)
_ANCHORED: Final = {"match", "fullmatch"}
_CALLS: Final = _ANCHORED | {"search", "sub", "subn", "split", "findall", "finditer"}


class Expression(NamedTuple):
    """A regular expression in the source."""

    where: str
    """Module and line."""
    pattern: str | bytes
    flags: int
    is_searched: bool
    """Whether it is looked for at every place of a text."""
    is_whole: bool
    """Whether it must match up to the text's end."""


@cache
def _category(name: str, is_ascii: bool) -> frozenset[str]:
    """The characters of a class such as ``\\d``."""
    plain = name.removeprefix("CATEGORY_").removeprefix("NOT_")
    escape = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[plain]
    found = frozenset(re.findall(f"\\{escape}", "".join(_LETTERS), re.ASCII if is_ascii else 0))
    return _ALL - found if name.startswith("CATEGORY_NOT") else found


class Automaton:
    """An expression's states that `re` may leave without a match.

    Args:
        expression: which.
    """

    def __init__(self, expression: Expression) -> None:
        self.expression = expression
        self._flags = expression.flags
        self._jumps: dict[int, list[int]] = defaultdict(list)
        self._moves: dict[int, list[tuple[frozenset[str], int]]] = defaultdict(list)
        self._size = 0
        self._is_bytes = isinstance(expression.pattern, bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = parser.parse(expression.pattern, expression.flags)  # type: ignore[arg-type]
        self._flags |= tree.state.flags
        self._start = self._state()
        end = self._sequence(tree, self._start)
        self._matched = set() if expression.is_whole else self._certain(end)
        if expression.is_searched:
            first = self._state()
            self._moves[first].append((frozenset(_LETTERS), first))
            self._jumps[first].append(self._start)
            self._start = first

    def _state(self) -> int:
        self._size += 1
        return self._size - 1

    def _sequence(self, nodes: Any, at: int) -> int:
        for node in nodes:
            at = self._node(node, at)
        return at

    def _node(self, node: tuple[Any, Any], at: int) -> int:
        kind, value = str(node[0]), node[1]
        end = self._state()
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            self._moves[at].append((self._letters(kind, value), end))
        elif kind == "AT":
            self._block(at, end)
        elif kind == "BRANCH":
            for branch in value[1]:
                self._jumps[self._sequence(branch, at)].append(end)
        elif kind == "SUBPATTERN":
            self._jumps[self._sequence(value[3], at)].append(end)
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = value
            self._repeat(least, most, body, at, end)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            self._sequence(value[1], at)  # has paths of its own, which end here
            self._block(at, end)
        else:
            raise NotImplementedError(kind)
        return end

    def _block(self, at: int, end: int) -> None:
        """What may refuse at this place: nothing before it is certain to match."""
        self._moves[at].append((frozenset(), end))
        self._jumps[at].append(end)

    def _repeat(self, least: int, most: int, body: Any, at: int, end: int) -> None:
        for _ in range(min(least, _MANY)):
            at = self._sequence(body, at)
        if most > max(_MANY, least):
            loop = self._state()
            self._jumps[at].append(loop)
            self._jumps[self._sequence(body, loop)].append(loop)
            self._jumps[loop].append(end)
            return
        for _ in range(min(most, _MANY) - min(least, _MANY)):
            self._jumps[at].append(end)
            at = self._sequence(body, at)
        self._jumps[at].append(end)

    def _letters(self, kind: str, value: Any) -> frozenset[str]:
        if kind == "ANY":
            return _ALL if self._flags & re.DOTALL else _ALL - {"\n"}
        items = value if kind == "IN" else [("LITERAL", value)]
        is_negated = kind == "NOT_LITERAL" or str(items[0][0]) == "NEGATE"
        found = {letter for item in items if str(item[0]) != "NEGATE" for letter in self._item(*item)}
        if self._flags & re.IGNORECASE:
            found = {letter for letter in _ALL if found & {letter, letter.lower(), letter.upper()}}
        return _ALL - found if is_negated else frozenset(found)

    def _item(self, kind: Any, value: Any) -> Iterable[str]:
        if str(kind) == "LITERAL":
            return (chr(value),)
        if str(kind) == "RANGE":
            return (letter for letter in _ALL if value[0] <= ord(letter) <= value[1])
        return _category(str(value), self._is_bytes or bool(self._flags & re.ASCII))

    def _certain(self, end: int) -> set[int]:
        """The states in which `re` has a match, whatever follows: it tries no other path."""
        certain = {state for state in range(self._size) if end in self._closure(state)}
        while doubtful := {
            s for s in certain if any(e not in certain for at in self._reached(s) for _, e in self._moves[at])
        }:
            certain -= doubtful
        return certain

    def _closure(self, state: int) -> set[int]:
        """The states reached without a character and without a condition."""
        found, new = {state}, [state]
        while new:
            at = new.pop()
            # A condition stands beside its jump, which it makes uncertain.
            uncertain = {end for letters, end in self._moves[at] if not letters}
            for end in set(self._jumps[at]) - uncertain - found:
                found.add(end)
                new.append(end)
        return found

    @cache  # noqa: B019
    def _reached(self, state: int) -> list[int]:
        """The states reached without a character, if every condition holds: each as often as there are ways to it."""
        found: list[int] = []
        ways: list[tuple[int, ...]] = [(state,)]
        while ways:
            way = ways.pop()
            found.append(way[-1])
            # Twice: to be in an inner loop again by way of the outer one.
            ways += [(*way, end) for end in self._jumps[way[-1]] if way.count(end) < 2]
        return found

    @property
    @cache  # noqa: B019
    def steps(self) -> dict[int, list[tuple[frozenset[str], int]]]:
        """By state: characters, and the state behind each. A state that is certain to match has none."""
        return {
            state: [
                (letters, end)
                for at in (() if state in self._matched else self._reached(state))
                for letters, end in self._moves[at]
                if letters and end not in self._matched
            ]
            for state in range(self._size)
        }

    def paths(self, text: str) -> int:
        """The number of steps on all paths of a text that does not match: what `re` does at most."""
        total, live = 0, {self._start: 1}
        for letter in text:
            counts: dict[int, int] = defaultdict(int)
            for state, count in live.items():
                for letters, end in self.steps[state]:
                    if letter in letters:
                        counts[end] += count
            live = counts
            total += sum(live.values())
        return total

    def word(self, choices: Iterable[int], begin: str = "") -> str:
        """A text that leads somewhere behind another one, as far as there is anywhere to go."""
        live = {self._start}
        for letter in begin:
            live = {end for state in live for letters, end in self.steps[state] if letter in letters}
        word = ""
        for number in choices:
            steps = [step for state in sorted(live) for step in self.steps[state]]
            if not steps:
                break
            letters = sorted(steps[number % len(steps)][0])
            letter = letters[number // len(steps) % len(letters)]
            word += letter
            live = {end for letters, end in steps if letter in letters}
        return word

    def growing_word(self) -> str | None:
        """A word whose repetition makes the paths grow faster than the text; None: no word does."""
        reachable = self._reachable(self._start)
        for p in sorted(reachable):
            for (x, x_end), (y, y_end) in itertools.combinations(self.steps[p], 2):
                if x_end == y_end and x & y and p in self._reachable(x_end):  # two ways without a character
                    return min(x & y)
            loop = {q for q in self._reachable(p) if p in self._reachable(q)}
            if not any(end in loop for _, end in self.steps[p]):
                continue
            for q in sorted(self._reachable(p) - {p}):
                if any(True for _ in self._cycles(q)) and (word := self._word((p, p, q), (p, q, q))) is not None:
                    return word
        return None

    def _cycles(self, state: int) -> Iterator[int]:
        return (end for _, end in self.steps[state] if state in self._reachable(end))

    @cache  # noqa: B019
    def _reachable(self, state: int) -> frozenset[int]:
        found, new = {state}, [state]
        while new:
            for _, end in self.steps[new.pop()]:
                if end not in found:
                    found.add(end)
                    new.append(end)
        return frozenset(found)

    def _word(self, begin: tuple[int, int, int], wanted: tuple[int, int, int]) -> str | None:
        """A word that leads three states to three others at once."""
        words, new = {begin: ""}, [begin]
        while new:
            triple = new.pop()
            a, b, c = (self.steps[state] for state in triple)
            for x, x_end in a:
                for y, y_end in b:
                    if not (both := x & y):
                        continue
                    for z, z_end in c:
                        if not (shared := both & z):
                            continue
                        ends = (x_end, y_end, z_end)
                        word = words[triple] + min(shared)
                        if ends == wanted:
                            return word
                        if ends not in words:
                            words[ends] = word
                            new.append(ends)
        return None


@cache
def expressions() -> list[Expression]:
    """The regular expressions of all modules that are not exempt."""
    paths = (path for path in MODULES if str(path.relative_to(_ROOT)) not in EXEMPT)
    return [expression for path in paths for expression in expressions_of(path)]


def expressions_of(path: Path) -> Iterator[Expression]:
    """The regular expressions of a module of Python.

    Raises:
        ValueError: an expression is not written out where it is compiled or used.
    """
    text = path.read_text()
    if "import re\n" not in text:
        return
    tree = ast.parse(text)
    named: dict[str, tuple[ast.Call, str | bytes, int]] = {}
    uses: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id != "re" and node.func.attr in _CALLS:
            uses[owner.id].add(node.func.attr)
        if not (isinstance(owner, ast.Name) and owner.id == "re" and node.func.attr in _CALLS | {"compile"}):
            continue
        if ast.unparse(node.args[0]).startswith("'|'.join(map(re.escape, "):
            continue  # words: at each place of the text it reads at most their length
        pattern = _constant(node.args[0], tree)
        flags = _flags(node)
        if node.func.attr != "compile":
            yield _expression(path, node, pattern, flags, {node.func.attr})
            continue
        name = next(
            (target.id for target, value in _assignments(tree) if value is node and isinstance(target, ast.Name)), None
        )
        if name is None:
            yield _expression(path, node, pattern, flags, {"search"})
        else:
            named[name] = node, pattern, flags
    for name, (node, pattern, flags) in named.items():
        yield _expression(path, node, pattern, flags, uses[name] or {"search"})


def _expression(path: Path, node: ast.Call, pattern: str | bytes, flags: int, calls: set[str]) -> Expression:
    is_searched = not calls <= _ANCHORED
    return Expression(f"{path.relative_to(_ROOT)}:{node.lineno}", pattern, flags, is_searched, calls == {"fullmatch"})


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            yield node.target, node.value


def _constant(node: ast.expr, tree: ast.AST) -> str | bytes:
    """The text of an expression that is written out, perhaps with constants of the module in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_constant(part, tree)) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _constant(node.value, tree)
    if isinstance(node, ast.Name):
        for target, value in _assignments(tree):
            if isinstance(target, ast.Name) and target.id == node.id and value is not None:
                return _constant(value, tree)
    raise ValueError(f"line {node.lineno}: expected a regular expression that is written out, got {ast.unparse(node)}")


def _flags(node: ast.Call) -> int:
    """The flags of a call."""
    place = {"compile": 1, "match": 2, "fullmatch": 2, "search": 2, "findall": 2, "finditer": 2, "split": 3, "sub": 4}
    where = place.get(node.func.attr, 9) if isinstance(node.func, ast.Attribute) else 9
    found = [word.value for word in node.keywords if word.arg == "flags"] + node.args[where : where + 1]
    names = {part.attr for flag in found for part in ast.walk(flag) if isinstance(part, ast.Attribute)}
    return int(sum(int(getattr(re, name)) for name in names))
