"""Finds subgraphs that match a pattern, after reducing equivalent operations to a normal form."""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cukit.fusion._trace import Node
from cukit.fusion._tree import is_array

_ALIASES = {
    "true_divide": "divide", "amax": "max", "amin": "min", "abs": "absolute", "dot": "matmul",
    "pow": "power", "matrix_transpose": "transpose", "permute_dims": "transpose",
    "moveaxis": "transpose", "swapaxes": "transpose",
}  # fmt: skip
_COMMUTATIVE = frozenset(("add", "multiply", "maximum", "minimum"))
_REDUCTIONS = frozenset(("sum", "mean", "max", "min", "var"))
_BINARY = frozenset(("add", "subtract", "multiply", "divide", "maximum", "minimum", "matmul"))
_UNARY = frozenset(("negative", "exp", "log", "tanh", "erf", "square", "sqrt", "expit"))


class Form(NamedTuple):
    """An operation in normal form. Operands are nodes, arrays or numbers."""

    name: str
    operands: tuple[Any, ...]
    attributes: Hashable = ()


class Number(float):
    """A placeholder for any number in a pattern."""


def form(node: Node) -> Form | None:
    """The normal form of an operation; None if it cannot be part of a pattern."""
    name = _ALIASES.get(node.name, node.name)
    args, kwargs = node.args, dict(node.kwargs)
    if name in _REDUCTIONS:
        return _reduction(name, node)
    if name == "transpose":
        return _transpose(node)
    if name == "astype":
        return Form("cast", args[:1])
    if kwargs:
        return None
    if name == "reciprocal":
        return _divide(1.0, args[0])
    if name == "power" and len(args) == 2 and isinstance(args[1], numbers.Real):
        return _power(args[0], float(args[1]))
    if name == "multiply" and len(args) == 2 and args[0] is args[1]:
        return Form("square", args[:1])
    if name == "divide" and len(args) == 2:
        return _divide(*args)
    if name == "where" and len(args) == 3:
        return Form("where", args)
    if name == "matmul" and node.name == "dot" and node.value.ndim != 2:
        return None
    arity = 2 if name in _BINARY else 1 if name in _UNARY else 0
    return Form(name, args) if arity == len(args) > 0 else None


def _divide(a: Any, b: Any) -> Form:
    if isinstance(b, numbers.Real) and not isinstance(b, Number) and b != 0:
        return Form("multiply", (a, 1.0 / float(b)))
    if isinstance(a, numbers.Real) and a == 1:
        below = form(b) if isinstance(b, Node) else None
        if below is not None and below.name == "sqrt":
            return Form("rsqrt", below.operands)
    return Form("divide", (a, b))


def _power(base: Any, exponent: float) -> Form | None:
    names = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", 3.0: "cube"}
    if exponent == -1:
        return _divide(1.0, base)
    return Form(names[exponent], (base,)) if exponent in names else None


def _reduction(name: str, node: Node) -> Form | None:
    options = dict(zip(("axis",), node.args[1:2], strict=False)) | node.kwargs
    axis, keepdims = options.pop("axis", None), options.pop("keepdims", False)
    if len(node.args) > 2 or any(value is not None for value in options.values()):
        return None
    operand = node.args[0]
    if not isinstance(operand, Node) or (isinstance(axis, tuple) and len(axis) != 1):
        return None
    if isinstance(axis, tuple):
        (axis,) = axis
    if axis is None:
        return Form(name, (operand,), ("all", bool(keepdims)))
    axis = int(axis)
    return Form(
        name, (operand,), (axis - operand.value.ndim if axis >= 0 else axis, bool(keepdims))
    )


def _transpose(node: Node) -> Form | None:
    """A transpose whose attribute is "last" if it swaps the last two axes, else the permutation
    (negative axes)."""
    operand = node.args[0]
    if not isinstance(operand, Node):
        return None
    ndim = operand.value.ndim
    marks = np.empty(tuple(range(2, ndim + 2)), np.int8)
    try:
        axes = [size - 2 for size in node.call(marks, *node.args[1:], **node.kwargs).shape]
    except Exception:
        return None
    if axes == [*range(ndim - 2), ndim - 1, ndim - 2] and ndim >= 2:
        return Form("transpose", (operand,), "last")
    return Form("transpose", (operand,), tuple(axis - ndim for axis in axes))


class Match(NamedTuple):
    """An occurrence of a pattern.

    root: its last operation. inputs: the pattern's arguments by name: nodes, arrays or numbers.
    inner: the matched operations, including the root and casts.
    """

    root: Node
    inputs: dict[str, Any]
    inner: list[Node]


def match(pattern: Node, names: dict[int, str], root: Node) -> Match | None:
    """The occurrence of `pattern` that ends at `root`, or None.

    names: the names of the pattern's inputs, by their ids.
    """
    for bound in _unify(pattern, root, {}):
        inputs = {names[key]: value for key, value in bound.items() if key in names}
        return Match(root, inputs, _between(root, inputs))
    return None


def _between(root: Node, inputs: dict[str, Any]) -> list[Node]:
    """The operations between `inputs` and `root`, including `root`."""
    ends = {id(value) for value in inputs.values()}
    found: dict[Node, None] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node not in found and id(node) not in ends:
            found[node] = None
            stack += node.parents()
    return list(found)


Bound = dict[int, Any]
"""The values in the graph that the parts of a pattern are bound to, by the parts' ids."""


def _unify(part: Any, target: Any, bound: Bound) -> Iterator[Bound]:
    """Yields every extension of `bound` with which `part` matches `target`."""
    key = id(part)
    if isinstance(part, Number):
        value = _number(target)
        if value is not None and (key not in bound or bound[key] == value):
            yield {**bound, key: value}
        return
    if not isinstance(part, Node):
        value = _number(target)
        if value is not None and math.isclose(value, float(part), rel_tol=1e-5):
            yield bound
        return
    if key in bound:
        if _is_same(bound[key], target):
            yield bound
        elif isinstance(target, Node) and (inside := uncast(target)) is not None:
            yield from _unify(part, inside, bound)
        return
    if part.name == "input":
        # Casts are ignored: ops compute in float32 for any input dtype.
        inside = uncast(target) if isinstance(target, Node) else None
        if inside is not None:
            yield from _unify(part, inside, bound)
        if _number(target) is None:
            yield {**bound, key: target}
        return
    if not isinstance(target, Node):
        return
    inside = uncast(target)
    if inside is not None:
        yield from _unify(part, inside, bound)
        return
    mine, theirs = form(part), form(target)
    if mine is None or theirs is None or mine.name != theirs.name:
        return
    if mine.attributes != theirs.attributes or len(mine.operands) != len(theirs.operands):
        return
    orders: list[tuple[Any, ...]] = [theirs.operands]
    if mine.name in _COMMUTATIVE:
        orders.append(theirs.operands[::-1])
    for operands in orders:
        yield from _unify_all(mine.operands, operands, {**bound, key: target})


def _unify_all(parts: tuple[Any, ...], targets: tuple[Any, ...], bound: Bound) -> Iterator[Bound]:
    if not parts:
        yield bound
        return
    for found in _unify(parts[0], targets[0], bound):
        yield from _unify_all(parts[1:], targets[1:], found)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return isinstance(one, float) and isinstance(other, numbers.Real) and one == other


def _number(value: Any) -> float | None:
    """The value of a number or a one-element NumPy array, else None."""
    if isinstance(value, numbers.Real):
        return float(value)
    if is_array(value) and value.size == 1 and isinstance(value, np.ndarray):
        return float(value.reshape(())[()])
    return None


def uncast(node: Node) -> Node | None:
    """The operand of a cast between floating-point types; None for any other node."""
    if node.name != "astype" or not isinstance(node.args[0], Node):
        return None
    kinds = node.value.dtype.kind, node.args[0].value.dtype.kind
    return node.args[0] if set(kinds) <= {"f", "V"} else None
