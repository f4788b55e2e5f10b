"""Exact attention that never writes the score matrix."""

from __future__ import annotations

import numpy as np

from cukit.attention.flash_arguments import (
    check_forward,
    check_kernel_layout,
    fits_tensor_maps,
    problem_of,
    scales_of,
    strides_of,
)
from cukit.attention.flash_maps import MappedLaunch
from cukit.attention.flash_plan import (
    AttentionProblem,
    FlashAttentionConfig,
    plan_flash_attention,
    representative_specs,
)
from cukit.attention.flash_plan_sm90 import (
    WarpgroupForwardConfig,
    covers,
    plan_flash_attention_sm90,
    specs_of,
)
from cukit.core.arrays import Array, adopt, empty, runs_kernel, write_out
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.reference import attention as reference
from cukit.registry import register


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Attention: `out = softmax(scale * q k^T + mask) v` for every head.

    Query head `h` uses key head `h // (num_heads_q // num_heads_kv)` (MHA, GQA, MQA). The causal
    mask is aligned bottom right: key `j` is visible to query `i` where
    `j <= seq_len_kv - seq_len_q + i`. A query that sees no key gets zeros, and -inf as its lse.

    Args:
        q: float16|bfloat16 [batch, seq_len_q, num_heads_q, head_dim]; on the CPU float32|float64
            too. Any strides with a contiguous last axis, e.g. a transposed view of
            [batch, heads, seq, head_dim] or a slice of a fused projection; on the GPU, strides and
            start are multiples of 16 bytes.
        k: as q, [batch, seq_len_kv, num_heads_kv, head_dim]; num_heads_kv divides num_heads_q.
        v: as k.
        causal: hide the future.
        scale: positive factor of the scores; 1 / sqrt(head_dim) where omitted.
        return_lse: return the log-sum-exp too, which the backward needs.
        out: where to write; dtype and shape of q, strides as for q. It must not overlap the inputs.

    head_dim is a multiple of 8 up to 256 on the GPU; 64, 96, 128 and 256 run without padding.

    Returns:
        `out` like q; with `return_lse` the pair `(out, lse)`, lse float32
        [batch, num_heads_q, seq_len_q], natural logarithm (float64 for float64 inputs).

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: a scale that is not positive and finite.

    Runs on CuPy's current stream, accumulates in float32, is deterministic. On Hopper, arrays whose
    strides are positive are read by the copy engine; a set of addresses seen for the first time
    costs the host about 50 us more, for three tensor maps.
    Papers: Dao, FlashAttention-2, arXiv:2307.08691; Shah et al., FlashAttention-3,
    arXiv:2407.08608.

    >>> import numpy as np, cukit as ck
    >>> q = np.zeros((1, 2, 1, 8), np.float32)
    >>> kv = np.arange(16, dtype=np.float32).reshape(1, 2, 1, 8)
    >>> ck.flash_attention(q, kv, kv, causal=True)[0, :, 0, :2]
    array([[0., 1.],
           [4., 5.]], dtype=float32)
    """
    q, k, v, out = adopt("flash_attention", q, k, v, out)
    if not runs_kernel("flash_attention", q, k, v, out):
        check_forward(q, k, v, out, scale)
        result = reference.flash_attention(
            q, k, v, causal=causal, scale=scale, return_lse=return_lse
        )
        if not return_lse:
            return write_out(out, result)
        return write_out(out, result[0]), result[1]
    launch = _prepare_forward(q, k, v, out, bool(causal), scale)
    if out is None:
        out = empty(q, q.shape)
    batch, seq_len_q, num_heads_q, _ = q.shape
    lse = empty(q, (batch, num_heads_q, seq_len_q), np.float32)
    launch(q, k, v, out, lse)
    return (out, lse) if return_lse else out


@launch_plan
def _prepare_forward(
    q: Array, k: Array, v: Array, out: Array | None, causal: bool, scale: float | None
) -> Launch | MappedLaunch:
    check_forward(q, k, v, out, scale)
    check_kernel_layout("flash_attention", q=q, k=k, v=v, out=out)
    problem, device = problem_of(q, k, causal), current_device()
    mapped = covers(problem, device) and fits_tensor_maps(q, k, v)
    config: FlashAttentionConfig | WarpgroupForwardConfig
    if mapped:
        config = plan_flash_attention_sm90(problem, device)
    else:
        config = plan_flash_attention(problem, device)
    strides = () if mapped else (*strides_of(q, q), *strides_of(k, k), *strides_of(v, v))
    scalars = (
        *strides,
        *strides_of(out, q),
        np.int32(problem.batch),
        np.int32(problem.num_heads_q),
        np.int32(problem.group),
        np.int32(problem.seq_len_q),
        np.int32(problem.seq_len_kv),
        np.int32(problem.head_dim),
        *(() if isinstance(config, WarpgroupForwardConfig) else (np.int32(config.section),)),
        scales_of(q, scale)[1],
    )
    launch = Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)
    if isinstance(config, WarpgroupForwardConfig):
        return MappedLaunch(launch, config.tiling)
    return launch


def _forward_specs(device: Device) -> list[KernelSpec]:
    def specs(problem: AttentionProblem) -> list[KernelSpec]:
        chosen = [plan_flash_attention(problem, device).spec()]
        if covers(problem, device):
            chosen += specs_of(problem, device)
        return chosen

    return representative_specs(specs)


register(
    name="flash_attention",
    family="attention",
    function=flash_attention,
    reference=reference.flash_attention,
    specs=_forward_specs,
)
