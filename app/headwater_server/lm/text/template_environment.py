"""A Jinja environment with transformers' settings for chat templates, and with limits on loops, calls and output."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headwater_server.codecs.faults import at
from headwater_server.errors import ConfigError
from headwater_server.lm.text.call_arguments import number_writer
from headwater_server.lm.text.template_growth import GROWING_FILTERS, growth, size_of

__all__ = ["Refused", "TemplateEnvironment"]

_ITEMS: Final = "counted items"
_JOIN: Final = "counted join"
"""Names of internal filters. A template can't use them, because they contain a space."""


class Refused(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _TemplateBudget(threading.local):
    """The limits of a rendering, which begins and ends with the ``with`` block. Each thread has separate counters. The
    methods raise `BadRequest` if a limit is exceeded."""

    def __init__(self, max_characters: int, max_seconds: float) -> None:
        self._max_characters = max_characters
        self._max_seconds = max_seconds
        self._characters = 0
        self._until_s = 0.0

    def __enter__(self) -> None:
        self._characters = 0
        self._until_s = time.thread_time() + self._max_seconds

    def __exit__(self, *_: object) -> None:
        self._until_s = 0.0

    def step(self) -> None:
        """Check the time."""
        if self._until_s and time.thread_time() > self._until_s:
            expected = f"expected a conversation that renders within {self._max_seconds:g} s, got a slower conversation"
            raise at("messages", None, expected)

    def write(self, characters: int) -> None:
        """Count written characters, and check all limits."""
        self.step()
        self._characters += characters
        self.check(self._characters)

    def check(self, characters: int) -> None:
        """Check the length of a single value, in characters or elements."""
        if characters > self._max_characters:
            expected = f"expected a conversation of at most {self._max_characters} characters once rendered, got more"
            raise at("messages", None, expected)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of a chat template. Templates must be rendered within ``with environment.budget:``. A rendering
    raises `BadRequest` if it exceeds a limit.

    Args:
        max_characters: maximum number of characters of a rendering, and of each value in it.
        max_seconds: maximum CPU time of a rendering.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_characters: int, max_seconds: float) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.budget = budget = _TemplateBudget(max_characters, max_seconds)

        @jinja2.pass_context
        def counted_output(_: Context, value: object) -> str:
            budget.check(size_of(value))
            text = str(value)
            budget.write(len(text))
            return text

        def counted_items(items: Iterable[Any]) -> Iterator[Any]:
            for item in items:
                budget.step()
                yield item

        def counted_join(values: Sequence[object]) -> str:
            budget.check(size_of(values))
            text = "".join(map(str, values))
            budget.check(len(text))
            return text

        # With the context as a parameter, Jinja calls it at rendering time for constants, too.
        self.finalize = counted_output
        self.filters |= {"tojson": _tojson, _ITEMS: counted_items, _JOIN: counted_join}
        self.filters |= {name: self._bounded(name, self.filters[name]) for name in GROWING_FILTERS}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def variables(self, source: str) -> set[str]:
        """The names that a template reads and doesn't set itself. Raises `jinja2.TemplateSyntaxError`."""
        return meta.find_undeclared_variables(self.parse(source))

    def words(self, source: str) -> set[str]:
        """The texts that a template's expressions mention. Raises `jinja2.TemplateSyntaxError`."""
        return {node.value for node in self.parse(source).find_all(nodes.Const) if isinstance(node.value, str)}

    def compiled(self, name: str, source: str) -> jinja2.Template:
        """Compile a template, with counters for loops and output.

        Raises:
            ConfigError: the source isn't valid Jinja.
        """
        try:
            tree = _Counting().visit(self.parse(source))
            return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            where = f"chat template {name!r}, line {error.lineno}"
            raise ConfigError(f"{where}: expected a Jinja template, got this: {error.message}") from error

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the exception unchanged: Jinja's handling would keep the messages in memory, by a reference cycle
        through the traceback."""
        raise

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            __self.budget.check(growth(__obj.__name__, owner, args, kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        apply = super().wrap_str_format(value)
        if apply is None:
            return None

        def bounded(*args: Any, **named: Any) -> str:
            self.budget.check(growth("format", value.__self__, args, named))
            return apply(*args, **named)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            sizes = [len(value) if isinstance(value, (str, list, tuple)) else value for value in (left, right)]
            if sizes != [left, right] and all(isinstance(size, int) for size in sizes):
                self.budget.check(sizes[0] * sizes[1])
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self.budget.check(len(left) + len(right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.budget.check(left.bit_length() * max(right, 0))
        if operator == "%" and isinstance(left, str):
            self.budget.check(growth("format", left, right if isinstance(right, tuple) else (right,), {}))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)):
            self.budget.check(len(result))
        return result

    def _bounded(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that a call raises `BadRequest` if its result could be too long."""

        @functools.wraps(apply)
        def bounded(*args: Any, **named: Any) -> Any:
            filter_args = args[1:] if hasattr(apply, "jinja_pass_arg") else args
            value, *rest = filter_args
            if name == "join":  # the separator is the argument that is repeated
                text = str(rest[0] if rest else named.get("d", ""))
                self.budget.check(growth(name, text, [value], {}))
            else:
                self.budget.check(size_of(value))
                text = "" if name in ("batch", "slice", "tojson") else str(value)
                self.budget.check(growth(name, text, rest, named))
            return apply(*args, **named)

        return bounded


class _Counting(NodeTransformer):
    """Adds counters to all loops, all text and every ``~`` operator."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(cast("nodes.Expr", node.iter), _ITEMS, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOIN, node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


class _GenerationTag(Extension):
    """The tag ``{% generation %}``, which marks the assistant's text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012  as in the class that it extends

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Dict:
    """The template's ``dict``, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """The template's ``namespace``, without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't have an attribute {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: object) -> NoReturn:
    raise Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter of this name escapes characters that are markup in HTML.
    default, finish = number_writer()
    return finish(
        json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=default
        )
    )  # fmt: skip
