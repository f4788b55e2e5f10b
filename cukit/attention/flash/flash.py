"""Exact attention without materialising the score matrix."""

from __future__ import annotations

from functools import partial

import numpy as np

from cukit.attention.flash._arguments import (
    PARAMETERS,
    ScoreArrays,
    ScoreOptions,
    check_forward,
    check_kernel_layout,
    check_sequence_ends,
    dense_strides,
    fits_tensor_maps,
    forward_plan_key,
    lse_shape,
    problem_of,
    refuse_dropout,
    scales_of,
    score_options,
    score_settings,
    score_shape,
    strides_of,
)
from cukit.attention.flash._flash_fp8 import attend_float8, decode_inputs
from cukit.attention.flash._flash_launch_sm90 import (
    MappedCall,
    MappedForward,
    MappedLaunch,
    mapped_forward,
)
from cukit.attention.flash._flash_plan import (
    FlashAttentionConfig,
    plan_flash_attention,
    representative_specs,
)
from cukit.attention.flash._flash_plan_sm90 import covers, float8_specs, specs_of
from cukit.attention.flash._problem import AttentionProblem, Window
from cukit.core.arrays import Array, adopt, empty, runs_kernel, write_out
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, Kernel, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.quantized_array import is_float8
from cukit.core.scalars import check_flag
from cukit.errors import ConfigError
from cukit.reference import attention as reference
from cukit.registry import register

_OP = "flash_attention"


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    precise: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    dropout: float = 0.0,
) -> Array | tuple[Array, Array]:
    """Attention: `out = softmax(score) v` for every head, with, in this order,

        score = scale * q k^T;  softcap * tanh(score / softcap);  - slope * |i + offset - j|;
        + bias;  -inf where key j is masked for query i      (offset = seq_len_kv - seq_len_q)

    Query head `h` uses KV head `h // (num_heads_q // num_heads_kv)` (MHA, GQA, MQA). Masks are
    aligned bottom right: the diagonal key of query `i` is `i + offset`. A fully masked query gets
    zeros, and -inf as its lse (with sinks, the sink's score).

    Args:
        q: float16|bfloat16 [batch, seq_len_q, num_heads_q, head_dim]; on the CPU float32|float64
            too. Any strides with a contiguous last axis, e.g. a transposed view of
            [batch, heads, seq, head_dim] or a slice of a fused projection; on the GPU, strides and
            start address are multiples of 16 bytes, and the row stride is below 2^26 elements.
        k: as q, [batch, seq_len_kv, num_heads_kv, head_dim]; num_heads_kv divides num_heads_q.
        v: as k; its head_dim may differ.
        causal: mask keys right of the diagonal.
        window_size: (left, right), visible keys on each side of the diagonal key; None: all.
        softcap: positive bound on the magnitude of the scores.
        alibi_slopes: float32 [num_heads_q] or [batch, num_heads_q].
        sinks: float32 [num_heads_q], one score per head, whose exponential is added to the softmax
            denominator.
        bias: dtype of q or float32, broadcastable to [batch, num_heads_q, seq_len_q, seq_len_kv],
            any strides.
        mask: bool, as bias; True is visible.
        cu_seqlens_q: int32 [num_sequences + 1], for packed variable-length sequences, possibly
            empty: sequence b is rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of
            q [total_q, num_heads_q, head_dim]. For bias, mask and slopes the batch is
            num_sequences, and seq_len_q, seq_len_kv are max_seqlen_q, max_seqlen_kv.
        cu_seqlens_kv: the same for k and v [total_kv, num_heads_kv, head_dim]; both or neither.
        max_seqlen_q: at least the longest sequence of q; needed with cu_seqlens.
        max_seqlen_kv: the same for k and v.
        q_descale: factor of FP8 inputs: a positive number, or float32 [], [num_heads_kv] or
            [batch, num_heads_kv]; with cu_seqlens the batch is num_sequences.
        k_descale: as q_descale.
        v_descale: as q_descale; any sign.
        precise: with FP8 inputs, keep the probabilities in 16 bits.
        scale: positive factor of the scores; default 1 / sqrt(head_dim).
        return_lse: also return the log-sum-exp, which the backward needs.
        out: output array; dtype of q, shape of q with v's head_dim, strides as for q. It must not
            overlap the inputs.
        dropout: must be 0: attention dropout is not supported.

    On the GPU, head_dim is a multiple of 8 up to 256; 64, 96, 128, 192 and 256 run without padding,
    on Hopper every multiple of 16.

    q, k and v may be QuantizedArrays of float8_e4m3 without scales (storage with any strides as
    above); out is then bfloat16, or has the dtype of `out`. On Hopper they are multiplied in FP8 if
    head_dim and v's are multiples of 16. The probabilities are then rounded to FP8 too, which alone
    causes an error of 2 to 3 %; `precise` rounds them to float16, which is slower and leaves only
    the rounding of out. In all other cases the inputs are decoded first, to out's dtype.

    Returns:
        `out`, like q with v's head_dim; with `return_lse` the pair `(out, lse)`. lse is the natural
        log-sum-exp of the scores, float32 (float64 for float64 inputs) [batch, num_heads_q,
        seq_len_q] or, with cu_seqlens, [num_heads_q, total_q].

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value. The contents of cu_seqlens are checked on the CPU only.

    Runs on CuPy's current stream, accumulates in float32 and is deterministic. On Hopper, arrays
    with positive strides are read by TMA; the first call with new addresses takes about 25 us more
    on the host, to encode three tensor maps, and the first with new lengths about 50 us.
    Papers: Dao, FlashAttention-2, arXiv:2307.08691; Shah et al., FlashAttention-3,
    arXiv:2407.08608; Press et al., ALiBi, arXiv:2108.12409; Xiao et al., attention sinks,
    arXiv:2309.17453.

    >>> import numpy as np, cukit as ck
    >>> q = np.zeros((1, 2, 1, 8), np.float32)
    >>> kv = np.arange(16, dtype=np.float32).reshape(1, 2, 1, 8)
    >>> ck.flash_attention(q, kv, kv, causal=True)[0, :, 0, :2]
    array([[0., 1.],
           [4., 5.]], dtype=float32)
    """
    out, *given = adopt(_OP, out, alibi_slopes, sinks, bias, mask, cu_seqlens_q, cu_seqlens_kv)
    arrays = ScoreArrays(*given)
    options = score_options(_OP, causal, window_size, softcap, scale, max_seqlen_q, max_seqlen_kv)
    refuse_dropout(_OP, dropout)
    check_flag(_OP, "precise", precise)
    check_flag(_OP, "return_lse", return_lse)
    if is_float8(q, k, v):
        descales = (q_descale, k_descale, v_descale)
        attended = attend_float8(q, k, v, descales, options, arrays, out, bool(precise), return_lse)
        if attended is not None:
            return attended if return_lse else attended[0]
        q, k, v = decode_inputs(q, k, v, descales, options, arrays, out)
    elif not (q_descale is k_descale is v_descale is None):
        _refuse_descales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    q, k, v = adopt(_OP, q, k, v)
    if not runs_kernel(_OP, q, k, v, out, *arrays):
        check_forward(_OP, q, k, v, out, options, arrays)
        check_sequence_ends(_OP, q, k, options, arrays)
        check_overlap(_OP, out, q=q, k=k, v=v, **arrays._asdict())
        result = reference.flash_attention(
            q, k, v, **options._asdict(), **arrays._asdict(), return_lse=return_lse
        )
        if not return_lse:
            return write_out(out, result)
        return write_out(out, result[0]), result[1]
    launch, out_shape, row_shape = _prepare_forward(q, k, v, out, options, *arrays)
    check_overlap(_OP, out, q=q, k=k, v=v, **arrays._asdict())
    if arrays.varlen:
        check_sequence_ends(_OP, q, k, options, arrays)
    if out is None:
        out = empty(q, out_shape)
    lse = empty(q, row_shape, np.float32) if return_lse else NULL
    launch(q, k, v, out, lse, *arrays)
    return (out, lse) if return_lse else out


def _refuse_descales(q: Array, **descales: Array | None) -> None:
    name = next(name for name, descale in descales.items() if descale is not None)
    given = getattr(q, "dtype", type(q).__name__)
    raise ConfigError(f"{_OP}: {name} is for float8 inputs, got {given}")


Shape = tuple[int, ...]


def _planned_forward(
    q: Array, k: Array, v: Array, out: Array | None, options: ScoreOptions, *given: Array | None
) -> MappedCall | tuple[FlashAttentionConfig, Kernel]:
    """Checks a call and plans it, for all lengths that round to the same values."""
    arrays = ScoreArrays(*given)
    check_forward(_OP, q, k, v, out, options, arrays)
    check_kernel_layout(_OP, q=q, k=k, v=v, out=out)
    problem = problem_of(q, k, v, options, arrays, rounded=True)
    mapped: MappedForward | None = None
    if fits_tensor_maps(q, k, v):
        mapped = mapped_forward(problem)
    if mapped is not None:
        return MappedCall(mapped, q, k, options, arrays)
    config = plan_flash_attention(problem, current_device())
    return config, load_kernel(config.spec())


@partial(launch_plan, plan=_planned_forward, shorten=forward_plan_key)
def _prepare_forward(
    planned: MappedCall | tuple[FlashAttentionConfig, Kernel],
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    options: ScoreOptions,
    *given: Array | None,
) -> tuple[Launch | MappedLaunch, Shape, Shape]:
    """The launch, and the shapes of out and lse."""
    arrays = ScoreArrays(*given)
    shapes = (*q.shape[:-1], v.shape[-1]), lse_shape(q)
    if isinstance(planned, MappedCall):
        return planned.launch(q, k, v, out, options, arrays), *shapes
    config, kernel = planned
    shape = score_shape(q, k, options, arrays)
    batch, heads_q, seq_len_q, seq_len_kv = shape
    parameters = parameter_structs(PARAMETERS)["ForwardParameters"].pack(
        q=strides_of(q),
        k=strides_of(k),
        v=strides_of(v),
        out=dense_strides(shapes[0]) if out is None else strides_of(out),
        batch=batch,
        heads_q=heads_q,
        group=config.problem.group,
        seq_q=seq_len_q,
        seq_kv=seq_len_kv,
        head_dim=config.problem.head_dim,
        value_dim=config.problem.head_dim_v,
        raster_group_heads=config.raster_group,
        scale_log2=scales_of(q, options)[1],
        settings=score_settings(q, options, arrays, shape),
    )
    return Launch(kernel, (config.num_blocks(seq_len_q),), (parameters,)), *shapes


def _forward_specs(device: Device) -> list[KernelSpec]:
    def specs(problem: AttentionProblem) -> list[KernelSpec]:
        chosen = [plan_flash_attention(problem, device).spec()]
        if covers(problem, device):
            chosen += specs_of(problem, device)
        return chosen

    return representative_specs(specs) + float8_specs(device)


register(
    name=_OP,
    family="attention",
    function=flash_attention,
    reference=reference.flash_attention,
    specs=_forward_specs,
)
