"""Multi-head latent attention (MLA) over paged latents, and the preparation of its inputs."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.flash._arguments import (
    PARAMETERS,
    ScoreArrays,
    scales_of,
    score_options,
    score_settings,
)
from cukit.attention.paged._mla_plan import BLOCK_SIZE, MlaConfig, plan_mla_attention
from cukit.attention.paged._paged_arguments import check_table, step_key
from cukit.core.arrays import (
    ACCESS_BYTES,
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_addresses,
    check_array,
    check_same_dtype,
    empty,
    float32,
    int32,
    is_contiguous,
    namespace,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import (
    NULL,
    KernelSpec,
    Launch,
    Launches,
    by_value,
    int32s,
    launch_plan,
    load_kernel,
)
from cukit.core.narrow_dtype import float8_e4m3
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_flag, check_integer
from cukit.core.support import Support
from cukit.core.tensor_map import TensorMapCache, encode_tensor_map
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.reference import mla_attention as reference
from cukit.reference.mla_attention import CODE_BYTES, GROUP, LATENT_DIM, ROPE_DIM, SCALE
from cukit.registry import register

_OP = "mla_attention"
_ENCODE = "encode_mla_latents"
_ABSORB = "absorb_mla_projections"
_ARCH = "sm_90"
_WIDTH = LATENT_DIM + ROPE_DIM
_KERNEL_DTYPES = FLOAT_DTYPES[1:3]
_CODES = np.dtype(np.uint8)
_MAX_HEADS = (1 << 15) - 1  # row indices of a request are 32-bit


def mla_attention(
    q: Array,
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    latent_dim: int = LATENT_DIM,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of each request's last queries over its latents in a paged cache.

        out = softmax(scale * q kv^T + mask) kv[..., :latent_dim]

    Multi-head latent attention with the up-projections absorbed
    (:func:`absorb_mla_projections`): a token is one row of the cache, [latent, rotated key], which
    all heads share as the key and, without the rotated part, as the value. Row `j` of request `b`
    is `kv_cache[block_table[b, j // 64], j % 64, 0]`.

    Args:
        q: float16|bfloat16 [batch, seq_len_q, num_heads, 576], C-contiguous, the first 512 columns
            multiplied by W_uk; on the CPU float32|float64 and other widths too. The queries of a
            request are the last seq_len_q of its tokens: 1 in a decode step, a few when draft
            tokens are verified. On the GPU q, kv_cache and out are 16-byte aligned.
        kv_cache: dtype of q, [num_blocks, 64, 1, 576], any block stride (on the GPU a positive
            multiple of 16 bytes); on the CPU any block size. Or uint8 [num_blocks, 64, 1, 656], FP8
            latents from :func:`encode_mla_latents`; then on the GPU q is bfloat16, and the tokens
            of a block are contiguous.
        block_table: int32 [batch, max_blocks], C-contiguous. Entries after a request's last key
            are not read.
        seq_lens: int32 [batch], the keys of each request, queries included; 0 for an unused row.
            Never read on the host.
        causal: mask the keys after each query's own key.
        scale: positive factor of the scores; default 1 / sqrt(192), for heads of 128 + 64 columns
            before absorption.
        latent_dim: columns of the cache that are values; 512 on the GPU.
        return_lse: also return the log-sum-exp, for `merge_attention_states`.
        out: output array; dtype of q, [batch, seq_len_q, num_heads, latent_dim], C-contiguous. It
            must not overlap the inputs.

    Returns:
        `out`, or `(out, lse)` with lse float32 [batch, num_heads, seq_len_q], natural logarithm.
        A query without keys gets zeros and -inf.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value; on the CPU also a length beyond the block table, or a block
            outside the cache.

    The kernel requires Hopper (sm_90); other GPUs run the reference. The pages of the batch are
    split evenly over the thread blocks, on the device, from `seq_lens`, so a captured graph replays
    with other lengths and tables. Partial results are reduced in a fixed order: repeated calls give
    the same bits. Runs on CuPy's current stream.
    Paper: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434.

    >>> import numpy as np, cukit as ck
    >>> cache = np.arange(2 * 4 * 6, dtype=np.float32).reshape(2, 4, 1, 6)   # two blocks of four
    >>> table, lengths = np.array([[1, 0]], np.int32), np.array([5], np.int32)
    >>> ck.mla_attention(np.zeros((1, 1, 3, 6), np.float32), cache, table, lengths, latent_dim=4)[
    ...     0, 0, 0
    ... ]
    array([26.4, 27.4, 28.4, 29.4], dtype=float32)
    """
    q, kv_cache, block_table, seq_lens, out = arrays = adopt(
        _OP, q, kv_cache, block_table, seq_lens, out
    )
    check_flag(_OP, "causal", causal)
    check_flag(_OP, "return_lse", return_lse)
    check_integer(_OP, "latent_dim", latent_dim, least=1)
    check_overlap(_OP, out, q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens)
    scale = SCALE if scale is None else scale
    if not runs_kernel(_OP, *arrays):
        _check(causal, scale, latent_dim, *arrays)
        check_table(_OP, kv_cache, block_table, seq_lens, q.shape[1])
        result, lse = reference.mla_attention(
            q,
            kv_cache,
            block_table,
            seq_lens,
            causal=causal,
            scale=scale,
            latent_dim=latent_dim,
            return_lse=True,
        )
        return (write_out(out, result), lse) if return_lse else write_out(out, result)
    attended: Array | tuple[Array, Array] = _prepare(causal, scale, latent_dim, *arrays)(
        *arrays, bool(return_lse)
    )
    return attended


class MlaMetadata(NamedTuple):
    """How :func:`mla_attention` partitions calls of one shape.

    thread_blocks: grid size, at most one block per SM.
    team: thread blocks that read the same pages at about the same time.
    row_tiles: tiles of 64 rows (queries times heads) per request.
    scratch_bytes: memory for partial results, allocated by each call.
    """

    thread_blocks: int
    team: int
    row_tiles: int
    scratch_bytes: int


def mla_metadata(num_heads: int, seq_len_q: int = 1) -> MlaMetadata:
    """How :func:`mla_attention` launches for requests of seq_len_q queries with num_heads heads.

    Informational: calls need no metadata. The partition depends only on shapes, and each thread
    block computes its share from seq_lens.

    Returns:
        MlaMetadata of the current device.

    Raises:
        ConfigError: num_heads or seq_len_q below 1.
        UnsupportedDeviceError: there is no GPU.

    >>> import cukit as ck
    >>> with ck.backend("emulator"):
    ...     ck.mla_metadata(128).row_tiles
    2
    """
    check_integer("mla_metadata", "num_heads", num_heads, least=1, most=_MAX_HEADS)
    check_integer("mla_metadata", "seq_len_q", seq_len_q, least=1, most=_MAX_HEADS)
    config = plan_mla_attention(int(num_heads), int(seq_len_q), "bfloat16", current_device())
    return MlaMetadata(config.num_blocks, config.team, config.row_tiles, 4 * config.scratch_floats)


def encode_mla_latents(latents: Array) -> Array:
    """Rows of a latent cache as FP8: 656 bytes per token instead of 1152.

    A row is 512 codes (float8_e4m3), 4 float32 scales (each the largest magnitude of 128 columns
    divided by 448) and the 64 rotated columns in bfloat16. Store the rows in a uint8 cache
    [num_blocks, 64, 1, 656] for :func:`mla_attention`.

    Args:
        latents: float32|float16|bfloat16 [..., 576]: 512 columns of latent, 64 of rotated key.

    Returns:
        uint8 [..., 656].

    Raises:
        ArrayError: dtype or shape of the argument.

    Runs on CuPy's current stream.

    >>> import numpy as np, cukit as ck
    >>> ck.encode_mla_latents(np.ones((3, 1, 576), np.float32)).shape
    (3, 1, 656)
    """
    (latents,) = adopt(_ENCODE, latents)
    check_array(_ENCODE, "latents", latents, dtypes=KERNEL_DTYPES, min_ndim=1, contiguous=None)
    *extents, _ = latents.shape
    check_array(
        _ENCODE, "latents", latents, shape=(*extents, LATENT_DIM + ROPE_DIM), contiguous=None
    )
    xp = namespace(latents)
    rows = latents.reshape(-1, LATENT_DIM + ROPE_DIM)
    values = xp.ascontiguousarray(rows[:, :LATENT_DIM], dtype=float32)
    groups = abs(values).reshape(len(rows), LATENT_DIM // GROUP, GROUP)
    scales = groups.max(axis=-1) / float32.type(float8_e4m3.most)
    codes = QuantizedArray.encode(values, float8_e4m3, scales=scales, axis=1, group_size=GROUP)
    rope = xp.ascontiguousarray(rows[:, LATENT_DIM:], dtype=bfloat16)
    parts = codes.storage, scales.view(xp.uint8), rope.view(xp.uint8)
    encoded: Array = xp.concatenate(parts, axis=1)
    return encoded.reshape(*extents, encoded.shape[1])


def absorb_mla_projections(w_q: Array, w_o: Array, w_uk: Array, w_uv: Array) -> tuple[Array, Array]:
    """Query and output projections for attention over latents in place of keys and values.

        score = (W_q x)^T (W_uk c) = (W_uk^T W_q x)^T c;    W_o (W_uv o) = (W_o W_uv) o

    The rotated columns of the queries are unchanged. Call this once, when weights are loaded.

    Args:
        w_q: float32|float16|bfloat16 (float64 on the CPU) [num_heads * (nope_dim + rope_dim),
            q_rank], C-contiguous; for each head the rows without rotation first.
        w_o: dtype of w_q, [hidden, num_heads * value_dim], C-contiguous.
        w_uk: dtype of w_q, [num_heads, nope_dim, latent_dim], keys from latents.
        w_uv: dtype of w_q, [num_heads, value_dim, latent_dim], values from latents.

    Returns:
        w_q [num_heads * (latent_dim + rope_dim), q_rank], which produces the queries of
        :func:`mla_attention`, and w_o [hidden, num_heads * latent_dim] for its output. w_q has
        (latent_dim + rope_dim) / (nope_dim + rope_dim) times as many elements as before, w_o
        latent_dim / value_dim times: for many tokens at a time, applying W_q and then W_uk per
        head is less work.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.

    Products are computed in float32 (float64 for float64) on the arrays' device, and rounded once.
    Paper: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434, section 2.1.2.

    >>> import numpy as np, cukit as ck
    >>> rng = np.random.default_rng(0)
    >>> shapes = (2 * (3 + 2), 7), (9, 2 * 4), (2, 3, 6), (2, 4, 6)
    >>> w_q, w_o = ck.absorb_mla_projections(*(rng.standard_normal(shape) for shape in shapes))
    >>> w_q.shape, w_o.shape
    ((16, 7), (9, 12))
    """
    w_q, w_o, w_uk, w_uv = arrays = adopt(_ABSORB, w_q, w_o, w_uk, w_uv)
    check_array(_ABSORB, "w_q", w_q, dtypes=FLOAT_DTYPES, ndim=2)
    check_array(_ABSORB, "w_uk", w_uk, dtypes=FLOAT_DTYPES, ndim=3)
    heads, nope, latent = w_uk.shape
    check_array(_ABSORB, "w_uv", w_uv, dtypes=FLOAT_DTYPES, shape=(heads, None, latent))
    check_array(_ABSORB, "w_o", w_o, dtypes=FLOAT_DTYPES, shape=(None, heads * w_uv.shape[1]))
    check_same_dtype(_ABSORB, w_q=w_q, w_o=w_o, w_uk=w_uk, w_uv=w_uv)
    if len({namespace(array) for array in arrays}) > 1:
        raise ArrayLayoutError(f"{_ABSORB}: all arrays must be on one device")
    if not heads or w_q.shape[0] % heads or w_q.shape[0] < heads * nope:
        raise ArrayShapeError(
            f"{_ABSORB}: w_q must have a multiple of num_heads = {heads} rows, at least nope_dim = "
            f"{nope} a head, got {w_q.shape}"
        )
    return reference.absorb_mla_projections(*arrays)


def _check(
    causal: bool,
    scale: float,
    latent_dim: int,
    q: Array,
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    out: Array | None,
) -> None:
    """Checks everything but the contents of the arrays."""
    score_options(_OP, causal, None, None, scale, None, None).check(_OP)
    check_array(_OP, "q", q, dtypes=FLOAT_DTYPES, ndim=4, contiguous=False)
    batch, _, heads, width = q.shape
    coded = _is_coded(kv_cache)
    shape = (None, None, 1, CODE_BYTES if coded else width)
    dtypes = (_CODES,) if coded else FLOAT_DTYPES
    check_array(_OP, "kv_cache", kv_cache, dtypes=dtypes, shape=shape, contiguous=False)
    if not coded:
        check_same_dtype(_OP, q=q, kv_cache=kv_cache)
    elif width != _WIDTH:
        raise ArrayShapeError(
            f"{_OP}: with float8 latents q must have {_WIDTH} columns, got {q.shape}"
        )
    if not heads or not kv_cache.shape[0] or not kv_cache.shape[1]:
        raise ArrayShapeError(
            f"{_OP}: the heads of q, and the blocks of kv_cache and their size, must not be 0, got "
            f"{q.shape} and {kv_cache.shape}"
        )
    if latent_dim > width:
        raise ConfigError(
            f"{_OP}: latent_dim must be at most the last axis of q, {width}, got {latent_dim}"
        )
    check_array(_OP, "block_table", block_table, dtypes=(int32,), shape=(batch, None))
    check_array(_OP, "seq_lens", seq_lens, dtypes=(int32,), shape=(batch,))
    if out is not None:
        shape = (*q.shape[:-1], latent_dim)
        check_array(_OP, "out", out, dtypes=(q.dtype,), shape=shape, contiguous=False)


def _is_coded(kv_cache: Array) -> bool:
    return getattr(kv_cache, "dtype", None) == _CODES


class PreparedMla(NamedTuple):
    """A checked and planned call, for arrays of the same shapes, strides and dtypes."""

    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scratch_floats: int
    q_map: TensorMapCache
    cache_map: TensorMapCache | None  # of 16-bit latents; FP8 latents are copied as bytes
    attend: Launch
    merge: Launch

    def __call__(
        self,
        q: Array,
        kv_cache: Array,
        block_table: Array,
        seq_lens: Array,
        out: Array | None,
        return_lse: bool,
    ) -> Array | tuple[Array, Array]:
        """Launches both kernels."""
        if out is None:
            out = empty(q, self.shape)
        lse = empty(q, self.lse_shape, np.float32) if return_lse else NULL
        if out.size:
            partial = empty(q, (self.scratch_floats,), np.float32)
            cache = kv_cache if self.cache_map is None else self.cache_map(kv_cache)
            self.attend(self.q_map(q), cache, out, lse, block_table, seq_lens, partial)
            self.merge(partial, out, lse, seq_lens)
        return (out, lse) if return_lse else out


def _plan_key(key: tuple[Any, ...]) -> Hashable:
    """`key` of a call, (device, causal, scale, latent_dim, arrays), without the numbers of requests
    and table columns, which change from step to step."""
    *settings, q, kv_cache, table, lengths, out = key
    if q is None or table is None or lengths is None or len(q[0]) != 4:
        return key
    batch, seq_q = q[0][:2]
    short = step_key(batch, q, out, table, (lengths, batch))
    arrays = (q, table) if out is None else (q, table, out)
    if short is None or not all(map(is_contiguous, arrays)):
        return key
    return *settings, seq_q, short, kv_cache


class _Planned(NamedTuple):
    """The loaded kernels of calls that differ in their requests only."""

    config: MlaConfig
    parameters: Any
    cache_map: TensorMapCache | None
    attend: Launches
    merge: Launches


def _planned(causal: bool, scale: float, latent_dim: int, *arrays: Any) -> _Planned:
    """Checks a call and loads its kernels."""
    _check(causal, scale, latent_dim, *arrays)
    q, kv_cache, _, _, out = arrays
    coded = _is_coded(kv_cache)
    check_array(_OP, "q", q, dtypes=(bfloat16,) if coded else _KERNEL_DTYPES)
    if out is not None:
        check_array(_OP, "out", out)
    check_addresses(_OP, out=out)
    if q.size:
        check_addresses(_OP, q=q, kv_cache=kv_cache)
    _, seq_q, heads, width = q.shape
    if (width, latent_dim, kv_cache.shape[1]) != (_WIDTH, LATENT_DIM, BLOCK_SIZE):
        raise ArrayShapeError(
            f"{_OP}: on the GPU, q must have {_WIDTH} columns, latent_dim must be {LATENT_DIM} and "
            f"blocks must have {BLOCK_SIZE} keys, got {q.shape}, {latent_dim} and {kv_cache.shape}"
        )
    outer = zip(kv_cache.strides, kv_cache.shape[:2], strict=False)
    if any(step % ACCESS_BYTES or step < 0 for step, extent in outer if extent > 1):
        raise ArrayLayoutError(
            f"{_OP}: strides of kv_cache must be positive multiples of {ACCESS_BYTES} bytes on "
            f"the GPU, got {kv_cache.strides}"
        )
    if coded and kv_cache.strides[1] != CODE_BYTES:
        raise ArrayLayoutError(
            f"{_OP}: the tokens of a block of kv_cache must be contiguous on the GPU, "
            f"got strides {kv_cache.strides}"
        )
    config = plan_mla_attention(
        heads, seq_q, q.dtype.name, current_device(), coded=coded, causal=causal
    )
    options = score_options(_OP, causal, None, None, scale, None, None)
    no_arrays = ScoreArrays(None, None, None, None, None, None)
    parameters = _PARAMETERS.pack(
        batch=0,
        heads_q=heads,
        seq_q=seq_q,
        problems=config.row_tiles,
        max_keys=0,
        table_row=0,
        cache_block=kv_cache.strides[0],
        scale_log2=scales_of(q, options)[1],
        settings=score_settings(q, options, no_arrays, (1, heads, seq_q, 1)),
    )
    return _Planned(
        config,
        parameters,
        None if coded else TensorMapCache(partial(_cache_map, box=config.page_box)),
        Launches(load_kernel(config.spec())),
        Launches(load_kernel(config.merge_spec()), dependent=True),
    )


@partial(launch_plan, plan=_planned, shorten=_plan_key)
def _prepare(
    planned: _Planned, causal: bool, scale: float, latent_dim: int, *arrays: Any
) -> PreparedMla:
    """The launches of a call."""
    q, _, block_table, _, _ = arrays
    config = planned.config
    batch, seq_q, heads, _ = q.shape
    columns = block_table.shape[1]
    parameters = by_value(  # of both launches
        _PARAMETERS.changed(
            planned.parameters, batch=batch, max_keys=columns * BLOCK_SIZE, table_row=columns
        )
    )
    units = config.units_per_merge_block(batch)
    merge_blocks = batch * config.row_tiles * (config.rows // units)
    merge_scalars = parameters, *int32s(config.num_blocks, units)
    return PreparedMla(
        shape=(*q.shape[:-1], latent_dim),
        lse_shape=(batch, heads, seq_q),
        scratch_floats=config.scratch_floats,
        q_map=TensorMapCache(partial(_query_map, box=config.query_box)),
        cache_map=planned.cache_map,
        attend=planned.attend((config.num_blocks,), (parameters,)),
        merge=planned.merge((merge_blocks,), merge_scalars),
    )


_PARAMETERS = parameter_structs(PARAMETERS)["LatentParameters"]


def _query_map(q: Array, box: tuple[int, int, int]) -> Any:
    """Boxes of rows (queries times heads), zero-filled after the last row of a request."""
    return encode_tensor_map(q.reshape(q.shape[0], -1, q.shape[-1]), box)


def _cache_map(kv_cache: Array, box: tuple[int, int, int]) -> Any:
    """Boxes of the tokens of a cache block."""
    return encode_tensor_map(kv_cache[:, :, 0], box)


def _specs(device: Device) -> list[KernelSpec]:
    """A representative set of variants: each dtype, mask and team size, and FP8 latents."""
    plans = [
        plan_mla_attention(heads, seq_q, dtype, device, coded=coded)
        for heads, seq_q, dtype, coded in (
            (16, 1, "bfloat16", False),
            (128, 1, "bfloat16", False),
            (128, 2, "bfloat16", True),
            (64, 3, "float16", False),
            (64, 1, "bfloat16", True),
        )
    ]
    return [spec for plan in plans for spec in (plan.spec(), plan.merge_spec())]


register(
    name=_OP,
    family="attention",
    function=mla_attention,
    reference=reference.mla_attention,
    specs=_specs,
    support=Support(_ARCH, _ARCH),
)
