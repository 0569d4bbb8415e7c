"""Conditions on named fields, as `where` takes them: parsed to Python's syntax tree, never evaluated by it.

`arm=a,b`, `dataset!=c4` and `params>=1e8` need no quotes. Longer ones are as in Python: `learning_rate > 0.1
and arm == "untied-2"`, `depth in (4, 6) or not core`, `tokens / parameters < 20`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import pairwise
from typing import Any

from steepen.errors import UsageError, nearest, shorten
from steepen.utils.formatting import is_number

MAX_LENGTH = 2000  # characters; the parser recurses, so a longer text could exhaust the stack
HINT = """write it like arm=a,b or 'learning_rate > 0.1 and arm == "untied-2"'"""
# A name, a sign and values without quotes; what looks like more than that is parsed as Python.
_SHORT = re.compile(r"\s*([^<>=!'\"()\[\]]+?)\s*(<=|>=|!=|==|=|<|>)\s*([^<>=!'\"()\[\]]*?)\s*")
_PYTHON = re.compile(r"\b(?:and|or|not|in|is|True|False|None)\b")
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_ORDERED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
Value = Callable[[Mapping[str, Any]], Any]  # computes what a part of a condition is in one row


@dataclass(frozen=True)
class Condition:
    """A parsed condition; call it with the fields of one row."""

    text: str
    value: Value
    fields: Collection[str]  # that it names, in order

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Whether a row satisfies the condition. A missing value satisfies no comparison but `!=`."""
        try:
            return bool(self.value(row))
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise UsageError(
                f"`where` {shorten(self.text)!r} cannot be computed ({error}); put quotes around words, "
                "none around numbers."
            ) from None


def parse_condition(
    text: str, known: Collection[str], aliases: Callable[[str], str] = lambda name: name
) -> Condition:
    """Parse a condition on fields called `known`; `aliases` turns another name of a field into its own.

    Raises UsageError for a wrong syntax, for anything but comparisons, and, / or / not, arithmetic and
    constants, and for an unknown field.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"`where` has {len(text):,} characters; {MAX_LENGTH:,} are allowed.")
    parser = _Parser(text, known, aliases)
    if (short := parser.short_condition()) is not None:
        return Condition(text, short, parser.named)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        single = "=" in text and not any(sign in text for sign in ("==", "<=", ">=", "!="))
        why = " (equality is ==)" if single else ""
        raise UsageError(f"`where` {shorten(text)!r} is not a condition{why}; {HINT}.") from None
    return Condition(text, parser.value_of(tree), parser.named)


def number_of(text: object) -> float | None:
    """The number that a cell or a word is, if it is one."""
    try:
        return None if isinstance(text, bool) else float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class _Parser:
    text: str
    known: Collection[str]
    aliases: Callable[[str], str]
    named: dict[str, None] = dataclass_field(default_factory=dict[str, None])  # fields, in order

    def field(self, name: str) -> str:
        field = name if name in self.known else self.aliases(name)
        if field in self.known:
            self.named[field] = None
            return field
        raise UsageError(
            f"`where` {shorten(self.text)!r}: there is no field {name!r}; the nearest are "
            f"{nearest(name, self.known)} (put quotes around a word that is a value)."
        )

    def short_condition(self) -> Value | None:
        """The function of a text like arm=a,b or params>=1e8; None for any other."""
        match = _SHORT.fullmatch(self.text)
        if match is None or _PYTHON.search(self.text):
            return None
        name, sign, values = match.groups()
        is_field = name in self.known or self.aliases(name) in self.known
        # Two fields, or arithmetic. `=` and `!=` compare with a value, also one that names a field, finished.
        if (values in self.known and sign not in ("=", "!=")) or not (is_field or name.isidentifier()):
            return None
        field, number = self.field(name), number_of(values)
        if sign in _ORDERED:
            return None if number is None else lambda row: _compare(_ORDERED[sign], row.get(field), number)
        words = [word.strip() or None for word in values.split(",")]
        either = [*words, *(one for one in map(number_of, words) if one is not None)]
        return lambda row: (row.get(field) in either) != (sign == "!=")

    def value_of(self, node: ast.expr) -> Value:
        """The function of a syntax tree; raises UsageError for a node that is not allowed."""
        if isinstance(node, ast.Name | ast.Attribute):
            field = self.field(ast.unparse(node))
            return lambda row: row.get(field)
        if isinstance(node, ast.BoolOp):
            whole, parts = all if isinstance(node.op, ast.And) else any, self._values_of(node.values)
            return lambda row: whole(part(row) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operand = self.value_of(node.operand)
            return lambda row: not operand(row)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
            sign, operand = _SIGNS[type(node.op)], self.value_of(node.operand)
            return lambda row: None if (value := operand(row)) is None else sign(value)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            compute, (left, right) = _ARITHMETIC[type(node.op)], self._values_of((node.left, node.right))
            return lambda row: _compute(compute, left(row), right(row))
        if isinstance(node, ast.Compare) and all(type(sign) in _COMPARISONS for sign in node.ops):
            compared = self._values_of((node.left, *node.comparators))
            signs = [_COMPARISONS[type(sign)] for sign in node.ops]
            return lambda row: _compare_all(signs, compared, row)
        if isinstance(node, ast.List | ast.Tuple):
            items = self._values_of(node.elts)
            return lambda row: [item(row) for item in items]
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
            return lambda row: node.value
        written = ast.unparse(node)
        raise UsageError(f"`where` {shorten(self.text)!r} has {written!r}, which is not allowed; {HINT}.")

    def _values_of(self, nodes: Iterable[ast.expr]) -> list[Value]:
        return [self.value_of(node) for node in nodes]


def _compute(compute: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if left is None or right is None:
        return None
    if not (is_number(left) and is_number(right)):  # text times a number could fill the memory
        raise TypeError("+, −, × and / are for numbers")
    return compute(left, right)


def _compare(sign: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    missing = left is None or right is None
    return not (missing and sign in _ORDERED.values()) and bool(sign(left, right))


def _compare_all(
    signs: Iterable[Callable[[Any, Any], Any]], compared: Iterable[Value], row: Mapping[str, Any]
) -> bool:
    """Whether a < b < c holds; what comes after a comparison that does not hold is not computed."""
    values = pairwise(value(row) for value in compared)
    return all(_compare(sign, *pair) for sign, pair in zip(signs, values, strict=False))
