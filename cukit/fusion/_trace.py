"""Records the array operations of a function as a graph.

The function runs once on :class:`Traced` values. Each of them holds an array of the sample call, so
that shapes and dtypes are known. NumPy calls are intercepted by `__array_ufunc__` and
`__array_function__`. CuPy has no such protocol for foreign types, so the public functions of its
namespaces, and of cukit, are replaced by recording wrappers during the run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.fusion._tree import is_array, leaves, tree_map
from cukit.registry import ops

_NAMESPACES = ("cupy", "cupy.linalg", "cupyx.scipy.special", "scipy.special", "cukit")
"""Modules whose functions are replaced by recording wrappers during a trace, if imported."""

_METHODS = (
    "all", "any", "argmax", "argmin", "astype", "clip", "conj", "copy", "cumprod", "cumsum",
    "diagonal", "dot", "flatten", "max", "mean", "min", "prod", "ravel", "repeat", "reshape",
    "round", "squeeze", "std", "sum", "swapaxes", "take", "trace", "transpose", "var",
)  # fmt: skip
_UFUNC_METHODS = ("accumulate", "at", "outer", "reduce", "reduceat")
_WRITING_METHODS = (
    "fill", "partition", "put", "resize", "scatter_add", "scatter_max", "scatter_min", "set",
    "sort",
)  # fmt: skip
_WRITING_FUNCTIONS = (
    "copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask",
)  # fmt: skip
_OUT = {
    "all": 1, "any": 1, "argmax": 1, "argmin": 1, "clip": 2, "cumprod": 2, "cumsum": 2, "dot": 1,
    "max": 1, "mean": 2, "min": 1, "prod": 2, "round": 1, "std": 2, "sum": 2, "take": 2, "trace": 4,
    "var": 2,
}  # fmt: skip
"""Positions of `out` among the arguments of methods."""
_ADDED_TO = ("grad_weight", "grad_bias")
"""Arguments of cukit's ops that a call adds to, if they are given."""
_READS = (
    "item", "tolist", "tobytes", "get", "data", "ctypes", "flat", "__cuda_array_interface__",
)  # fmt: skip


class CannotTraceError(Exception):
    """The function does something that a graph of operations cannot represent."""


class CannotRepeatError(CannotTraceError):
    """The function may behave differently in the next call or write to arrays; a CUDA graph would
    only replay the captured call."""


@dataclass(eq=False)
class Node:
    """One operation, or an input.

    name: NumPy's name of the function, or "input". call: the function that computes it.
    args, kwargs: its arguments, with nodes in place of traced arrays, also inside lists, tuples,
    dictionaries and slices. value: the result in the sample call.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any

    def parents(self) -> list[Node]:
        """The nodes in the arguments."""
        return leaves((self.args, self.kwargs), is_node)


@dataclass
class Trace:
    """The graph of a function: its input nodes, and its result with nodes in place of arrays."""

    inputs: list[Node]
    result: Any

    def free(self) -> None:
        """Drops the values of the sample call, which frees the memory of the intermediates."""
        for node in (*self.nodes(), *self.inputs):
            node.value = None

    def nodes(self) -> list[Node]:
        """All operations that the result depends on, in topological order, without inputs."""
        order: dict[Node, None] = {}
        roots = leaves(self.result, is_node)
        stack = [(node, False) for node in reversed(roots)]
        while stack:
            node, done = stack.pop()
            if node in order or node.name == "input":
                continue
            if done:
                order[node] = None
            else:
                stack.append((node, True))
                stack += [(parent, False) for parent in reversed(node.parents())]
        return list(order)


def is_same(one: Trace, other: Trace) -> bool:
    """Whether two traces have the same operations and equal constants."""
    numbers: list[dict[Node, int]] = []
    steps: list[list[Node]] = []
    for each in (one, other):
        steps.append([*each.inputs, *each.nodes()])
        numbers.append({node: number for number, node in enumerate(steps[-1])})
    if len(steps[0]) != len(steps[1]):
        return False

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Node) or isinstance(b, Node):
            return numbers[0].get(a, -1) == numbers[1].get(b, -2)
        if type(a) is not type(b):
            return False
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(equal, a, b))
        if isinstance(a, dict):
            return list(a) == list(b) and all(map(equal, a.values(), b.values()))
        if is_array(a):
            return a is b or (
                a.shape == b.shape
                and a.dtype == b.dtype
                and bool(((a == b) | ((a != a) & (b != b))).all())
            )
        return a is b or bool(a == b) or (a != a and b != b)

    pairs = zip(*steps, strict=True)
    return equal(one.result, other.result) and all(
        a.name == b.name and equal((a.args, a.kwargs), (b.args, b.kwargs)) for a, b in pairs
    )


def is_node(value: Any) -> bool:
    """Whether `value` is a Node."""
    return isinstance(value, Node)


def replaced(value: Any, change: Callable[[Node], Any]) -> Any:
    """`value` with `change(node)` for every node in it."""
    return tree_map(value, is_node, change)


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """The graph of `function(*args, **kwargs)`; arrays may be in lists, tuples and dictionaries.

    Raises CannotTraceError if the function reads values on the host, assigns to elements, modifies
    an array in place, writes to `out=` or calls an array method that is not recorded.
    """
    inputs: list[Node] = []

    def enter(array: Any) -> Traced:
        inputs.append(Node("input", _no_call, (), {}, array))
        return Traced(inputs[-1])

    given, named = tree_map((args, kwargs), is_array, enter)
    with _recording():
        result = function(*given, **named)
    return Trace(inputs, _to_nodes(result))


def _no_call(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an input is not computed")


def record(name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs `call` on the values of its traced arguments; returns the traced result."""
    values, named = _to_values(args), _to_values(kwargs)
    result = call(*values, **named)
    node = Node(name, call, _to_nodes(tuple(args)), _to_nodes(dict(kwargs)), result)
    return _traced(node, result)


def _traced(node: Node, result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        parts = []
        for index, part in enumerate(result):
            pick = Node("pick", operator.itemgetter(index), (node,), {}, part)
            parts.append(_traced(pick, part))
        return result._make(parts) if hasattr(result, "_make") else type(result)(parts)
    if is_array(result) or isinstance(result, np.generic):
        return Traced(node)
    return result


def _to_values(value: Any) -> Any:
    return tree_map(value, _is_traced, lambda traced: traced._node.value)


def _to_nodes(value: Any) -> Any:
    return tree_map(value, _is_traced, lambda traced: traced._node)


def _is_traced(value: Any) -> bool:
    return isinstance(value, Traced)


class Traced:
    """Stands in for an array during a trace and records the operations on it."""

    __array_priority__ = 1000.0

    def __init__(self, node: Node) -> None:
        self._node = node

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name, function = ufunc.__name__, ufunc
        if method != "__call__":
            name, function = f"{name}.{method}", getattr(ufunc, method)
        _check_writes(name, function, inputs, kwargs)
        return record(name, function, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _check_writes(function.__name__, function, args, kwargs)
        return record(function.__name__, function, args, kwargs)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return _Namespace(np if isinstance(self._node.value, np.ndarray) else sys.modules["cupy"])

    def __getattr__(self, name: str) -> Any:
        value = self._node.value
        if name in _METHODS:
            return lambda *args, **kwargs: self._call_method(name, args, kwargs)
        if name in _WRITING_METHODS:
            raise CannotRepeatError(f".{name}() changes an array in place")
        if name == "T":
            return record("transpose", _method("transpose"), (self,), {})
        if name == "mT":
            return self.swapaxes(-1, -2)
        if name in _READS:
            raise CannotTraceError(f"it reads values on the host: .{name}")
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(value, name)
        if callable(attribute):
            raise CannotTraceError(f"the method .{name}() is not traced")
        return attribute

    def _call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = _OUT.get(name, len(args))
        if any(out is not None for out in (kwargs.get("out"), *args[position : position + 1])):
            raise CannotRepeatError(f".{name}() writes to out=")
        return record(name, _method(name), (self, *args), kwargs)

    def __len__(self) -> int:
        return len(self._node.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        return record("getitem", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        raise CannotRepeatError("it assigns to elements of an array")

    def _reads(self, *_: Any, **__: Any) -> Any:
        raise CannotTraceError("it reads values on the host")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __array__ = _reads


def _method(name: str) -> Callable[..., Any]:
    return lambda array, *args, **kwargs: getattr(array, name)(*args, **kwargs)


def _operator(name: str, function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def call(self: Traced, *others: Any) -> Any:
        args = (*others, self) if swapped else (self, *others)
        return record(name, function, args, {})

    return call


def _in_place(self: Traced, _: Any) -> Any:
    raise CannotRepeatError("it changes an array in place")


_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "power",
    "matmul": "matmul", "mod": "remainder", "floordiv": "floor_divide", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip
_COMPARISONS = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "eq": "equal", "ne": "not_equal",
}  # fmt: skip
for _short, _name in _BINARY.items():
    _function = getattr(operator, f"__{_short}__")
    setattr(Traced, f"__{_short}__", _operator(_name, _function, swapped=False))
    setattr(Traced, f"__r{_short}__", _operator(_name, _function, swapped=True))
    setattr(Traced, f"__i{_short}__", _in_place)
for _short, _name in _COMPARISONS.items():
    setattr(Traced, f"__{_short}__", _operator(_name, getattr(operator, _short), swapped=False))
for _short, _name in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
    setattr(Traced, f"__{_short}__", _operator(_name, getattr(operator, _short), swapped=False))
Traced.__hash__ = object.__hash__  # type: ignore[method-assign]


class _Namespace:
    """An array-API namespace with recording functions."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _recorder(name, found) if callable(found) and not isinstance(found, type) else found


def _recorder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not leaves((args, kwargs), _is_traced):
            return function(*args, **kwargs)
        _check_writes(name, function, args, kwargs)
        return record(name, function, args, kwargs)

    if isinstance(getattr(function, "nin", None), int):  # a ufunc
        for method in _UFUNC_METHODS:
            if hasattr(function, method):
                setattr(call, method, _recorder(f"{name}.{method}", getattr(function, method)))
    return call


def _check_writes(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises CannotRepeatError if a call writes to one of its arguments."""
    inputs = getattr(function, "nin", len(args))  # further arguments of a ufunc are outputs
    position = _position_of_out(function)
    positional = () if position is None else args[position : position + 1]
    if len(args) > inputs or any(out is not None for out in (kwargs.get("out"), *positional)):
        raise CannotRepeatError(f"{name} writes to out=")
    added_to = [key for key in kwargs if key in _ADDED_TO and kwargs[key] is not None]
    if added_to:
        raise CannotRepeatError(f"{name} adds to {added_to[0]}")
    in_place = name in _WRITING_FUNCTIONS or name.endswith(".at") or kwargs.get("inplace") is True
    if in_place or function in _writing_ops():
        raise CannotRepeatError(f"{name} changes an array in place")


@functools.cache
def _position_of_out(function: Callable[..., Any]) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a ufunc, or a function without a signature
        return None
    for position, each in enumerate(parameters):
        # Without a default, `out` is an input: the result of a forward.
        if each.name == "out" and each.kind is not each.KEYWORD_ONLY:
            return None if each.default is each.empty else position
    return None


@functools.cache
def _writing_ops() -> frozenset[Callable[..., Any]]:
    return frozenset(op.function for op in ops() if op.writes)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Wraps the functions of :data:`_NAMESPACES` to record calls with traced arguments."""
    changed: list[tuple[Any, str, Any]] = []
    try:
        for place in _NAMESPACES:
            module = sys.modules.get(place)
            if module is None:
                continue
            for name, function in list(vars(module).items()):
                if name.startswith("_") or isinstance(function, type) or not callable(function):
                    continue
                changed.append((module, name, function))
                setattr(module, name, _recorder(name, function))
        yield
    finally:
        for module, name, function in reversed(changed):
            setattr(module, name, function)
