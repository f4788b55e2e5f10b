"""Attention with a block mask (block-sparse attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.attention.flash._arguments import (
    ScoreArrays,
    ScoreOptions,
    check_forward,
    check_kernel_layout,
    fits_tensor_maps,
    lse_shape,
    problem_of,
    score_options,
)
from cukit.attention.flash._flash_launch_sm90 import MappedForward, MappedLaunch, mapped_forward
from cukit.attention.flash._flash_plan import plan_flash_attention
from cukit.attention.flash._flash_plan_sm90 import BlockSize, covers, plan_flash_attention_sm90
from cukit.attention.flash._problem import AttentionProblem, Window, ceil_div
from cukit.attention.flash.flash import flash_attention
from cukit.core.arrays import Array, adopt, check_array, empty, runs_kernel, write_out
from cukit.core.device import Device
from cukit.core.kernel import NULL, KernelSpec, launch_plan
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_flag, check_integer
from cukit.errors import ArrayShapeError
from cukit.reference import block_sparse_attention as reference
from cukit.registry import register

_OP = "block_sparse_attention"


def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    block_mask: Array,
    *,
    block_size: int | BlockSize = 128,
    causal: bool = False,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`flash_attention` restricted to the score blocks that `block_mask` marks as visible.

    Args:
        q: float16|bfloat16 [batch, seq_len_q, num_heads_q, head_dim]; strides as in
            flash_attention.
        k: as q, [batch, seq_len_kv, num_heads_kv, head_dim]; num_heads_kv divides num_heads_q.
        v: as k; its head_dim may differ.
        block_mask: bool [query blocks, key blocks], or [1 or num_heads_q, query blocks, key
            blocks], C-contiguous. Blocks are counted from the start of the sequences; the last one
            may be partial.
        block_size: queries and keys per block: one number for both, or a pair.
        causal, window_size, softcap, alibi_slopes, sinks, bias, scale, return_lse, out: as in
            flash_attention; they apply within the visible blocks.

    Returns:
        `out`, or the pair `(out, lse)`, as flash_attention. A fully masked query gets zeros.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: invalid value of an option.

    On Hopper, fully masked tiles are skipped; a tile with any visible block is computed in full. A
    tile has 128 queries and 128 keys, with these exceptions: 64 keys if blocks have fewer than 128
    keys or v's head_dim is above 192; else 80 keys if q's head_dim is above 192; else 112 keys if
    v's head_dim is above 128. On other GPUs, block_mask is expanded to one element per score, which
    saves no time.
    Runs on CuPy's current stream, accumulates in float32 and is deterministic.

    >>> import numpy as np, cukit as ck
    >>> q = np.zeros((1, 4, 1, 8), np.float32)
    >>> kv = np.arange(32, dtype=np.float32).reshape(1, 4, 1, 8)
    >>> mask = np.array([[True, False], [True, True]])
    >>> ck.block_sparse_attention(q, kv, kv, mask, block_size=2)[0, :, 0, 0]
    array([ 4.,  4., 12., 12.], dtype=float32)
    """
    q, k, v, block_mask, out, alibi_slopes, sinks, bias = adopt(
        _OP, q, k, v, block_mask, out, alibi_slopes, sinks, bias
    )
    arrays = ScoreArrays(alibi_slopes, sinks, bias, None, None, None)
    options = score_options(_OP, causal, window_size, softcap, scale, None, None)
    size = _pair(block_size)
    check_flag(_OP, "return_lse", return_lse)
    if not runs_kernel(_OP, q, k, v, block_mask, out, *arrays):
        _check(q, k, v, block_mask, size, out, options, arrays)
        check_overlap(_OP, out, q=q, k=k, v=v, block_mask=block_mask, **arrays._asdict())
        result = reference.block_sparse_attention(
            q, k, v, block_mask, block_size=size, return_lse=return_lse, **_named(options, arrays)
        )
        if not return_lse:
            return write_out(out, result)
        return write_out(out, result[0]), result[1]
    launch = _prepare(q, k, v, block_mask, out, size, options, alibi_slopes, sinks, bias)
    if launch is None:
        blocks = block_mask if block_mask.ndim == 3 else block_mask[None]
        mask = reference.expand_blocks(blocks, size, q.shape[1], k.shape[1])
        return flash_attention(
            q, k, v, mask=mask, return_lse=return_lse, out=out, **_named(options, arrays)
        )
    check_overlap(_OP, out, q=q, k=k, v=v, block_mask=block_mask, **arrays._asdict())
    if out is None:
        out = empty(q, (*q.shape[:-1], v.shape[-1]))
    lse = empty(q, lse_shape(q), np.float32) if return_lse else NULL
    launch(q, k, v, out, lse, *arrays, block_mask=block_mask)
    return (out, lse) if return_lse else out


def _named(options: ScoreOptions, arrays: ScoreArrays) -> dict[str, Any]:
    """The keyword arguments of flash_attention and its reference, without the mask."""
    values = options._asdict() | arrays._asdict()
    return {name: value for name, value in values.items() if name != "mask"}


def _pair(block_size: int | BlockSize) -> BlockSize:
    pair = isinstance(block_size, Sequence) and len(block_size) == 2
    sizes: Any = block_size if pair else (block_size, block_size)
    for size in sizes:
        check_integer(_OP, "block_size (one or two)", size, least=1)
    return int(sizes[0]), int(sizes[1])


def _check(
    q: Array,
    k: Array,
    v: Array,
    block_mask: Array,
    size: BlockSize,
    out: Array | None,
    options: ScoreOptions,
    arrays: ScoreArrays,
) -> None:
    check_forward(_OP, q, k, v, out, options, arrays)
    check_array(_OP, "block_mask", block_mask, dtypes=(np.dtype(bool),))
    blocks = (ceil_div(q.shape[1], size[0]), ceil_div(k.shape[1], size[1]))
    if block_mask.shape not in (blocks, (1, *blocks), (q.shape[2], *blocks)):
        raise ArrayShapeError(
            f"{_OP}: block_mask must be {blocks}, optionally with a leading axis of 1 or "
            f"num_heads_q = {q.shape[2]}, got {block_mask.shape}"
        )


@launch_plan
def _prepare(
    q: Array,
    k: Array,
    v: Array,
    block_mask: Array,
    out: Array | None,
    size: BlockSize,
    options: ScoreOptions,
    alibi_slopes: Array | None,
    sinks: Array | None,
    bias: Array | None,
) -> MappedLaunch | None:
    arrays = ScoreArrays(alibi_slopes, sinks, bias, None, None, None)
    _check(q, k, v, block_mask, size, out, options, arrays)
    check_kernel_layout(_OP, q=q, k=k, v=v, out=out)
    problem = problem_of(q, k, v, options, arrays, rounded=True)
    mapped: MappedForward | None = None
    if fits_tensor_maps(q, k, v):
        mapped = mapped_forward(problem, size)
    if mapped is None:
        return None
    heads = block_mask.shape[0] if block_mask.ndim == 3 else 1
    return mapped.launch(q, k, v, out, options, arrays, heads)


def _specs(device: Device) -> list[KernelSpec]:
    problems = [
        AttentionProblem(1, 16384, 16384, 16, 16, head_dim, dtype, causal)
        for head_dim, dtype, causal in (
            (64, "bfloat16", False),
            (64, "float16", False),
            (128, "bfloat16", False),
            (128, "bfloat16", True),
        )
    ]
    if not covers(problems[0], device):
        return [plan_flash_attention(each, device).spec() for each in problems[:2]]
    configs = [plan_flash_attention_sm90(each, device, (128, 128)) for each in problems]
    return [spec for each in configs for spec in (each.spec(), each.plan_spec()) if spec]


register(
    name=_OP,
    family="attention",
    function=block_sparse_attention,
    reference=reference.block_sparse_attention,
    specs=_specs,
)
