"""Runs a chat template: Jinja's immutable sandbox, with bounds for what Jinja leaves unbounded.

Jinja keeps a template from reaching Python, not from taking all memory or all time. So the parsed
template is rewritten before it is compiled: loops and macros count their turns, and every place
that makes a value (literals, `~`, operators, filters, calls, output) measures it against the
`Budget`. Python cannot interrupt one operation, but none is left that takes long on operands of
that size: what chat templates do not need (most filters, most methods of text) is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cache, lru_cache
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from halogen_core.errors import ModelError, RequestError
from halogen_core.loader.template_budget import (
    GROWING_FILTERS,
    GROWING_METHODS,
    MAX_WIDTH,
    Budget,
    OverBudget,
    check_format,
    check_operator,
    check_size,
    size_of,
)

MAX_SOURCE = 1_000_000
_BUDGET = "\0budget"  # a name that no template can spell
_TEXT_METHODS = {
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition",
    "startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index", "count",
    "lower", "upper", "title", "capitalize", "replace", "join",
    "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower",
}  # fmt: skip
_FILTERS = {
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
    "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort",
    "string", "title", "tojson", "trim", "unique", "upper",
}  # fmt: skip
_UNMEASURED = {"count", "length", "first", "last", "default", "d", "map", "items"}
"""Filters that neither walk nor copy their input."""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a template; raises `RequestError`, or `ModelError` if it is no template."""
    template = _compiled(source)
    try:
        return "".join(_checked(template.generate({**variables, _BUDGET: Budget()})))
    except OverBudget as exc:
        raise RequestError(
            f"the chat template exceeds its budget: {exc}",
            param="messages",
            code="HRT-2204",
            fix="shorten the conversation; if it is short, do not trust this model file",
        ) from exc
    except Exception as exc:  # templates fail in every way that Python does
        raise RequestError(
            f"the chat template refuses these messages: {str(exc) or type(exc).__name__}",
            param="messages",
            code="HRT-2203",
            fix="see what the model's template expects: roles, their order, content as text",
        ) from exc


def _checked(parts: Iterator[str]) -> Iterator[str]:
    size = 0
    for part in parts:
        size += len(part)
        check_size(size)
        yield part


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    environment = _environment()
    try:
        if len(source) > MAX_SOURCE:
            raise ValueError(f"it has {len(source)} characters, {MAX_SOURCE} are allowed")
        tree = environment.parse(source)
        _count_turns(tree)
        _measure_values(tree)
        return jinja2.Template.from_code(
            environment, environment.compile(tree), environment.globals
        )
    except (jinja2.TemplateError, ValueError, SyntaxError, RecursionError, MemoryError) as exc:
        raise ModelError(
            f"the chat template is not valid: {exc}",
            code="HRT-2202",
            fix="use the completions endpoint or `halogen run --raw`, or take another file",
        ) from exc


# ---------------------------------------------------------------- called by rewritten templates


def turn(context: Context, size: int) -> bool:
    """Counts one turn of a loop that writes `size` characters of its own."""
    context[_BUDGET].take(size)
    return True


def bounded(context: Context, value: Any) -> Any:
    """`value`, once it is known to be small."""
    context[_BUDGET].take(size_of(value))
    return value


def concatenated(context: Context, *values: Any) -> str:
    """What `~` means."""
    context[_BUDGET].take(size_of(values))
    return "".join(map(str, values))


# ---------------------------------------------------------------- rewriting


def _count_turns(tree: nodes.Template) -> None:
    loops: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
    for loop in loops:
        size = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
        loop.body.insert(0, nodes.ExprStmt(_call("turn", nodes.Const(size))))
        if isinstance(loop, nodes.For) and loop.test is not None:
            loop.test = nodes.And(_call("turn", nodes.Const(0)), loop.test)


def _measure_values(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = [_measured(item) for item in value]
        else:
            setattr(node, name, _measured(value))


def _measured(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _measure_values(node)
    if isinstance(node, nodes.Concat):
        return _call("concatenated", *node.nodes)
    if isinstance(node, nodes.List | nodes.Dict):
        return _call("bounded", node)
    if isinstance(node, nodes.Tuple) and node.ctx == "load":
        return _call("bounded", node)
    return node


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    function = nodes.ImportedName(f"{__name__}.{name}")
    return nodes.Call(function, [nodes.ContextReference(), *arguments], [], None, None)


# ---------------------------------------------------------------- environment


@jinja2.pass_context
def _finalized(context: Context, value: Any) -> Any:
    return bounded(context, value)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, (args, kwargs))
            return safe(*args, **kwargs)

        return formatted

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _TEXT_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return bounded(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ in GROWING_METHODS:
            args = tuple(map(_listed, args))
            GROWING_METHODS[__obj.__name__](owner, *args)
        return bounded(__context, super().call(__context, __obj, *args, **kwargs))


class _Namespace(Namespace):
    """Prints as nothing much: namespaces may refer to each other in ways that never end."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model said, for training; no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[loopcontrols, _Generation],
        finalize=_finalized,
    )
    filters = {**environment.filters, "tojson": _tojson}
    environment.filters = {name: _guarded(name, filters[name]) for name in _FILTERS}
    environment.globals = {
        "range": environment.globals["range"],
        "dict": dict,
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `name`, measuring what goes in and out."""
    passes = getattr(function, "jinja_pass_arg", None)
    check = GROWING_FILTERS.get(name)

    @jinja2.pass_context
    def filtered(context: Context, *args: Any, **kwargs: Any) -> Any:
        if name not in _UNMEASURED:
            args = tuple(map(_listed, args))
            size_of((args, kwargs))
        if check:
            check(*args, **kwargs)
        passed = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }.get(passes.name if passes else "", ())
        return bounded(context, function(*passed, *args, **kwargs))

    return filtered


def _listed(value: Any) -> Any:
    """Generators (of `map`, `select` and the like) as lists, which can be measured."""
    return list(value) if isinstance(value, GeneratorType) else value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_WIDTH or any(map(str.isdigit, pattern)):
        raise OverBudget("a date format with widths")
    return datetime.now().astimezone().strftime(pattern)
