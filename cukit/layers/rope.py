"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from cukit.core.arrays import (
    ACCESS_BYTES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.rotary import check_rotary_tables
from cukit.core.scalars import check_flag, check_integer
from cukit.errors import ArrayShapeError, ConfigError
from cukit.layers._elementwise import index_type
from cukit.reference import rope as reference
from cukit.registry import register

_PARAMETERS = parameter_structs("layers/parameters.cuh")["RopeParameters"]


def rope(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Rotary position embedding: rotates pairs `(a, b)` of each head by an angle per position.

    `a' = a cos - b sin`, `b' = b cos + a sin`; pairs are `(x[i], x[i + rotary_dim / 2])`, or
    `(x[2i], x[2i + 1])` if interleaved.

    Args:
        q: float32|float16|bfloat16 [batch, seq_len, num_heads_q, head_dim]. Any strides with a
            contiguous last axis, e.g. slices of a fused projection. float64 on the CPU only.
        k: [batch, seq_len, num_heads_k, head_dim], dtype of `q`; any strides, as `q`.
        cos, sin: float32 [max_positions, rotary_dim / 2], C-contiguous.
        position_ids: int32|int64 [batch, seq_len] or [seq_len], by default 0, 1, 2, ... A position
            out of range yields NaN on the GPU and raises ArrayError on the CPU.
        interleaved: pair adjacent elements.
        rotary_dim: number of leading elements of a head that are rotated, even; the others are
            copied. Default: twice the number of columns of `cos`.
        inplace: write into `q` and `k`.
        out: the pair `(q_out, k_out)` to write into: dtype and shapes of `q` and `k`, any strides.
            They must not overlap the other arguments.

    Returns:
        `(q_out, k_out)`: `out`, or new C-contiguous arrays, or `q` and `k` themselves.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument; without `position_ids`,
            `seq_len` exceeds max_positions.
        ConfigError: an invalid option; `inplace` together with `out`.

    Runs on CuPy's current stream, in one launch; computes in float32; deterministic.
    Paper: Su et al., arXiv:2104.09864.

    >>> import numpy as np, cukit as ck
    >>> angle = np.array([[0.0], [np.pi / 2]], np.float32)
    >>> q = np.ones((1, 2, 1, 2), np.float32)
    >>> ck.rope(q, q, np.cos(angle), np.sin(angle))[0].reshape(2, 2).round(3)
    array([[ 1.,  1.],
           [-1.,  1.]], dtype=float32)
    """
    options = (position_ids, interleaved, rotary_dim, inplace)
    return _rotate("rope", q, k, cos, sin, *options, *_pair("rope", out))


def rope_backward(
    grad_q: Array,
    grad_k: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Gradient of :func:`rope`: the rotation by the opposite angle.

    Args:
        grad_q, grad_k: gradients of `q_out` and `k_out`; as `q` and `k` of the forward.
        cos, sin, position_ids, interleaved, rotary_dim: as in the forward.
        inplace: write into `grad_q` and `grad_k`.
        out: as in the forward, for the gradients of `q` and `k`.

    Returns:
        Gradients of `q` and `k`: `out`, or new C-contiguous arrays, or the arguments themselves.

    Raises:
        ArrayError, ConfigError: as :func:`rope`.
    """
    options = (position_ids, interleaved, rotary_dim, inplace)
    pair = _pair("rope_backward", out)
    return _rotate("rope_backward", grad_q, grad_k, cos, sin, *options, *pair)


def _pair(op: str, out: Any) -> tuple[Array | None, Array | None]:
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2:
        got = f"{len(out)} elements" if isinstance(out, tuple) else type(out).__name__
        raise ConfigError(f"{op}: out must be a pair of arrays, got {got}")
    return out


_REFERENCES = {"rope": reference.rope, "rope_backward": reference.rope_backward}


def _rotate(
    op: str,
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None,
    interleaved: bool,
    rotary_dim: int | None,
    inplace: bool,
    q_out: Array | None,
    k_out: Array | None,
) -> tuple[Array, Array]:
    q, k, cos, sin, position_ids, q_out, k_out = adopt(
        op, q, k, cos, sin, position_ids, q_out, k_out
    )
    check_flag(op, "inplace", inplace)
    if inplace:
        if q_out is not None:
            raise ConfigError(f"{op}: inplace=True and out are mutually exclusive")
        check_overlap(op, q, name="q", k=k, cos=cos, sin=sin)
        check_overlap(op, k, name="k", cos=cos, sin=sin)
    inputs = {"q": q, "k": k, "cos": cos, "sin": sin, "position_ids": position_ids}
    check_overlap(op, q_out, name="q_out", **inputs, k_out=k_out)
    check_overlap(op, k_out, name="k_out", **inputs)
    arrays = (q, k, cos, sin, position_ids, q_out, k_out)
    options = (interleaved, rotary_dim, inplace)
    if not runs_kernel(op, *arrays):
        _check(op, *arrays, *options)
        return _REFERENCES[op](
            q,
            k,
            cos,
            sin,
            position_ids,
            interleaved=interleaved,
            rotary_dim=rotary_dim,
            inplace=inplace,
            out=None if q_out is None else (q_out, k_out),
        )
    launch = _prepare(op, *arrays, *options)
    if q_out is None or k_out is None:
        q_out, k_out = (q, k) if inplace else (empty(q, q.shape), empty(k, k.shape))
    launch(q, k, cos, sin, position_ids, q_out, k_out)
    return q_out, k_out


@dataclass(frozen=True)
class RopeConfig:
    """The launch configuration: the split of a head over threads, and the heads per thread."""

    dtype: str
    vec: int
    half_vecs: int
    copy_vecs: int
    head_dim: int
    num_heads_q: int
    num_heads_k: int
    heads_per_thread: int
    interleaved: bool
    inverse: bool
    positions: int
    position_dtype: str
    index: str
    threads: int
    num_blocks: int

    def spec(self) -> KernelSpec:
        """The kernel variant for this configuration."""
        defines = (
            ("DTYPE", self.dtype),
            ("THREADS", self.threads),
            ("VEC", self.vec),
            ("HALF_VECS", self.half_vecs),
            ("COPY_VECS", self.copy_vecs),
            ("HEAD_DIM", self.head_dim),
            ("HEADS_Q", self.num_heads_q),
            ("HEADS_K", self.num_heads_k),
            ("HEADS_PER_THREAD", self.heads_per_thread),
            ("INTERLEAVED", self.interleaved),
            ("INVERSE", self.inverse),
            ("POSITIONS", self.positions),
            ("ID", self.position_dtype),
            ("INDEX", self.index),
        )
        return KernelSpec("layers/rope.cu", "rope", defines, self.threads)


@cache
def plan_rope(
    num_tokens: int,
    num_heads_q: int,
    num_heads_k: int,
    head_dim: int,
    rotary_dim: int,
    dtype: str,
    vec: int,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    inplace: bool = False,
    positions: int = 0,
    position_dtype: str = "int32",
    heads_per_thread: int = 2,
    threads: int = 128,
) -> RopeConfig:
    """The launch configuration. A thread processes several heads of a token with the same angles.

    vec: elements per access, a divisor of `rotary_dim / 2` and of `head_dim - rotary_dim`.
    positions: number of axes of `position_ids`, 0 if there are none.
    heads_per_thread, threads: for tuning.
    """
    heads = num_heads_q + num_heads_k
    heads_per_thread = max(1, min(heads, heads_per_thread))
    half_vecs = rotary_dim // 2 // vec
    copy_vecs = 0 if inplace else (head_dim - rotary_dim) // vec
    num_threads = num_tokens * -(-heads // heads_per_thread) * (half_vecs + copy_vecs)
    return RopeConfig(
        dtype=dtype,
        vec=vec,
        half_vecs=half_vecs,
        copy_vecs=copy_vecs,
        head_dim=head_dim,
        num_heads_q=num_heads_q,
        num_heads_k=num_heads_k,
        heads_per_thread=heads_per_thread,
        interleaved=interleaved,
        inverse=inverse,
        positions=positions,
        position_dtype=position_dtype,
        index=index_type(num_threads + threads),
        threads=threads,
        num_blocks=-(-num_threads // threads),
    )


def _check(
    op: str,
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None,
    q_out: Array | None,
    k_out: Array | None,
    interleaved: bool,
    rotary_dim: int | None,
    inplace: bool,
) -> None:
    check_flag(op, "interleaved", interleaved)
    check_flag(op, "inplace", inplace)
    check_array(op, "q", q, dtypes=FLOAT_DTYPES, ndim=4, contiguous=False)
    batch, seq_len, _, head_dim = q.shape
    check_array(op, "k", k, shape=(batch, seq_len, None, head_dim), contiguous=False)
    if q_out is not None and k_out is not None:
        check_array(op, "q_out", q_out, shape=q.shape, contiguous=False)
        check_array(op, "k_out", k_out, shape=k.shape, contiguous=False)
    check_same_dtype(op, q=q, k=k, q_out=q_out, k_out=k_out)
    max_positions, half = check_rotary_tables(op, cos, sin, head_dim)
    if rotary_dim is not None:
        check_integer(op, "rotary_dim", rotary_dim, least=2)
    if rotary_dim is not None and rotary_dim != 2 * half:
        raise ArrayShapeError(
            f"{op}: cos must have shape (any, rotary_dim / 2) = (any, {rotary_dim // 2}), "
            f"got {cos.shape}"
        )
    if position_ids is None:
        if seq_len > max_positions:
            raise ArrayShapeError(
                f"{op}: cos must have a row for each of the {seq_len} positions, got {cos.shape}"
            )
        return
    check_array(op, "position_ids", position_ids, dtypes=INDEX_DTYPES)
    shape = (seq_len,) if position_ids.ndim == 1 else (batch, seq_len)
    check_array(op, "position_ids", position_ids, dtypes=INDEX_DTYPES, shape=shape)


@launch_plan
def _prepare(
    op: str,
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None,
    q_out: Array | None,
    k_out: Array | None,
    interleaved: bool,
    rotary_dim: int | None,
    inplace: bool,
) -> Launch:
    arrays = (q, k, cos, sin, position_ids, q_out, k_out)
    _check(op, *arrays, interleaved, rotary_dim, inplace)
    check_array(op, "q", q, dtypes=KERNEL_DTYPES, ndim=4, contiguous=False)
    check_array(op, "cos", cos, dtypes=(float32,))
    check_array(op, "sin", sin, dtypes=(float32,))
    batch, seq_len, num_heads_q, head_dim = q.shape
    max_positions, half = cos.shape
    heads = [q, k] if q_out is None or k_out is None else [q, k, q_out, k_out]
    strides_in = strides_out = _element_strides(q), _element_strides(k)
    if q_out is not None and k_out is not None:
        strides_out = _element_strides(q_out), _element_strides(k_out)
    elif not inplace:
        strides_out = _contiguous_strides(q), _contiguous_strides(k)
    config = plan_rope(
        batch * seq_len,
        num_heads_q,
        k.shape[2],
        head_dim,
        2 * half,
        q.dtype.name,
        _vec(half, head_dim - 2 * half, (cos, sin), heads),
        interleaved=bool(interleaved),
        inverse=op == "rope_backward",
        inplace=bool(inplace),
        positions=0 if position_ids is None else position_ids.ndim,
        position_dtype="int32" if position_ids is None else position_ids.dtype.name,
    )
    parameters = _PARAMETERS.pack(
        q=strides_in[0],
        k=strides_in[1],
        q_out=strides_out[0],
        k_out=strides_out[1],
        num_tokens=batch * seq_len,
        seq_len=seq_len,
        max_positions=max_positions,
    )
    return Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))


def _element_strides(x: Array) -> tuple[int, ...]:
    """Strides of all axes but the last, in elements."""
    return tuple(stride // x.itemsize for stride in x.strides[:-1])


def _contiguous_strides(x: Array) -> tuple[int, ...]:
    """`_element_strides` of a C-contiguous array with the shape of `x`."""
    _, seq_len, num_heads, head_dim = x.shape
    return seq_len * num_heads * head_dim, num_heads * head_dim, head_dim


def _vec(half: int, rest: int, tables: tuple[Array, Array], arrays: Sequence[Array]) -> int:
    """The widest access to which all heads, all copied elements and all table rows are aligned."""
    strides = [stride for x in arrays for stride in _element_strides(x)]
    vec = access_width(math.gcd(half, rest, *strides), *arrays)
    table_vec = access_width(half, *tables)  # 8 elements of a table take two accesses
    return vec if min(vec, ACCESS_BYTES // tables[0].itemsize) <= table_vec else table_vec


def _specs(inverse: bool, device: Device) -> list[KernelSpec]:
    return [
        plan_rope(
            8192,
            32,
            8,
            128,
            128,
            dtype.name,
            ACCESS_BYTES // dtype.itemsize,
            inverse=inverse,
            interleaved=interleaved,
            inplace=inplace,
            positions=2 if interleaved else 0,
        ).spec()
        for dtype in KERNEL_DTYPES
        for interleaved in (False, True)
        for inplace in (False, True)
    ]


register(
    name="rope",
    family="layers",
    function=rope,
    reference=reference.rope,
    specs=partial(_specs, False),
)
register(
    name="rope_backward",
    family="layers",
    function=rope_backward,
    reference=reference.rope_backward,
    specs=partial(_specs, True),
)
