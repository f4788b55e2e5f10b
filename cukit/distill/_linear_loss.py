"""The language-model head fused with a loss: chunks of tokens, so that the logits never exist."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    check_array,
    check_same_dtype,
    empty,
    float16,
    float32,
)
from cukit.core.scalars import check_integer
from cukit.errors import ArrayShapeError
from cukit.gemm import matmul
from cukit.gemm.cublas import Matrix, gemm

_FEWEST_TOKENS = 1024
_MOST_TOKENS = 2048
_TILE_TOKENS = 128
_ALIGNMENT = 8


@dataclass(frozen=True)
class LinearLossConfig:
    """How a batch goes through the head: `chunk_tokens` tokens at once."""

    tokens: int
    chunk_tokens: int

    def chunks(self) -> Iterator[slice]:
        """The token ranges, in order."""
        for start in range(0, self.tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, self.tokens))


@cache
def plan_linear_loss(
    tokens: int, hidden_size: int, chunk_tokens: int | None = None
) -> LinearLossConfig:
    """About as many tokens as the hidden size, 1024 to 2048, in chunks of one size.

    The product for the weight's gradient has the chunk as its inner extent, where those for the
    logits have the hidden size: so none is starved. A chunk of logits takes about the memory of the
    weight, and grad_weight is rounded to its dtype once a chunk, that is a handful of times.
    """
    if chunk_tokens is None:
        most = min(max(hidden_size, _FEWEST_TOKENS), _MOST_TOKENS)
        num_chunks = max(1, -(-tokens // most))
        share = -(-tokens // num_chunks)
        chunk_tokens = -(-share // _TILE_TOKENS) * _TILE_TOKENS
    return LinearLossConfig(tokens, max(1, min(chunk_tokens, tokens)))


def check_head(
    op: str, prefix: str, hidden: Array, weight: Array, rows: int | None, vocab_size: int | None
) -> None:
    """hidden [..., hidden_size] and weight [vocab_size, hidden_size] of one dtype."""
    check_array(op, f"{prefix}hidden", hidden, dtypes=FLOAT_DTYPES, least_ndim=1)
    check_array(op, f"{prefix}weight", weight, shape=(vocab_size, hidden.shape[-1]))
    check_same_dtype(op, **{f"{prefix}hidden": hidden, f"{prefix}weight": weight})
    if rows is not None and math.prod(hidden.shape[:-1]) != rows:
        raise ArrayShapeError(
            f"{op}: {prefix}hidden must have {rows} rows, got shape {hidden.shape}"
        )


def check_grad_weight(op: str, weight: Array, grad_weight: Array | None) -> None:
    """A gradient to accumulate into has the weight's shape, and its dtype or float32."""
    if grad_weight is not None:
        dtypes = (weight.dtype, float32)
        check_array(op, "grad_weight", grad_weight, dtypes=dtypes, shape=weight.shape)


def check_chunk_tokens(op: str, chunk_tokens: int | None) -> None:
    """Raises ConfigError for a chunk without tokens."""
    if chunk_tokens is not None:
        check_integer(op, "chunk_tokens", chunk_tokens, least=1)


def exact_boost(dtype: Any, divisor: float, tokens: int, divisor_on_gpu: bool) -> float:
    """What gradients of logits are multiplied by until they are used: 1, but for float16.

    Divided by a large token count they would sink below float16's smallest number. There it is a
    power of two near the divisor, and the products that consume them scale them back, exactly.
    """
    if dtype != float16:
        return 1.0
    size = float(tokens) if divisor_on_gpu else divisor
    return 2.0 ** math.floor(math.log2(max(size, 1.0)))


def empty_logits(hidden: Array, chunk_tokens: int, vocab_size: int) -> Array:
    """[chunk_tokens, vocab_size], with rows that begin on 16 bytes, as cuBLAS likes them."""
    padded = -(-vocab_size // _ALIGNMENT) * _ALIGNMENT
    return empty(hidden, (chunk_tokens, padded))[:, :vocab_size]


def project(hidden: Array, weight: Array, logits: Array) -> None:
    """logits = hidden @ weight^T."""
    _multiply(hidden, weight, logits, transpose_b=True)


class HeadGradients:
    """grad_hidden and grad_weight, filled chunk by chunk from the gradients of the logits."""

    def __init__(
        self,
        hidden: Array,
        weight: Array,
        grad_weight: Array | None,
        boost: float,
    ) -> None:
        self._hidden, self._weight = hidden, weight
        self._accumulates = grad_weight is not None
        self._factor = 1.0 / boost
        self.grad_hidden = empty(hidden, hidden.shape)
        self.grad_weight = empty(weight, weight.shape) if grad_weight is None else grad_weight
        if not hidden.size and grad_weight is None:
            self.grad_weight.fill(0)

    def add(self, chunk: slice, grad_logits: Array) -> None:
        """Writes grad_hidden[chunk], adds the chunk's part to grad_weight."""
        grad_hidden = self.grad_hidden[chunk]
        _multiply(grad_logits, self._weight, grad_hidden, factor=self._factor)
        _multiply(
            grad_logits,
            self._hidden[chunk],
            self.grad_weight,
            transpose_a=True,
            factor=self._factor,
            accumulate=self._accumulates,
        )
        self._accumulates = True


def _multiply(
    a: Array,
    b: Array,
    out: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """out = factor * op(a) @ op(b), plus out with `accumulate`.

    Without a factor the kernel is `matmul`'s choice; cuBLAS alone has one.
    """
    if factor == 1.0:
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "accumulate": accumulate}
        matmul(a, b, out=out, precision="auto", **options)
        return
    layouts = _layout(a, transpose_a), _layout(b, transpose_b), _layout(out)
    gemm(a, b, out, layouts, alpha=factor, beta=float(accumulate))


def _layout(array: Array, transposed: bool = False) -> Matrix:
    rows, columns = array.shape
    return Matrix(rows, columns, array.strides[0] // array.itemsize, transposed)
