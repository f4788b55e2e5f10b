"""The patterns of `optimize`: common ways to write the ops that cukit has fused kernels for."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.attention import flash_attention
from cukit.core.arrays import namespace
from cukit.fusion._match import Number
from cukit.fusion._trace import Node, record, trace
from cukit.gemm import linear
from cukit.layers import gelu, layer_norm, rms_norm


@dataclass(frozen=True)
class Pattern:
    """An op and one way to write it in array code.

    op: cukit's name. spelling: the array code, a function of named arrays and numbers. replace:
    computes the same with cukit's op, called with these names as keyword arguments.
    """

    op: str
    spelling: Callable[..., Any]
    replace: Callable[..., Any]
    arguments: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | None] | None = None
    """Converts the matched inputs, and those of them that are constant arrays, to the arguments of
    `replace`; returns None if the op does not apply. Default: the inputs as they are."""

    def graph(self) -> tuple[Node, dict[int, str]]:
        """The spelling's last operation, and the names of its inputs by id."""
        arrays: dict[str, Any] = {}
        scalars: dict[str, Number] = {}
        for name, parameter in inspect.signature(self.spelling).parameters.items():
            if parameter.default is not parameter.empty:
                continue  # a default that binds a loop variable, as in act=act
            if name in _SHAPES:
                arrays[name] = np.ones(_SHAPES[name], np.float32)
            else:
                scalars[name] = Number(1.0)
        traced = trace(lambda inputs: self.spelling(**inputs, **scalars), (arrays,), {})
        names = dict(zip(map(id, traced.inputs), arrays, strict=True))
        names |= {id(scalar): name for name, scalar in scalars.items()}
        return traced.result, names


_SHAPES = {
    "x": (2, 4), "weight": (4,), "bias": (4,), "w": (4, 4), "q": (2, 2, 2, 4), "k": (2, 2, 2, 4),
    "v": (2, 2, 2, 4), "mask": (2, 2), "added": (2, 2),
}  # fmt: skip
"""Shapes of the arrays in spellings; other names are numbers."""


def _erf(x: Any) -> Any:
    return record("erf", lambda a: np.vectorize(math.erf)(a).astype(a.dtype), (x,), {})


def _tanh_part(x: Any, cubic: Any) -> Any:
    return np.tanh((x + cubic * 0.044715) * math.sqrt(2 / math.pi))


GELUS: dict[str, Sequence[Callable[[Any], Any]]] = {
    "gelu": (
        lambda x: x * 0.5 * (_erf(x * math.sqrt(0.5)) + 1),
        lambda x: x * ((_erf(x * math.sqrt(0.5)) + 1) * 0.5),
    ),
    "gelu_tanh": (
        lambda x: x * 0.5 * (_tanh_part(x, x**3) + 1),
        lambda x: x * ((_tanh_part(x, x**3) + 1) * 0.5),
        lambda x: x * 0.5 * (_tanh_part(x, x * x * x) + 1),
        lambda x: x * 0.5 * (np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)) + 1),
    ),
}
ACTIVATIONS: dict[str, Sequence[Callable[[Any], Any]]] = {
    **GELUS,
    "silu": (
        lambda x: x / (1 + np.exp(-x)),
        lambda x: x * (1 / (1 + np.exp(-x))),
        lambda x: x * record("expit", lambda a: 1 / (1 + np.exp(-a)), (x,), {}),
    ),
    "relu": (lambda x: np.maximum(x, 0),),
}
"""Common ways to write each activation."""


def _softmax(s: Any) -> Any:
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _rms_norms() -> list[Pattern]:
    spellings: list[Callable[..., Any]] = [
        lambda x, weight, eps: x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight,
        lambda x, weight, eps: (
            x * (1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)) * weight
        ),
        lambda x, weight, eps: weight * (x * ((x * x).mean(axis=-1, keepdims=True) + eps) ** -0.5),
    ]
    return [Pattern("rms_norm", each, rms_norm, _row_arguments) for each in spellings]


def _layer_norms() -> list[Pattern]:
    def centred(x: Any) -> Any:
        return x - x.mean(axis=-1, keepdims=True)

    def by_hand(x: Any, eps: Any) -> Any:
        c = centred(x)
        return c / np.sqrt((c * c).mean(axis=-1, keepdims=True) + eps)

    def by_variance(x: Any, eps: Any) -> Any:
        return centred(x) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)

    def by_reciprocal(x: Any, eps: Any) -> Any:
        return centred(x) * (1 / np.sqrt(x.var(axis=-1, keepdims=True) + eps))

    patterns = []
    for normed in (by_hand, by_variance, by_reciprocal):
        patterns += [
            Pattern(
                "layer_norm",
                lambda x, weight, bias, eps, normed=normed: normed(x, eps) * weight + bias,
                layer_norm,
                _row_arguments,
            ),
            Pattern(
                "layer_norm",
                lambda x, weight, eps, normed=normed: normed(x, eps) * weight,
                layer_norm,
                _row_arguments,
            ),
        ]
    return patterns


def _attention(
    q: Any, k: Any, v: Any, *, scale: float = 1.0, mask: Any = None, added: Any = None,
    causal: bool = False,
) -> Any:  # fmt: skip
    """flash_attention on [..., positions, head_dim], the layout of array code with matmul; at most
    two leading axes, such as batch and heads."""
    axes = _NEW_AXES[q.ndim]
    heads = [a[axes].swapaxes(1, 2) for a in (q, k, v)]
    out: Any = flash_attention(*heads, scale=scale, causal=causal, mask=mask, bias=added)
    return out.swapaxes(1, 2)[tuple(0 if axis is None else axis for axis in axes)]


_NEW_AXES = {2: (None, None), 3: (slice(None), None), 4: (slice(None), slice(None))}
"""By number of axes, the index that adds leading axes up to four."""


def _row_arguments(inputs: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any] | None:
    """Requires weight and bias vectors as wide as the rows of x, or as the result of x @ w."""
    shapes = {name: getattr(value, "shape", ()) for name, value in _values(inputs).items()}
    width = shapes["x"][-1:]
    if "w" in shapes:
        if len(shapes["x"]) < 2 or len(shapes["w"]) != 2:
            return None
        width = shapes["w"][1:]
    vectors = [shapes[name] for name in ("weight", "bias") if name in shapes]
    return inputs if all(shape == width for shape in vectors) else None


def _values(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.value if isinstance(value, Node) else value for name, value in inputs.items()
    }


def _mask_arguments(inputs: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any] | None:
    """Converts a constant triangular mask to causal=True. Rejects arrays with different numbers of
    axes, and masks that set hidden scores to a value above _HIDDEN, which would not hide them."""
    values = _values(inputs)
    if len({values[name].ndim for name in "qkv"}) > 1 or values["q"].ndim not in _NEW_AXES:
        return None
    converted = dict(inputs)
    if converted.pop("hidden", -np.inf) > _HIDDEN:
        return None
    mask = constants.get("mask")
    if mask is not None:
        rows, columns = mask.shape[-2:]
        triangle = namespace(mask).tri(rows, columns, columns - rows, dtype=bool)
        if mask.size == triangle.size and bool((mask.reshape(triangle.shape) == triangle).all()):
            converted["mask"], converted["causal"] = None, True
    return converted


_HIDDEN = -1e4
"""Scores at or below this value count as masked."""


def _attentions() -> list[Pattern]:
    products: list[Callable[..., Any]] = [
        lambda q, k, scale: q @ k.swapaxes(-1, -2) * scale,
        lambda q, k, scale: (q * scale) @ k.swapaxes(-1, -2),
    ]
    patterns = []
    for scores in products:
        spellings: list[Callable[..., Any]] = [
            lambda q, k, v, scale, f=scores: _softmax(f(q, k, scale)) @ v,
            lambda q, k, v, scale, mask, hidden, f=scores: (
                _softmax(np.where(mask, f(q, k, scale), hidden)) @ v
            ),
            lambda q, k, v, scale, added, f=scores: _softmax(f(q, k, scale) + added) @ v,
        ]
        patterns += [Pattern("flash_attention", s, _attention, _mask_arguments) for s in spellings]
    plain: list[Callable[..., Any]] = [
        lambda q, k, v: _softmax(q @ k.swapaxes(-1, -2)) @ v,
        lambda q, k, v, mask, hidden: _softmax(np.where(mask, q @ k.swapaxes(-1, -2), hidden)) @ v,
    ]
    return patterns + [Pattern("flash_attention", s, _attention, _mask_arguments) for s in plain]


def _linears() -> list[Pattern]:
    """w is [in, out]: `x @ weight.T` matches with w = weight.T, a transposed view of [out, in].

    The plain product comes last. It replaces cuBLAS, which CuPy cannot capture in a CUDA graph.
    """
    patterns = []
    for name, spellings in ACTIVATIONS.items():
        for act in spellings:
            for spelling in (
                lambda x, w, bias, act=act: act(x @ w + bias),
                lambda x, w, act=act: act(x @ w),
            ):
                replace = functools.partial(_linear, activation=name)
                patterns.append(Pattern("linear", spelling, replace, _row_arguments))
    return [
        *patterns,
        Pattern("linear", lambda x, w, bias: x @ w + bias, _linear, _row_arguments),
        Pattern("linear", lambda x, w: x @ w, _linear, _row_arguments),
    ]


def _linear(x: Any, w: Any, bias: Any = None, activation: str | None = None) -> Any:
    return linear(x, w.T, bias, activation)


def _gelus() -> list[Pattern]:
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}
    return [
        Pattern("gelu", spelling, functools.partial(gelu, approximate=approximate[name]))
        for name, spellings in GELUS.items()
        for spelling in spellings
    ]


@functools.cache
def patterns() -> list[tuple[Pattern, Node, dict[int, str]]]:
    """All patterns with their graphs and input names; those replacing more operations first."""
    found = [*_attentions(), *_layer_norms(), *_rms_norms(), *_linears(), *_gelus()]
    return [(each, *each.graph()) for each in found]
