"""A language-model head fused with a loss: logits exist for one chunk of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float16,
    float32,
    float64,
)
from cukit.core.scalars import check_integer
from cukit.distill.losses._loss_options import LossOptions, RowOptions, factors_of, part_of
from cukit.distill.losses._row_loss import Losses, empty_rows, normalizer_of, reduce_rows
from cukit.distributed import Communicator
from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm import matmul
from cukit.gemm.dense.cublas import Matrix, gemm
from cukit.reference.losses import LinearKlResult

_MIN_TOKENS = 1024
_MAX_TOKENS = 2048
_GRADIENT_SIZE = 3 << 20  # chunk_tokens x hidden_size: 128 tiles of 128 x 192
_LOGITS_BYTES = 512 << 20
_TILE_TOKENS = 128
_ALIGNMENT = 8


@dataclass(frozen=True)
class LinearLossConfig:
    """The chunks of a batch: `chunk_tokens` tokens go through the head at once."""

    tokens: int
    chunk_tokens: int

    def chunks(self) -> Iterator[slice]:
        """The token ranges, in order."""
        for start in range(0, self.tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, self.tokens))


@cache
def plan_linear_loss(
    tokens: int,
    hidden_size: int,
    row_bytes: int,
    chunk_tokens: int | None = None,
    most: int | None = None,
) -> LinearLossConfig:
    """Chunks of nearly equal size, of at most `hidden_size` tokens clamped to 1024..2048, or more
    if hidden_size and vocabulary are small.

    The GEMM for the weight's gradient has k = chunk_tokens, the one for the logits k = hidden_size:
    neither k is small. A chunk of logits takes about as much memory as the weight, and grad_weight
    is rounded to its dtype once per chunk, a few times in all. If hidden_size is small, the GEMM
    for the gradient of a chunk's hidden states has too few tiles to fill the GPU; chunks are then
    larger, as long as their logits take at most 512 MiB.

    row_bytes: bytes of a row of logits. chunk_tokens: replaces the size chosen here. most: maximum
    tokens per chunk; None: no limit.
    """
    if chunk_tokens is None:
        preferred = min(max(hidden_size, _MIN_TOKENS), _MAX_TOKENS)
        fitting = _LOGITS_BYTES // max(row_bytes, 1) // _TILE_TOKENS * _TILE_TOKENS
        preferred = max(preferred, min(_GRADIENT_SIZE // max(hidden_size, 1), fitting))
        if most is not None and most < preferred:
            preferred = most // _TILE_TOKENS * _TILE_TOKENS or most
        num_chunks = max(1, -(-tokens // preferred))
        share = -(-tokens // num_chunks)
        chunk_tokens = min(preferred, -(-share // _TILE_TOKENS) * _TILE_TOKENS)
    return LinearLossConfig(tokens, max(1, min(chunk_tokens, tokens)))


class Head(NamedTuple):
    """A language-model head and its input: logits = hidden @ weight^T + bias."""

    hidden: Array
    weight: Array
    bias: Array | None

    def adopt(self, op: str) -> Head:
        """This head with other libraries' arrays adopted as NumPy or CuPy arrays."""
        return Head(*adopt(op, *self))

    def check(self, op: str, prefix: str, rows: int | None) -> None:
        """Raises ArrayError unless hidden [..., hidden_size], weight [classes, hidden_size] and
        bias [classes] have one dtype, and hidden has `rows` rows if given."""
        hidden, weight, bias = self
        check_array(op, f"{prefix}hidden", hidden, dtypes=FLOAT_DTYPES, min_ndim=1)
        check_array(op, f"{prefix}weight", weight, shape=(None, hidden.shape[-1]))
        named = {f"{prefix}hidden": hidden, f"{prefix}weight": weight}
        if bias is not None:
            check_array(op, f"{prefix}bias", bias, shape=(weight.shape[0],))
            named[f"{prefix}bias"] = bias
        check_same_dtype(op, **named)
        if rows is not None and math.prod(hidden.shape[:-1]) != rows:
            raise ArrayShapeError(
                f"{op}: {prefix}hidden must have {rows} rows, got shape {hidden.shape}"
            )

    def flat(self, columns: int) -> Head:
        """This head with hidden [rows, hidden_size] and the vocabulary's first `columns` tokens."""
        bias = None if self.bias is None else self.bias[:columns]
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return Head(hidden, self.weight[:columns], bias)

    def project(self, chunk: slice, logits: Array) -> Array:
        """Writes the chunk's logits to the first rows of `logits`; returns these rows."""
        part = logits[: chunk.stop - chunk.start]
        if self.bias is not None:
            part[...] = self.bias
        accumulate = self.bias is not None
        _multiply(self.hidden[chunk], self.weight, part, transpose_b=True, accumulate=accumulate)
        return part


class HeadOptions(NamedTuple):
    """Arrays that accumulate the gradients of a head's parameters, and the size of a chunk."""

    grad_weight: Array | None = None
    grad_bias: Array | None = None
    chunk_tokens: int | None = None
    workspace_bytes: int | None = None

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        return self.grad_weight, self.grad_bias

    def adopt(self, op: str) -> HeadOptions:
        """These options with other libraries' arrays adopted as NumPy or CuPy arrays."""
        grad_weight, grad_bias = adopt(op, *self.arrays)
        return self._replace(grad_weight=grad_weight, grad_bias=grad_bias)

    def check(self, op: str, head: Head) -> None:
        """Raises ArrayError unless the gradients have their parameter's shape and an allowed dtype,
        and ConfigError unless the sizes are in range.

        grad_weight: dtype of the weight or float32. grad_bias: float32, or float64 for a float64
        bias.
        """
        dtypes = (head.weight.dtype, float32)
        if self.grad_weight is not None:
            shape = head.weight.shape
            check_array(op, "grad_weight", self.grad_weight, dtypes=dtypes, shape=shape)
        if self.grad_bias is not None:
            if head.bias is None:
                raise ConfigError(f"{op}: grad_bias needs a bias, got none")
            wide = (float64,) if head.bias.dtype == float64 else (float32,)
            shape = head.bias.shape
            check_array(op, "grad_bias", self.grad_bias, dtypes=wide, shape=shape)
        if self.chunk_tokens is not None:
            check_integer(op, "chunk_tokens", self.chunk_tokens, least=1)
        if self.workspace_bytes is not None:
            check_integer(op, "workspace_bytes", self.workspace_bytes, least=1)
            if self.chunk_tokens is not None:
                raise ConfigError(f"{op}: chunk_tokens and workspace_bytes are mutually exclusive")

    def plan(self, op: str, head: Head, tensors: int) -> LinearLossConfig:
        """The chunks of the head's rows. tensors: tensors of logits per chunk.

        Raises ConfigError if the workspace cannot hold the logits of one row.
        """
        tokens, hidden_size = head.hidden.shape
        row_bytes = _padded(head.weight.shape[0]) * head.hidden.itemsize
        if self.workspace_bytes is None:
            return plan_linear_loss(tokens, hidden_size, row_bytes, self.chunk_tokens)
        if self.workspace_bytes < tensors * row_bytes:
            raise ConfigError(
                f"{op}: workspace_bytes must be at least {tensors * row_bytes}, the logits of one "
                f"row, got {self.workspace_bytes}"
            )
        most = self.workspace_bytes // (tensors * row_bytes)
        return plan_linear_loss(tokens, hidden_size, row_bytes, None, most)


RowLaunch = Callable[[slice, Array], tuple[Callable[..., None], tuple[Array | None, ...]]]
"""Maps a chunk of tokens and its logits to a launch and its first arguments."""


def evaluate_head(
    op: str,
    head: Head,
    columns: int,
    rows: RowOptions,
    options: LossOptions,
    head_options: HeadOptions,
    row_launch: Callable[[LinearLossConfig], RowLaunch],
    *,
    tensors: int = 1,
    soft: bool = True,
    communicator: Communicator | None = None,
) -> tuple[Losses, HeadGradients]:
    """Computes a loss over the logits of a head, chunk by chunk, and the gradients of the head.

    columns: vocabulary columns in use. row_launch: maps the plan to the function that prepares the
    row kernel for a chunk. tensors: tensors of logits per chunk; row_launch allocates all but the
    first. soft: whether the kernel computes a divergence. communicator: connects the processes that
    each hold a shard of the vocabulary; row losses and gradients of `hidden` are summed over them.
    """
    flat = head.flat(columns)
    tokens = flat.hidden.shape[0]
    config = head_options.plan(op, flat, tensors)
    launches = row_launch(config)
    factor, grad_loss = rows.upstream()
    divisor, count = normalizer_of(rows, tokens)
    size = 1.0 if rows.reduction in ("sum", "none") else divisor
    scale = exact_scale(flat.hidden.dtype, size, tokens, divisor_on_gpu=count is not None)
    factors = factors_of(options, factor * scale / divisor)

    gradients = HeadGradients(head, flat, head_options, scale, communicator, config.chunk_tokens)
    logits = empty_logits(flat.hidden, config.chunk_tokens, columns)
    row_losses = empty_rows(flat.hidden, tokens, options, soft)
    for chunk in config.chunks():
        part = flat.project(chunk, logits)
        launch, inputs = launches(chunk, part)
        outputs = [None if each is None else each[chunk] for each in row_losses]
        launch(
            *inputs, part_of(rows.targets, chunk), part_of(rows.token_weights, chunk),
            *outputs[0 if soft else 1 :], part, part_of(grad_loss, chunk), count,
            trailing_args=(factors,),
        )  # fmt: skip
        gradients.add(chunk, part)
    if communicator is not None:
        communicator.join()
        for each in row_losses:
            if each is not None:
                communicator.all_reduce(each)
    return reduce_rows(*row_losses, rows, options, divisor, count), gradients


def linear_result(losses: Losses, gradients: HeadGradients, hidden: Array) -> LinearKlResult:
    """The result of an op that fuses a loss with a head; `hard` is 0 without a hard loss."""
    hard = losses.hard
    if hard is None:
        hard = empty(losses.loss, losses.loss.shape)
        hard.fill(0)
    return LinearKlResult(
        losses.loss, losses.soft, hard, gradients.grad_hidden.reshape(hidden.shape),
        gradients.grad_weight, gradients.grad_bias,
    )  # fmt: skip


def exact_scale(dtype: Any, divisor: float, tokens: int, divisor_on_gpu: bool) -> float:
    """The scale of gradients of logits until the GEMMs consume them: 1 except for float16.

    In float16, gradients divided by a large token count would underflow. Their scale is a power of
    two near the divisor, and the GEMMs that consume them undo it exactly.
    """
    if dtype != float16:
        return 1.0
    size = float(tokens) if divisor_on_gpu else divisor
    return 2.0 ** math.floor(math.log2(max(size, 1.0)))


def empty_logits(hidden: Array, chunk_tokens: int, vocab_size: int) -> Array:
    """[chunk_tokens, vocab_size], with rows padded to the alignment that cuBLAS prefers."""
    return empty(hidden, (chunk_tokens, _padded(vocab_size)))[:, :vocab_size]


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // _ALIGNMENT) * _ALIGNMENT


class HeadGradients:
    """Gradients of a head, accumulated chunk by chunk from the gradients of the logits."""

    def __init__(
        self,
        head: Head,
        flat: Head,
        head_options: HeadOptions,
        scale: float,
        communicator: Communicator | None,
        chunk_tokens: int,
    ) -> None:
        """flat: `head` with the columns in use. communicator: as in :func:`evaluate_head`."""
        self._communicator = communicator
        if communicator is not None:
            self._partials = empty(flat.hidden, (chunk_tokens, flat.hidden.shape[1]), np.float32)
        self._head = flat
        self._columns = flat.weight.shape[0]
        self._accumulates = head_options.grad_weight is not None
        self._factor = 1.0 / scale
        self.grad_hidden = empty(flat.hidden, flat.hidden.shape)
        grad_weight = head_options.grad_weight
        if grad_weight is None:
            grad_weight = empty(head.weight, head.weight.shape)
            grad_weight[self._columns if flat.hidden.size else 0 :].fill(0)
        self.grad_weight: Array = grad_weight
        self.grad_bias: Array | None = None
        if head.bias is not None:
            self.grad_bias = head_options.grad_bias
            if self.grad_bias is None:
                self.grad_bias = empty(head.bias, head.bias.shape, np.float32)
                self.grad_bias.fill(0)

    def add(self, chunk: slice, grad_logits: Array) -> None:
        """Writes grad_hidden[chunk] and adds to the parameters' gradients."""
        hidden, weight, _ = self._head
        if self._communicator is None:
            _multiply(grad_logits, weight, self.grad_hidden[chunk], factor=self._factor)
        else:
            self._add_partials(self._communicator, chunk, grad_logits, weight)
        _multiply(
            grad_logits,
            hidden[chunk],
            self.grad_weight[: self._columns],
            transpose_a=True,
            factor=self._factor,
            accumulate=self._accumulates,
        )
        if self.grad_bias is not None:
            ones = empty(grad_logits, (1, grad_logits.shape[0]))
            ones.fill(1)
            out = self.grad_bias[None, : self._columns]
            _multiply(ones, grad_logits, out, factor=self._factor, accumulate=True)
        self._accumulates = True

    def _add_partials(
        self, communicator: Communicator, chunk: slice, grad_logits: Array, weight: Array
    ) -> None:
        """Writes grad_hidden[chunk], the float32 sum over processes, concurrently with later work.

        The buffer of partial sums is not in use: this chunk's row launches called
        `communicator.join()`, so this chunk's GEMM runs after the previous chunk's all-reduce.
        """
        partials = self._partials[: chunk.stop - chunk.start]
        _multiply(grad_logits, weight, partials, factor=self._factor)
        with communicator.beside():
            communicator.all_reduce(partials)
            self.grad_hidden[chunk] = partials.astype(self.grad_hidden.dtype, copy=False)


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

    Without a factor `matmul` chooses the kernel; only cuBLAS supports a factor.
    """
    if factor == 1.0:
        options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "accumulate": accumulate}
        matmul(a, b, out=out, precision="auto", **options)
        return
    layouts = _layout(a, transpose_a), _layout(b, transpose_b), _layout(out)
    gemm(a, b, out, layouts, alpha=factor, beta=float(accumulate))


def _layout(array: Array, transposed: bool = False) -> Matrix:
    rows, columns = array.shape
    # The stride of a single row is not meaningful: CuPy gives a new axis stride 0.
    leading = array.strides[0] // array.itemsize if rows > 1 else columns
    return Matrix(rows, columns, leading, transposed)
