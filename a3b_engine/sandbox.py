"""A jinja2 environment for chat templates that come with a checkpoint, hence from a stranger.

jinja2's own sandbox keeps a template away from Python's internals, but not from the machine: `'x' * 10**10`, nested
loops or a list that doubles itself are enough to hang or exhaust the host. This environment adds bounds:

- a deadline, checked at every loop step, call, filter, operator, comparison and slice;
- a weight (characters plus items, shared parts counted each time they appear) for every value that is made, so that
  each single step between two deadline checks is short;
- a short list of filters, methods and globals: the ones chat templates use, none that can pad, format or repeat text.

Everything raises `TemplateLimitError` (a jinja2 `SecurityError`), which the caller turns into a message for the user.
"""

from __future__ import annotations

import json
import time
from collections.abc import ItemsView, KeysView, ValuesView
from itertools import islice
from typing import Any, Callable, Iterable, Iterator

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_WEIGHT = 4_000_000
MAX_RANGE = 100_000
MAX_INTEGER_BITS = 1024
MAX_SECONDS = 10.0

# Filter names with a space cannot be written in a template, so a template can neither call nor replace them.
_LOOP, _JOIN, _MADE, _CHECK = "loop over", "join parts", "made value", "check deadline"

_KEPT_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select",
    "selectattr", "sort", "title", "trim", "unique", "upper",
)  # fmt: skip
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
        "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition "
        "rsplit rstrip split splitlines startswith strip swapcase title upper".split()
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(),
    float: frozenset(),
}


class TemplateLimitError(SecurityError):
    """A chat template asked for more time or memory than any honest template needs."""


class RaisedByTemplate(TemplateError):
    """The template itself refused the conversation through `raise_exception`."""


class _Bounds(NodeTransformer):
    """Rewrites a parsed template so that the steps which jinja2 does not intercept pass through a filter of ours."""

    def _through(self, node: nodes.Expr, name: str) -> nodes.Filter:
        return _placed(nodes.Filter(node, name, [], [], None, None), node)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        if node.recursive:
            raise TemplateLimitError("recursive loops are not supported in chat templates")
        node.iter = self._through(node.iter, _LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return self._through(_placed(nodes.List(node.nodes), node), _JOIN)

    def visit_List(self, node: nodes.List) -> nodes.Filter:
        self.generic_visit(node)
        return self._through(node, _MADE)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(node, _MADE) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._through(node.expr, _CHECK)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:
        self.generic_visit(node)
        node.node = self._through(node.node, _CHECK)
        return node


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed environment with the limits of the module docstring. One render at a time (`start` resets the clock)."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        # optimized=False: constant folding would run operators at compile time, before the clock is started.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False, cache_size=0)
        self._deadline = time.monotonic() + MAX_SECONDS
        self._weight_limit = MAX_WEIGHT
        kept = {name: self.filters[name] for name in _KEPT_FILTERS}
        self.filters.clear()
        self.filters.update({name: self._checked(function) for name, function in kept.items()})
        self.filters.update(
            {
                "join": self._join,
                "replace": self._replace,
                "string": self._text,
                "tojson": self._tojson,
                _LOOP: self._loop,
                _JOIN: self._join,
                _MADE: self.bounded,
                _CHECK: self._identity,
            }
        )
        self.globals.clear()
        self.globals.update(range=self._range, dict=dict, namespace=Namespace, raise_exception=_raise_exception)
        self.finalize = self._finalizer()
        self.concat = self._concat

    # ---- limits -------------------------------------------------------------------------------------------------

    def start(self, input_characters: int) -> None:
        """Start the clock for one render; the weight limit grows with the size of the conversation itself."""
        self._deadline = time.monotonic() + MAX_SECONDS
        self._weight_limit = MAX_WEIGHT + 4 * input_characters

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it did not finish within {MAX_SECONDS:.0f} seconds")

    def _too_big(self) -> TemplateLimitError:
        return TemplateLimitError(f"it builds a value of more than {self._weight_limit} characters or items")

    def bounded(self, value: Any) -> Any:
        """Return `value` if its weight is within the limit, else raise. Shared parts count each time, as in str()."""
        self.tick()
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise TemplateLimitError("it computes an absurdly large number")
            return value
        weight, steps, pending = 0, 0, [value]
        while pending:
            item = pending.pop()
            weight += 1
            steps += 1
            if steps % 4096 == 0:
                self.tick()
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, (list, tuple, set, frozenset, KeysView, ItemsView, ValuesView)):
                weight += len(item)
                pending.extend(item)
            elif isinstance(item, dict):
                weight += len(item)
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, Namespace):
                # Namespaces are mutable and may hold themselves; the weight then grows until the limit stops it.
                pending.append(object.__getattribute__(item, "_Namespace__attrs"))
            if weight > self._weight_limit:
                raise self._too_big()
        return value

    # ---- what jinja2 calls --------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` is refused by `is_safe_attribute`: it can pad to any width."""
        return None

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902 (jinja2's signature)
        __self.bounded((args, kwargs))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return __self._replace(owner, *args, **kwargs)
        if isinstance(owner, str) and name == "join":
            return __self._join(*args, d=owner, **kwargs)
        return __self.bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateLimitError(f"the operator '{operator}' is not supported in chat templates")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    if len(sequence) * times > self._weight_limit:
                        raise self._too_big()
        return self.bounded(super().call_binop(context, operator, left, right))

    # ---- filters and globals ------------------------------------------------------------------------------------

    def _checked(self, function: Callable) -> Callable:
        def checked(*args: Any, **kwargs: Any) -> Any:
            return self.bounded(function(*args, **kwargs))

        # jinja2 reads from this attribute whether a filter wants the context or the environment as first argument.
        if (wants := getattr(function, "jinja_pass_arg", None)) is not None:
            checked.jinja_pass_arg = wants
        return checked

    def _identity(self, value: Any) -> Any:
        self.tick()
        return value

    def _loop(self, values: Iterable) -> Iterator:
        for value in values:
            self.tick()
            yield value

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        if len(numbers) > MAX_RANGE:
            raise TemplateLimitError(f"range() of more than {MAX_RANGE} steps")
        return numbers

    def _text(self, value: Any) -> str:
        return value if isinstance(value, str) else str(self.bounded(value))

    def _join(self, values: Iterable, d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = map(make_attrgetter(self, attribute), values)
        pieces, size = [], 0
        for value in values:
            self.tick()
            pieces.append(self._text(value))
            size += len(pieces[-1]) + len(d)
            if size > self._weight_limit:
                raise self._too_big()
        return d.join(pieces)

    def _replace(self, text: str, old: str, new: str, count: int | None = None) -> str:
        text, old, new = self._text(text), self._text(old), self._text(new)
        limit = -1 if count is None or count < 0 else count
        hits = text.count(old) if limit < 0 else min(text.count(old), limit)
        if len(text) + hits * len(new) > self._weight_limit:
            raise self._too_big()
        return text.replace(old, new, limit)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as the published templates expect it: not HTML-escaped, CJK kept."""
        self.bounded(value)
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
            raise TemplateLimitError("tojson indent must be 0 to 16")
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.bounded(text)

    def _concat(self, pieces: Iterable[str]) -> str:
        """Replaces `''.join` for macros and block assignments."""
        pieces = list(islice(pieces, self._weight_limit + 1))
        if sum(map(len, pieces)) > self._weight_limit:
            raise self._too_big()
        return "".join(pieces)

    def _finalizer(self) -> Callable:
        @pass_context  # keeps jinja2 from folding constants at compile time
        def finalize(context: Any, value: Any) -> str:
            self.tick()
            return self._text(value)

        return finalize


def _placed(new: nodes.Expr, old: nodes.Expr) -> nodes.Expr:
    """Give a new node the place of an old one (jinja2's own setters would walk the whole subtree)."""
    new.lineno, new.environment = old.lineno, old.environment
    return new


def _raise_exception(message: str) -> None:
    raise RaisedByTemplate(str(message)[:500])
