"""The Jinja environment of chat templates: what Hugging Face offers them, sandboxed and metered."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.frontend.template_meter import PASS, meter

# Filters that no chat template needs and that are random, or whose cost their arguments do not tell.
LEFT_OUT_FILTERS = ("pprint", "random", "striptags", "sum", "urlize", "wordcount", "wordwrap", "xmlattr")
AMPLIFYING_FILTERS = {"center", "format", "indent", "join", "replace", "string", "tojson", "truncate"}
AMPLIFYING_METHODS = {"center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill"}


class MeterExtension(Extension):
    """The functions that `meter_nodes` writes into a template."""

    identifier = "quire.meter"

    def tick(self, units: int) -> str:
        """Charge for one pass of a loop or one call of a macro."""
        meter().spend(units)
        return ""

    def new(self, value: Any) -> Any:
        """Charge for a list, tuple or dict that the template builds, or for an operand of a comparison."""
        meter().weigh(value)
        return value

    def concat(self, *parts: Any) -> str:
        """Join the operands of `~`."""
        for part in parts:
            meter().weigh(part)
        return "".join(str(part) for part in parts)

    def iterate(self, items: Iterable[Any]) -> Iterable[Any]:
        """Charge for what a `for` goes over, also where its `if` lets nothing through."""
        if isinstance(items, Sized):
            meter().spend(len(items))
            return items
        return meter().ticked(iter(items))


class GenerationExtension(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. Every operation is charged to the current `meter()`.

    A template reaches no file, module or attribute that begins with an underscore, and changes none of its arguments.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[MeterExtension, GenerationExtension, loopcontrols],
            finalize=_output,
        )
        filters: dict[str, Any] = {**self.filters, "tojson": _tojson}
        self.filters = {
            name: _metered(function, name in AMPLIFYING_FILTERS, name == "format")
            for name, function in filters.items()
            if name not in LEFT_OUT_FILTERS
        }
        self.tests = {name: _metered(function) for name, function in self.tests.items()}
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge for a call, and for the methods of strings by the size of what they are given."""
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, MeterExtension):
            return obj(*args)
        meter().spend(PASS)
        name = getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in AMPLIFYING_METHODS:
                args = tuple(meter().amplify([owner, *args, *kwargs.values()])[1 : len(args) + 1])
            if name.startswith("format"):
                meter().check_format(owner)
            meter().spend(len(owner))
        return meter().received(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge for `left operator right`."""
        if operator == "*":
            meter().multiply(left, right)
        elif operator == "**":
            meter().power(left, right)
        elif operator == "%" and isinstance(left, str):
            meter().check_format(left)
            meter().weigh(right)
        return meter().received(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Charge for a slice."""
        if isinstance(argument, slice) and isinstance(obj, Sized):
            meter().spend(len(obj))
        return super().getitem(obj, argument)


def meter_nodes(template: nodes.Template) -> nodes.Template:
    """Write charges into a parsed template: loops, macros, `~`, comparisons and literals that are not constant."""
    for loop in template.find_all(nodes.For):
        loop.iter = _call("iterate", loop.iter)
        _insert_tick(loop)
    for macro in template.find_all(nodes.Macro):
        _insert_tick(macro)
    for block in template.find_all(nodes.CallBlock):
        _insert_tick(block)
    _meter_children(template)
    return template


def _insert_tick(block: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
    data = sum(len(text.data) for text in block.find_all(nodes.TemplateData))
    block.body.insert(0, nodes.ExprStmt(_call("tick", nodes.Const(PASS + data))))


def _meter_children(node: nodes.Node) -> None:
    """Replace expressions bottom up."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_meter_expression(item) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _meter_expression(value))


def _meter_expression(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _meter_children(node)
    if isinstance(node, nodes.Concat):
        return _call("concat", *node.nodes)
    if isinstance(node, nodes.Compare):
        node.expr = _call("new", node.expr)
        for operand in node.ops:
            operand.expr = _call("new", operand.expr)
    loaded_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
    return _call("new", node) if loaded_tuple or isinstance(node, (nodes.List, nodes.Dict)) else node


def _call(name: str, *args: nodes.Node) -> nodes.Expr:
    function = nodes.ExtensionAttribute(MeterExtension.identifier, name)
    return nodes.Call(function, list(args), [], None, None)


def _metered(function: Any, amplifying: bool = False, formats: bool = False) -> Callable[..., Any]:
    """Charge for a filter or a test: its arguments before, its result after."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # carries jinja_pass_arg over
    def metered(*args: Any, **kwargs: Any) -> Any:
        passed, given = args[:num_passed], list(args[num_passed:])
        meter().spend(PASS)
        if formats:
            meter().check_format(str(given[0]))
        if amplifying:
            given = meter().amplify([*given, *kwargs.values()])[: len(given)]
        else:
            meter().spend(sum(len(value) for value in given if isinstance(value, Sized)))
        return meter().received(function(*passed, *given, **kwargs))

    return metered


def _output(value: Any) -> Any:
    meter().weigh(value)
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise SecurityError("strftime_now takes a format of at most 256 characters")
    return datetime.now().astimezone().strftime(form)
