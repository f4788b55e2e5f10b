"""Linear layers with int4 or int8 weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_addresses,
    check_array,
    empty,
    float16,
    float32,
    runs_kernel,
    write_out,
)
from cukit.core.counters import zero_counters
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.narrow_dtype import float8_e4m3, int4, int8
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_dtype
from cukit.core.tensor_map import TensorMapCache, encode_tensor_map
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError
from cukit.gemm.quantized._weight_only_plan import (
    ROW_ELEMENTS,
    WeightOnlyConfig,
    plan_weight_only,
)
from cukit.gemm.quantized.weight_only_layout import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    PackedWeight,
    WeightDescription,
    pack_weight,
)
from cukit.reference import weight_only as reference
from cukit.registry import register

_PARAMETERS = parameter_structs("gemm/parameters.cuh")["WeightOnlyParameters"]
_OP = "quantized_linear"
_DTYPES = (float16, bfloat16)
_ARCH = "sm_90"
_FLOAT8_ELEMENTS = 16


def quantized_linear(
    x: Array | QuantizedArray,
    weight: PackedWeight | QuantizedArray,
    bias: Array | None = None,
    *,
    out: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """`out = x weight^T + bias` with an int4 or int8 weight that is decoded on the fly.

    Tensor cores multiply the codes minus their zero points exactly, and each group's sum is
    multiplied by its scale in float32: the result equals the product with the dequantised weight in
    float32, rounded once to the dtype of the result. For more than 64 tokens of 16-bit elements (32
    with groups of 32), Hopper's kernel first multiplies codes by their group's scale and rounds
    these products to the dtype of `x`. For many float8 tokens (from about 1400 at n = k = 8192) it
    expands a weight with groups of 128 to float8 in a temporary of 1.03 n k bytes.

    Args:
        x: float16|bfloat16 [..., k], C-contiguous; float32|float64 on the CPU only. If k is not a
            multiple of 8, a padded copy is made. Or a QuantizedArray of float8_e4m3 [m, k], k a
            multiple of 16, with float32 scales per row or per tensor, or without scales; GPUs other
            than Hopper then run the reference. Must be 16-byte aligned on the GPU.
        weight: [n, k], from `pack_weight` (for float8, with `x_dtype=float8_e4m3`). A
            QuantizedArray is packed by each call; pack it once instead.
        bias: dtype of the result, [n].
        out: array to write into; [..., n]. It must not overlap the inputs. On Hopper, it must be
            16-byte aligned if there are more than 48 tokens.
        out_dtype: of the result if `out` is not given: float16|bfloat16. Default: the dtype of `x`,
            or bfloat16 for float8.

    Returns:
        `out` or a new array, [..., n].

    Raises:
        ArrayError, ConfigError: dtype, shape or layout of an argument.

    An infinity or NaN in `x` makes the whole row of the result NaN or infinite, as in the product
    with the dequantised weight. Runs on CuPy's current stream. Accumulates in float32 in an order
    that depends only on shapes and device: deterministic. Related work: Frantar et al., "MARLIN:
    Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models".

    >>> import numpy as np, cukit as ck
    >>> scales = np.full((3, 1), 0.5, np.float16)
    >>> weight = ck.QuantizedArray.encode(np.ones((3, 64), np.float32), ck.int4, scales=scales,
    ...                                   axis=1, group_size=64)
    >>> ck.quantized_linear(np.ones((2, 64), np.float16), ck.pack_weight(weight))
    array([[64., 64., 64.],
           [64., 64., 64.]], dtype=float16)
    """
    token_scales = x_dtype = quantized_x = None
    if isinstance(x, QuantizedArray):
        _check_float8(x)
        quantized_x = x
        x, token_scales, x_dtype = x.storage, x.scales, x.dtype
    x, bias, out = adopt(_OP, x, bias, out)
    packed = pack_weight(weight, x_dtype=x_dtype) if isinstance(weight, QuantizedArray) else weight
    if not isinstance(packed, PackedWeight):
        raise ArrayError(
            f"{_OP}: weight must be a PackedWeight or a QuantizedArray, got {type(weight).__name__}"
        )
    if x is None:
        raise ArrayError(f"{_OP}: x must be an array or a QuantizedArray, got None")
    if out is not None:
        dtype = out.dtype
    elif out_dtype is not None:
        dtype = check_dtype(_OP, "out_dtype", out_dtype)
    else:
        dtype = x.dtype if x_dtype is None else bfloat16
    blocks, row_scales = packed.arrays
    parts = {"x.scales": token_scales, "weight": blocks, "weight.scales": row_scales}
    check_overlap(_OP, out, x=x, bias=bias, **parts)
    if not runs_kernel(_OP, x, blocks, bias, out) or not _has_kernel(packed.description):
        _check(x, bias, out, dtype, packed.description)
        result = reference.quantized_linear(
            x if quantized_x is None else quantized_x, packed.unpack(), bias, out_dtype=dtype
        )
        return write_out(out, result)
    launch = _prepare(x, token_scales, blocks, row_scales, bias, out, dtype, packed.description)
    if out is None:
        out = empty(x, (*x.shape[:-1], packed.shape[0]), dtype)
    if out.size:
        if packed.description.float8 and token_scales is None:
            token_scales = empty(x, (1, 1), float32)
            token_scales.fill(1)
        launch(x, token_scales, blocks, row_scales, bias, out)
    return out


def _has_kernel(weight: WeightDescription) -> bool:
    """Whether a kernel supports the weight; only Hopper's kernel supports float8 activations."""
    return not weight.float8 or current_device().arch == _ARCH


def _check_float8(x: QuantizedArray) -> None:
    if x.dtype != float8_e4m3:
        raise ArrayDtypeError(f"{_OP}: a quantised x must be float8_e4m3, got {x.dtype.name}")
    if x.ndim != 2:
        raise ArrayShapeError(f"{_OP}: a quantised x must have 2 axes, got shape {x.shape}")
    if x.scales is not None and (x.scales.dtype != float32 or x.scales.shape[1] != 1):
        raise ArrayError(
            f"{_OP}: scales of x must be float32, one per tensor or per row, "
            f"got {x.scales.dtype.name} {x.scales.shape}"
        )


class WeightOnlyLaunch:
    """A launch of a weight-only kernel; takes checked arrays."""

    __slots__ = ("_config", "_launch", "_map", "_out", "_padded")

    def __init__(self, config: WeightOnlyConfig, tokens: int, token_stride: int = 0) -> None:
        n, k = config.weight.shape
        columns = -(-k // ROW_ELEMENTS) * ROW_ELEMENTS
        parameters = _PARAMETERS.pack(
            tokens=tokens,
            rows=n,
            columns=columns,
            steps=config.weight.steps,
            raster_group=config.raster_group,
            token_stride=token_stride,
            whole_tiles=config.whole_tiles,
        )
        self._config = config
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
        self._padded = (tokens, columns) if k < columns else None
        tiling = config.tiling
        box = (tiling.tokens, 128 // config.weight.x_bytes)
        self._map = TensorMapCache(partial(_encode_rows, tokens=tokens, columns=k, box=box))
        self._out = TensorMapCache(
            partial(_encode_rows, tokens=tokens, columns=n, box=(tiling.piece_tokens, 64))
        )

    def __call__(
        self,
        x: Array,
        token_scales: Array | None,
        blocks: Array,
        row_scales: Array | None,
        bias: Array | None,
        out: Array,
    ) -> None:
        config = self._config
        if self._padded is not None:
            padded = empty(x, self._padded)
            k = config.weight.shape[1]
            padded[:, :k] = x.reshape(self._padded[0], -1)
            padded[:, k:] = 0
            x = padded
        pieces: Any = NULL
        counters: Any = NULL
        if config.shared_tiles:
            pieces = empty(x, (config.piece_bytes // 4,), float32)
            counters = zero_counters(x, config.counters)
        scales = NULL if row_scales is None else row_scales
        offsets = NULL if bias is None else bias
        if config.tiling.kernel == "few":
            self._launch(x, blocks, scales, offsets, out)
            return
        if config.tiling.kernel == "sm80":
            self._launch(x, blocks, scales, offsets, out, pieces, counters)
            return
        rows = self._map(x)
        self._launch(
            rows,
            self._out(out) if config.tiling.mapped_out else rows,
            blocks,
            scales,
            NULL if token_scales is None else token_scales,
            offsets,
            out,
            pieces,
            counters,
        )


class ExpandedLaunch:
    """A launch of weight_expanded_sm90.cu; called like WeightOnlyLaunch."""

    __slots__ = ("_config", "_launch", "_out", "_x")

    def __init__(self, config: WeightOnlyConfig, tokens: int, token_stride: int = 0) -> None:
        weight, tiling = config.weight, config.tiling
        n, k = weight.shape
        parameters = _PARAMETERS.pack(
            tokens=tokens,
            rows=n,
            columns=k,
            steps=weight.steps,
            raster_group=config.raster_group,
            token_stride=token_stride,
            whole_tiles=config.whole_tiles,
        )
        self._config = config
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
        rows = partial(_encode_rows, tokens=tokens)
        self._x = TensorMapCache(partial(rows, columns=k, box=(tiling.tokens, BLOCK_COLUMNS)))
        self._out = TensorMapCache(partial(rows, columns=n, box=(tiling.piece_tokens, BLOCK_ROWS)))

    def __call__(
        self,
        x: Array,
        token_scales: Array | None,
        blocks: Array,
        row_scales: Array | None,
        bias: Array | None,
        out: Array,
    ) -> None:
        config = self._config
        expanded = empty(x, (config.expanded_bytes,), np.dtype(np.uint8))
        counters = empty(x, (config.expanded_counters,), np.dtype(np.int32))
        counters.fill(0)
        offsets = NULL if bias is None else bias
        self._launch(self._x(x), self._out(out), blocks, token_scales, offsets, expanded, counters)


def _encode_rows(array: Array, *, tokens: int, columns: int, box: tuple[int, int]) -> Any:
    """A tensor map of the first `columns` columns of the array, which has `tokens` rows."""
    return encode_tensor_map(array.reshape(tokens, -1)[:, :columns], box)


@launch_plan
def _prepare(
    x: Array,
    token_scales: Array | None,
    blocks: Array,
    row_scales: Array | None,
    bias: Array | None,
    out: Array | None,
    dtype: np.dtype[Any],
    weight: WeightDescription,
) -> WeightOnlyLaunch | ExpandedLaunch:
    _check(x, bias, out, dtype, weight)
    if dtype not in _DTYPES:
        raise ArrayDtypeError(f"{_OP}: the result must be float16 or bfloat16, got {dtype.name}")
    if token_scales is not None:
        check_array(_OP, "the scales of x", token_scales, dtypes=(float32,))
    check_addresses(_OP, x=x)
    tokens = math.prod(x.shape[:-1])
    config = plan_weight_only(max(tokens, 1), weight, dtype.name, current_device())
    if config.tiling.mapped_out:
        check_addresses(_OP, out=out)
    stride = int(token_scales is not None and token_scales.shape[0] > 1)
    launch = ExpandedLaunch if config.tiling.kernel == "expanded" else WeightOnlyLaunch
    return launch(config, tokens, stride)


def _check(
    x: Array, bias: Array | None, out: Array | None, dtype: np.dtype[Any], weight: WeightDescription
) -> None:
    n, k = weight.shape
    if weight.float8 != (x.dtype == np.uint8):
        packed_for = "float8_e4m3" if weight.float8 else "16-bit elements"
        raise ArrayDtypeError(
            f"{_OP}: the weight is packed for x of {packed_for}, got "
            f"{'float8_e4m3' if x.dtype == np.uint8 else x.dtype.name}"
        )
    if x.ndim == 0 or x.shape[-1] != k:
        raise ArrayShapeError(f"{_OP}: x must have shape (..., {k}), got {x.shape}")
    if weight.float8 and k % _FLOAT8_ELEMENTS:
        raise ArrayShapeError(
            f"{_OP}: k must be a multiple of {_FLOAT8_ELEMENTS} for float8, got {k}"
        )
    check_array(_OP, "x", x, dtypes=(np.dtype(np.uint8),) if weight.float8 else FLOAT_DTYPES)
    if not weight.float8 and x.dtype != dtype:
        raise ArrayDtypeError(
            f"{_OP}: the result must have the dtype of x ({x.dtype.name}), got {dtype.name}"
        )
    check_dtype(_OP, "out_dtype" if out is None else "out", dtype)
    for name, array, shape in (("bias", bias, (n,)), ("out", out, (*x.shape[:-1], n))):
        if array is not None:
            check_array(_OP, name, array, dtypes=(dtype,), shape=shape)


def _specs(device: Device) -> list[KernelSpec]:
    size = (8192, 8192)
    weights = [
        WeightDescription(int4, size, 128, bfloat16, False),
        WeightDescription(int4, size, 64, float16, True),
        WeightDescription(int4, size, 32, float32, True),
        WeightDescription(int8, size, None, bfloat16, False),
        WeightDescription(int8, size, 128, bfloat16, False),
    ]
    if device.arch == _ARCH:
        weights.append(WeightDescription(int4, size, 128, bfloat16, True, float8=True))
    return [
        plan_weight_only(tokens, weight, dtype.name, device).spec()
        for weight in weights
        for dtype in _DTYPES
        for tokens in (1, 32, 64, 1024, *((4096,) if weight.float8 else ()))
    ]


register(
    name=_OP,
    family="gemm",
    function=quantized_linear,
    reference=reference.quantized_linear,
    specs=_specs,
)
