"""Merging attention over two disjoint sets of keys."""

from __future__ import annotations

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_addresses,
    check_array,
    check_same_dtype,
    empty,
    float32,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.errors import ArrayShapeError
from cukit.reference import paged_attention as reference
from cukit.registry import register

_OP = "merge_attention_states"
_THREADS = 256
_VEC = 8
_VECS_PER_THREAD = 2
_MAX_VECS = 2**31
"""The kernel computes indices in 32 bits."""


def merge_attention_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array
) -> tuple[Array, Array]:
    """Attention over two sets of keys, a and b, from the `(out, lse)` of each.

        lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    Args:
        out_a: float16|bfloat16 [batch, seq_len_q, num_heads, head_dim], C-contiguous and 16-byte
            aligned, head_dim a multiple of 8; on the CPU float32|float64, any address, strides and
            head_dim too.
        lse_a: float32 [batch, num_heads, seq_len_q] (float64 for float64), natural logarithm, as
            `return_lse` returns it; -inf for a query without keys, whose output is then ignored.
        out_b: as out_a.
        lse_b: as lse_a.

    Returns:
        `(out, lse)`; zeros and -inf where a query has no keys on either side.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.

    Runs on CuPy's current stream, computes in float32 and is deterministic.
    Paper: Ye et al., FlashInfer, arXiv:2501.01005.

    >>> import numpy as np, cukit as ck
    >>> out, lse = np.ones((2, 1, 1, 1, 8), np.float32), np.zeros((2, 1, 1, 1), np.float32)
    >>> ck.merge_attention_states(out[0], lse[0], 3 * out[1], lse[1])[0][0, 0, 0, :2]
    array([2., 2.], dtype=float32)
    """
    out_a, lse_a, out_b, lse_b = arrays = adopt(_OP, out_a, lse_a, out_b, lse_b)
    if not runs_kernel(_OP, *arrays):
        _check(*arrays, contiguous=False)
        return reference.merge_attention_states(*arrays)
    launch = _prepare(*arrays)
    out, lse = empty(out_a, out_a.shape), empty(lse_a, lse_a.shape)
    if out.size:
        launch(*arrays, out, lse)
    return out, lse


def merge_shared_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, out: Array, lse: Array, shared: int
) -> None:
    """merge_attention_states where `a` covers keys that `shared` neighbouring requests share: lse_a
    is [batch / shared, num_heads, shared * seq_len_q].

    out, lse: output arrays; they must not overlap the inputs.
    """
    _prepare(out_a, lse_a, out_b, lse_b, shared)(out_a, lse_a, out_b, lse_b, out, lse)


def _check(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    contiguous: bool = True,
    shared: int = 1,
) -> None:
    check_array(_OP, "out_a", out_a, dtypes=FLOAT_DTYPES, ndim=4, contiguous=contiguous)
    batch, seq, heads, _ = out_a.shape
    check_array(_OP, "out_b", out_b, dtypes=FLOAT_DTYPES, shape=out_a.shape, contiguous=contiguous)
    check_same_dtype(_OP, out_a=out_a, out_b=out_b)
    exact = np.dtype(np.float64) if out_a.dtype == np.float64 else float32
    for name, lse, count in (("lse_a", lse_a, shared), ("lse_b", lse_b, 1)):
        shape = (batch // count, heads, count * seq)
        check_array(_OP, name, lse, dtypes=(exact,), shape=shape, contiguous=contiguous)


@launch_plan
def _prepare(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, shared: int = 1) -> Launch:
    _check(out_a, lse_a, out_b, lse_b, shared=shared)
    check_array(_OP, "out_a", out_a, dtypes=KERNEL_DTYPES[1:])
    check_addresses(_OP, out_a=out_a, out_b=out_b)
    _, seq, heads, head_dim = out_a.shape
    if head_dim % _VEC:
        raise ArrayShapeError(
            f"{_OP}: head_dim (the last axis of out_a) must be a multiple of {_VEC} on the GPU, "
            f"got {head_dim}"
        )
    vecs = out_a.size // _VEC
    if vecs > _MAX_VECS:
        raise ArrayShapeError(
            f"{_OP}: out_a may have at most {_MAX_VECS * _VEC} elements, got {out_a.size}"
        )
    extents = (head_dim // _VEC, heads, seq, *((shared,) if shared > 1 else ()))
    scalars = tuple(map(np.uint32, (vecs, *extents)))
    blocks = -(-vecs // (_THREADS * _VECS_PER_THREAD)) or 1
    return Launch(load_kernel(_spec(out_a.dtype.name, shared > 1)), (blocks,), scalars)


def _spec(dtype: str, shared: bool = False) -> KernelSpec:
    defines: tuple[tuple[str, str | int], ...] = (
        ("DTYPE", dtype), ("THREADS", _THREADS), ("VECS", _VECS_PER_THREAD),
    )  # fmt: skip
    if shared:
        defines += (("SHARED", 1),)
    return KernelSpec("attention/merge_attention_states.cu", _OP, defines, _THREADS)


def merge_specs(device: Device) -> list[KernelSpec]:
    """All variants of the kernel."""
    return [_spec(dtype.name, shared) for dtype in KERNEL_DTYPES[1:] for shared in (False, True)]


register(
    name=_OP,
    family="attention",
    function=merge_attention_states,
    reference=reference.merge_attention_states,
    specs=merge_specs,
)
