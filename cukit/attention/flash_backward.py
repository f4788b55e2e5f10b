"""The gradients of exact attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukit.attention.flash_arguments import (
    check_backward,
    check_kernel_layout,
    problem_of,
    scales_of,
    strides_of,
)
from cukit.attention.flash_plan import (
    plan_flash_attention_backward,
    representative_specs,
)
from cukit.core.arrays import Array, adopt, empty, runs_kernel
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.reference import attention as reference
from cukit.registry import register


def flash_attention_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`~cukit.attention.flash.flash_attention`.

    Args:
        grad_out: gradient of `out`; dtype, shape and strides as for q.
        q: as in the forward.
        k: as in the forward.
        v: as in the forward.
        out: what the forward returned; strides as for q.
        lse: what the forward returned, C-contiguous.
        causal: as in the forward.
        scale: as in the forward.
        deterministic: sum grad_q in a fixed order, at the price of two more matrix products (about
            30 % more time). Otherwise its last bits vary from run to run, because blocks add to it
            in float32 in the order in which they happen to finish.

    Returns:
        `(grad_q, grad_k, grad_v)`, C-contiguous, dtypes and shapes of q, k and v. grad_k and grad_v
        are summed over the query heads of a group in a fixed order, always.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: a scale that is not positive and finite.

    Runs on CuPy's current stream and accumulates in float32. Scratch: two float32 a query and head,
    and, unless deterministic, a float32 copy of grad_q.
    Paper: Dao, FlashAttention-2, arXiv:2307.08691.

    >>> import numpy as np, cukit as ck
    >>> q, k, v = (np.random.rand(1, 3, 2, 8).astype(np.float32) for _ in range(3))
    >>> out, lse = ck.flash_attention(q, k, v, return_lse=True)
    >>> grads = ck.flash_attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> grads[2].sum(axis=1)[0, 0].round(3).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """
    grad_out, q, k, v, out, lse = adopt("flash_attention_backward", grad_out, q, k, v, out, lse)
    if not runs_kernel("flash_attention_backward", grad_out, q, k, v, out, lse):
        check_backward(grad_out, q, k, v, out, lse, scale)
        return reference.flash_attention_backward(
            grad_out, q, k, v, out, lse, causal=causal, scale=scale, deterministic=deterministic
        )
    steps = _prepare_backward(grad_out, q, k, v, out, lse, bool(causal), scale, bool(deterministic))
    statistics = empty(q, (2, *steps.scratch_rows), np.float32)
    lse_log2, delta = statistics[0], statistics[1]
    grad_q, grad_k, grad_v = (empty(x, x.shape) for x in (q, k, v))
    # The deterministic path has no sum; a pointer has to be passed all the same.
    total = delta if deterministic else empty(q, (*steps.scratch_rows, steps.width), np.float32)
    sums = [grad_k, grad_v]
    if steps.splits > 1:
        batch, seq_len_kv, num_heads_kv, head_dim = k.shape
        shape = (batch, seq_len_kv, num_heads_kv, steps.splits, head_dim)
        sums = [empty(k, shape, np.float32) for _ in range(2)]

    steps.prepare(out, grad_out, lse, lse_log2, delta, total)
    steps.keys(q, k, v, grad_out, lse_log2, delta, total, *sums)
    if steps.sum is not None:
        steps.sum(sums[0], grad_k)
        steps.sum(sums[1], grad_v)
    if deterministic:
        steps.queries(q, k, v, grad_out, lse_log2, delta, grad_q)
    else:
        steps.queries(total, grad_q)
    return grad_q, grad_k, grad_v


class _BackwardSteps(NamedTuple):
    """The launches of a backward, and the extents of its scratch."""

    prepare: Launch
    keys: Launch
    sum: Launch | None
    queries: Launch
    scratch_rows: tuple[int, int]
    width: int
    splits: int


@launch_plan
def _prepare_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    causal: bool,
    scale: float | None,
    deterministic: bool,
) -> _BackwardSteps:
    check_backward(grad_out, q, k, v, out, lse, scale)
    check_kernel_layout("flash_attention_backward", grad_out=grad_out, q=q, k=k, v=v, out=out)
    problem = problem_of(q, k, causal)
    config = plan_flash_attention_backward(problem, deterministic, current_device())
    padded = config.seq_len_q_padded
    factor, factor_log2 = scales_of(q, scale)
    batch, heads_q = np.int32(problem.batch), np.int32(problem.num_heads_q)
    group, seq_q, seq_kv = (
        np.int32(n) for n in (problem.group, problem.seq_len_q, problem.seq_len_kv)
    )
    width, seq_q_padded = np.int32(problem.head_dim), np.int32(padded)
    strides = (*strides_of(q, q), *strides_of(k, k), *strides_of(v, v), *strides_of(grad_out, q))

    splits = config.splits
    scalars: tuple[Any, ...]
    prepare = Launch(
        load_kernel(config.prepare_spec()),
        (config.prepare_blocks,),
        (
            *(*strides_of(out, q), *strides_of(grad_out, q)),
            *(batch, heads_q, seq_q, seq_q_padded, width),
        ),
    )
    keys = Launch(
        load_kernel(config.keys_spec()),
        (config.key_blocks,),
        (
            *(*strides, batch, np.int32(problem.num_heads_kv * splits)),
            *(np.int32(problem.group // splits), np.int32(splits)),
            *(seq_q, seq_kv, seq_q_padded, width, np.int32(config.key_section)),
            *(factor, factor_log2),
        ),
    )
    add_splits = None
    if splits > 1:
        rows_kv = np.int64(problem.batch * problem.seq_len_kv * problem.num_heads_kv)
        scalars = (rows_kv, np.int32(splits), width)
        add_splits = Launch(load_kernel(config.sum_spec()), (config.sum_blocks,), scalars)
    if deterministic:
        scalars = (
            *(*strides, batch, heads_q, group, seq_q, seq_kv, seq_q_padded, width),
            *(np.int32(config.query_section), factor, factor_log2),
        )
    else:
        scalars = (heads_q, seq_q, seq_q_padded, width, factor)
    queries = Launch(load_kernel(config.specs()[-1]), (config.query_blocks,), scalars)
    rows = (problem.batch * problem.num_heads_q, padded)
    return _BackwardSteps(prepare, keys, add_splits, queries, rows, problem.width, splits)


def _backward_specs(device: Device) -> list[KernelSpec]:
    return representative_specs(
        lambda problem: [
            spec
            for deterministic in (False, True)
            for spec in plan_flash_attention_backward(problem, deterministic, device).specs()
        ]
    )


register(
    name="flash_attention_backward",
    family="attention",
    function=flash_attention_backward,
    reference=reference.flash_attention_backward,
    specs=_backward_specs,
)
