"""Conditions on named fields, as `where` takes them: parsed to Python's syntax tree, never evaluated by it.

`arm=a,b`, `dataset!=c4` and `params>=1e8` need no quotes. Longer ones are as in Python: `learning_rate > 0.1
and arm == "untied-2"`, `depth in (4, 6) or not core`, `tokens / parameters < 20`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
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
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ORDERED_BY_SIGN = {"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE}


@dataclass(frozen=True)
class Condition:
    """A parsed condition; call it with the fields of one row."""

    text: str
    tree: ast.expr
    names: dict[str, str]  # as written → the field's own name

    def __call__(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row satisfies the condition. A missing value satisfies no comparison but `!=`."""
        try:
            return bool(self._value(self.tree, fields))
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise UsageError(
                f"`where` {shorten(self.text)!r} cannot be computed ({error}); put quotes around words, "
                "none around numbers."
            ) from None

    def _value(self, node: ast.expr, fields: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.BoolOp):
            values = (bool(self._value(part, fields)) for part in node.values)
            return all(values) if isinstance(node.op, ast.And) else any(values)
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, fields)
            if isinstance(node.op, ast.Not):
                return not value
            return None if value is None else (-value if isinstance(node.op, ast.USub) else +value)
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, fields), self._value(node.right, fields)
            if left is None or right is None:
                return None
            if not (is_number(left) and is_number(right)):  # text times a number could fill the memory
                raise TypeError("+, −, × and / are for numbers")
            return _ARITHMETIC[type(node.op)](left, right)
        if isinstance(node, ast.Compare):
            return self._compare(node, fields)
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(part, fields) for part in node.elts]
        if isinstance(node, ast.Constant):
            return node.value
        return fields.get(self.names[ast.unparse(node)])

    def _compare(self, node: ast.Compare, fields: Mapping[str, Any]) -> bool:
        left = self._value(node.left, fields)
        for sign, part in zip(node.ops, node.comparators, strict=True):
            right = self._value(part, fields)
            missing = left is None or right is None
            if missing and isinstance(sign, _ORDERED):
                return False
            if not _COMPARISONS[type(sign)](left, right):
                return False
            left = right
        return True


def parse_condition(
    text: str, known: Collection[str], aliases: Callable[[str], str] = lambda name: name
) -> Condition:
    """Parse a condition on fields called `known`; `aliases` turns another name of a field into its own.

    Raises UsageError for a wrong syntax, for anything but comparisons, and, / or / not, arithmetic and
    constants, and for an unknown field.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"`where` has {len(text):,} characters; {MAX_LENGTH:,} are allowed.")
    if (short := _short_condition(text, known, aliases)) is not None:
        return short
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        single = "=" in text and not any(sign in text for sign in ("==", "<=", ">=", "!="))
        why = " (equality is ==)" if single else ""
        raise UsageError(f"`where` {shorten(text)!r} is not a condition{why}; {HINT}.") from None
    names: dict[str, str] = {}
    _check(tree, text, names, known, aliases)
    return Condition(text, tree, names)


def number_of(text: object) -> float | None:
    """The number that a cell or a word is, if it is one."""
    try:
        return None if isinstance(text, bool) else float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _short_condition(text: str, known: Collection[str], aliases: Callable[[str], str]) -> Condition | None:
    """The condition of a text like arm=a,b or params>=1e8; None for any other."""
    match = _SHORT.fullmatch(text)
    if match is None or _PYTHON.search(text):
        return None
    name, sign, values = match.groups()
    field = name if name in known else aliases(name)
    words = [word.strip() for word in values.split(",")]
    if values in known or (field not in known and not name.isidentifier()):  # two fields, or arithmetic
        return None
    if field not in known:
        raise _unknown(text, name, known)
    left, number = ast.Name(name), number_of(values)
    if sign in ("<", "<=", ">", ">="):
        if number is None:
            return None
        tree = ast.Compare(left, [_ORDERED_BY_SIGN[sign]()], [ast.Constant(number)])
    else:
        numbers = [one for one in map(number_of, words) if one is not None]
        either: list[ast.expr] = [ast.Constant(one) for one in (*(word or None for word in words), *numbers)]
        tree = ast.Compare(left, [ast.NotIn() if sign == "!=" else ast.In()], [ast.List(either)])
    return Condition(text, tree, {name: field})


def _unknown(text: str, name: str, known: Collection[str]) -> UsageError:
    return UsageError(
        f"`where` {shorten(text)!r}: there is no field {name!r}; the nearest are {nearest(name, known)} "
        "(put quotes around a word that is a value)."
    )


def _check(
    node: ast.expr, text: str, names: dict[str, str], known: Collection[str], aliases: Callable[[str], str]
) -> None:
    """Raise UsageError for a node that is not allowed; collect the fields it names."""
    parts: list[ast.expr]
    if isinstance(node, ast.Name | ast.Attribute):
        written = ast.unparse(node)
        field = written if written in known else aliases(written)
        if field not in known:
            raise _unknown(text, written, known)
        names[written] = field
        return
    if isinstance(node, ast.BoolOp):
        parts = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.UAdd):
        parts = [node.operand]
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        parts = [node.left, node.right]
    elif isinstance(node, ast.Compare) and all(type(sign) in _COMPARISONS for sign in node.ops):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.List | ast.Tuple):
        parts = node.elts
    elif isinstance(node, ast.Constant) and (
        node.value is None or isinstance(node.value, str | int | float | bool)
    ):
        parts = []
    else:
        raise UsageError(
            f"`where` {shorten(text)!r} has {ast.unparse(node)!r}, which is not allowed; {HINT}."
        )
    for part in parts:
        _check(part, text, names, known, aliases)
