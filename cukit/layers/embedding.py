"""Token embedding: look-up of table rows by id."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cukit.core.arrays import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    namespace,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.scalars import MAX_INT32, check_dtype, check_integer
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.layers._elementwise import ElementwiseConfig, plan_elementwise
from cukit.layers._id_sort import plan_id_sort, sort_ids
from cukit.reference import embedding as reference
from cukit.registry import register


def embedding(ids: Array, weight: Array, *, out: Array | None = None) -> Array:
    """Token embedding: `y[...] = weight[ids[...]]`.

    Args:
        ids: int32|int64, any shape, C-contiguous. An id out of range yields a row of NaN on the GPU
            and raises ArrayError on the CPU.
        weight: float32|float16|bfloat16 [num_embeddings, hidden], C-contiguous. float64 on the CPU
            only.
        out: output array for `y`; dtype of `weight`, [..., hidden].

    Returns:
        `y`, [..., hidden], dtype of `weight`.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument; `out` overlaps an input.

    Runs on CuPy's current stream; deterministic.

    >>> import numpy as np, cukit as ck
    >>> ck.embedding(np.array([2, 0]), np.array([[0.0], [1.0], [2.0]], np.float32))
    array([[2.],
           [0.]], dtype=float32)
    """
    ids, weight, out = adopt("embedding", ids, weight, out)
    check_overlap("embedding", out, ids=ids, weight=weight)
    if not runs_kernel("embedding", ids, weight, out):
        _check(ids, weight, out)
        return write_out(out, reference.embedding(ids, weight))
    launch = _prepare(ids, weight, out)
    if out is None:
        out = empty(weight, (*ids.shape, weight.shape[1]))
    launch(ids, weight, out)
    return out


def embedding_backward(
    grad_out: Array, ids: Array, num_embeddings: int, *, dtype: npt.DTypeLike | None = None
) -> Array:
    """Gradient of :func:`embedding` with respect to `weight`: the sum of `grad_out` rows per id.

    Args:
        grad_out: gradient of `y`, float32|float16|bfloat16 [..., hidden], C-contiguous.
        ids: as in the forward. Ids out of range are skipped on the GPU and raise ArrayError on the
            CPU.
        num_embeddings: rows of `weight`.
        dtype: dtype of the result, by default that of `grad_out`; float32 avoids rounding the sums.

    Returns:
        `grad_weight`, [num_embeddings, hidden].

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: `num_embeddings` is negative or above 2^31 - 1.

    Deterministic: tokens are sorted by id, and the rows of each id are summed in token order, in
    float32, without float atomics. Workspace: up to 24 bytes per token plus 1/16 of `grad_out`.
    """
    op = "embedding_backward"
    grad_out, ids = adopt(op, grad_out, ids)
    check_array(op, "grad_out", grad_out, dtypes=FLOAT_DTYPES, min_ndim=1)
    result_dtype = grad_out.dtype if dtype is None else check_dtype(op, "dtype", dtype)
    if not runs_kernel("embedding_backward", grad_out, ids):
        _check_backward(grad_out, ids, num_embeddings)
        return reference.embedding_backward(grad_out, ids, num_embeddings, dtype=result_dtype)
    sums, join, parts_shape = _prepare_backward(grad_out, ids, num_embeddings, result_dtype)
    keys, tokens = sort_ids(ids, num_embeddings)
    shape = (num_embeddings, grad_out.shape[-1])
    grad_weight = namespace(grad_out).zeros(shape, result_dtype)
    parts = empty(grad_out, parts_shape, np.float32)
    sums(grad_out, keys, tokens, grad_weight, parts)
    join(keys, parts, grad_weight)
    return grad_weight


@dataclass(frozen=True)
class EmbeddingBackwardConfig:
    """Chunks of `span` tokens and slices of `threads * vec` columns, one block for each pair."""

    dtype: str
    out_dtype: str
    span: int
    threads: int
    vec: int
    join_threads: int
    join_vec: int
    num_chunks: int
    slices: int
    join_slices: int

    def spec(self) -> KernelSpec:
        """The kernel that sums within chunks."""
        defines = (("DTYPE", self.dtype), *self._defines(self.threads, self.vec))
        return KernelSpec(
            "layers/embedding_backward.cu", "embedding_backward", defines, self.threads
        )

    def join_spec(self) -> KernelSpec:
        """The kernel that adds up the partial sums of ids whose tokens span several chunks."""
        return KernelSpec(
            "layers/embedding_backward_join.cu",
            "embedding_backward_join",
            self._defines(self.join_threads, self.join_vec),
            self.join_threads,
        )

    def _defines(self, threads: int, vec: int) -> tuple[tuple[str, str | int], ...]:
        return ("OUT", self.out_dtype), ("THREADS", threads), ("VEC", vec), ("SPAN", self.span)


@cache
def plan_embedding_backward(
    num_tokens: int, hidden: int, dtype: str, vec: int, out_dtype: str, *, span: int = 64
) -> EmbeddingBackwardConfig:
    """The launch configuration: chunks short enough to fill the GPU, and long enough that few runs
    of equal ids cross chunks.

    vec: elements per access, a divisor of `hidden`. span: for tuning; a multiple of 8.
    """
    join_vec = next(width for width in (4, 2, 1) if hidden % width == 0)
    threads, slices = _slices(hidden, vec)
    join_threads, join_slices = _slices(hidden, join_vec)
    return EmbeddingBackwardConfig(
        dtype=dtype,
        out_dtype=out_dtype,
        span=span,
        threads=threads,
        vec=vec,
        join_threads=join_threads,
        join_vec=join_vec,
        num_chunks=-(-num_tokens // span),
        slices=slices,
        join_slices=join_slices,
    )


def _slices(hidden: int, vec: int, max_threads: int = 256) -> tuple[int, int]:
    """Threads per block, a multiple of 32, and the number of blocks that cover a row."""
    vecs = hidden // vec
    threads = min(max_threads, max(32, -(-vecs // 32) * 32))
    return threads, -(-vecs // threads)


def _check(ids: Array, weight: Array, out: Array | None) -> None:
    check_array("embedding", "ids", ids, dtypes=INDEX_DTYPES)
    check_array("embedding", "weight", weight, dtypes=FLOAT_DTYPES, ndim=2)
    if out is not None:
        check_array("embedding", "out", out, shape=(*ids.shape, weight.shape[1]))
    check_same_dtype("embedding", weight=weight, out=out)


def _check_backward(grad_out: Array, ids: Array, num_embeddings: int) -> None:
    op = "embedding_backward"
    check_array(op, "ids", ids, dtypes=INDEX_DTYPES)
    check_array(op, "grad_out", grad_out, dtypes=FLOAT_DTYPES, shape=(*ids.shape, None))
    check_integer(op, "num_embeddings", num_embeddings, least=0, most=MAX_INT32)


@launch_plan
def _prepare(ids: Array, weight: Array, out: Array | None) -> Launch:
    _check(ids, weight, out)
    check_array("embedding", "weight", weight, dtypes=KERNEL_DTYPES)
    rows, hidden = weight.shape
    vec = access_width(hidden, weight, out)
    config = plan_elementwise(ids.size * hidden, weight.itemsize, vec)
    kernel = load_kernel(_spec(config, weight.dtype.name, ids.dtype.name))
    vecs_per_row = hidden // vec
    scalars = (np.int64(ids.size * vecs_per_row), np.int32(vecs_per_row), np.int32(rows))
    return Launch(kernel, (config.num_blocks,), scalars)


@launch_plan
def _prepare_backward(
    grad_out: Array, ids: Array, num_embeddings: int, dtype: np.dtype[Any]
) -> tuple[Launch, Launch, tuple[int, int, int]]:
    _check_backward(grad_out, ids, num_embeddings)
    check_array("embedding_backward", "grad_out", grad_out, dtypes=KERNEL_DTYPES)
    if dtype not in KERNEL_DTYPES:
        raise ArrayDtypeError(
            f"embedding_backward: dtype {dtype.name} is supported on the CPU only"
        )
    if ids.size > MAX_INT32:
        raise ArrayShapeError(
            f"embedding_backward: ids may have up to {MAX_INT32} elements, got {ids.size}"
        )
    hidden = grad_out.shape[-1]
    vec = access_width(hidden, grad_out)
    config = plan_embedding_backward(ids.size, hidden, grad_out.dtype.name, vec, dtype.name)
    scalars = (np.int32(ids.size), np.int32(num_embeddings), np.int32(hidden))
    sums_grid = (config.num_chunks, config.slices)
    join_grid = (max(0, config.num_chunks - 1), config.join_slices)
    return (
        Launch(load_kernel(config.spec()), sums_grid, scalars),
        Launch(load_kernel(config.join_spec()), join_grid, scalars),
        (config.num_chunks, 2, hidden),
    )


def _spec(config: ElementwiseConfig, dtype: str, id_dtype: str) -> KernelSpec:
    return config.spec("embedding", "embedding", ("DTYPE", dtype), ("ID", id_dtype))


def _specs(device: Device) -> list[KernelSpec]:
    size = 8192 * 4096
    return [
        _spec(
            plan_elementwise(size, dtype.itemsize, 16 // dtype.itemsize),
            dtype.name,
            ids.name,
        )
        for dtype in KERNEL_DTYPES
        for ids in INDEX_DTYPES
    ]


def _specs_backward(device: Device) -> list[KernelSpec]:
    sorts = [
        spec
        for num_embeddings in (256, 256_000)
        for ids in INDEX_DTYPES
        for pair in plan_id_sort(100_000, num_embeddings).specs(ids.name)
        for spec in pair
    ]
    sums = [
        spec
        for dtype in KERNEL_DTYPES
        for config in (
            plan_embedding_backward(100_000, 4096, dtype.name, 16 // dtype.itemsize, dtype.name),
        )
        for spec in (config.spec(), config.join_spec())
    ]
    return sorts + sums


register(
    name="embedding",
    family="layers",
    function=embedding,
    reference=reference.embedding,
    specs=_specs,
)
register(
    name="embedding_backward",
    family="layers",
    function=embedding_backward,
    reference=reference.embedding_backward,
    specs=_specs_backward,
)
