"""Quantisation: codes of a narrow dtype, with scales per block of values."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core.arrays import (
    ACCESS_BYTES,
    KERNEL_DTYPES,
    Array,
    address_of,
    adopt,
    check_array,
    empty,
    float16,
    float32,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.narrow_dtype import NarrowDtype, check_narrow_dtype, float8_e4m3, int4, int8
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.quantized_array import SCALE_DTYPES, Axis, GroupSize, QuantizedArray, scales_shape
from cukit.core.scalars import check_choice, check_dtype, check_flag
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.quantization._matrices import PARAMETERS, Matrices, matrices_of, scale_strides
from cukit.quantization._quantize_plan import (
    QuantizeConfig,
    Rounding,
    in_columns,
    plan_quantize,
)
from cukit.reference import quantize as reference
from cukit.registry import register

SCALE_LAYOUTS = ("row", "column")
_CLIPS = tuple(reference.CLIP_CANDIDATES)
_COLUMN_MULTIPLE = 4  # scales: TMA strides are multiples of 16 bytes


def quantize(
    x: Array,
    dtype: NarrowDtype,
    *,
    axis: Axis = -1,
    group_size: GroupSize = None,
    zero_points: bool = False,
    clip: str = "absmax",
    scale_dtype: Any = float32,
    power_of_two: bool = False,
    scale_layout: str = "row",
    out: QuantizedArray | None = None,
) -> QuantizedArray:
    """Quantises `x` to codes of `dtype`, with scales that cover the range of each block of values.

    Symmetric: scale = max|x| / most, code = round(x / scale), where most is 127 (int8), 7 (int4),
    448 (e4m3) or 57344 (e5m2). With zero points (integers): scale = (max(x, 0) - min(x, 0)) /
    (2 most + 1), zero_point = round(-min(x, 0) / scale) - most - 1, code = round(x / scale +
    zero_point).

    Args:
        x: float32|float16|bfloat16 [..., k], any layout.
        dtype: `ck.int8`, `ck.int4`, `ck.float8_e4m3` or `ck.float8_e5m2`.
        axis, group_size: which values share a scale, as for :class:`QuantizedArray`. Default: each
            row (a token, an output channel). `axis=None`: all values; `group_size=128`: groups of a
            row; `axis=(-2, -1), group_size=128`: tiles; `axis=-2`: each column.
        zero_points: also compute int8 zero points, in the shape of the scales.
        clip: `"absmax"` covers the whole range; `"mse"` (integers) tries 16 fractions of the range
            from 1 to 17/32 and keeps the fraction with the least squared error, which is several
            times slower.
        scale_dtype: float32, float16 or bfloat16. Codes are computed with the rounded scale.
        power_of_two: round scales up to powers of two (float32 and bfloat16 scales only).
        scale_layout: `"column"` stores float32 scales of groups of a row [..., k] as
            [ceil(k / group_size), rows], with rows zero-padded to a multiple of 4, as TMA requires;
            `scales` is a view of that array.
        out: a QuantizedArray to fill and return, as `quantize` would return it for the same
            options. It must not share memory with `x`.

    Returns:
        QuantizedArray of the shape of `x`; scales and zero points have one element per block.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: options that cannot be combined; int4 in groups of an odd length.

    A block of zeros has the scale 1, and so has a block whose scale would be below the smallest
    normal float32 (for float16 scales, below the smallest float16): its values become 0. A block
    with a NaN or an infinity has the scale NaN, so that all its values decode to NaN; other blocks
    are not affected. Rounds half to even; x / scale is computed as x * (1 / scale) in float32. Runs
    on CuPy's current stream without synchronisation; deterministic. With `out` it can be captured
    in a graph.

    Sources: LLM.int8() (Dettmers et al., 2022) for rows, GPTQ (Frantar et al., 2022) for groups,
    DeepSeek-V3 (2024) for tiles.

    >>> import numpy as np, cukit as ck
    >>> x = np.array([[0.5, -1.0, 0.25, 0.0], [4.0, 2.0, 0.0, -1.0]], np.float32)
    >>> array = ck.quantize(x, ck.int8)
    >>> array.storage
    array([[  64, -127,   32,    0],
           [ 127,   64,    0,  -32]], dtype=int8)
    >>> array.scales.round(4)
    array([[0.0079],
           [0.0315]], dtype=float32)
    """
    (x,) = adopt("quantize", x)
    check_array("quantize", "x", x, dtypes=KERNEL_DTYPES, min_ndim=1, contiguous=None)
    check_narrow_dtype("quantize", "dtype", dtype)
    check_flag("quantize", "zero_points", zero_points)
    check_flag("quantize", "power_of_two", power_of_two)
    check_choice("quantize", "clip", clip, _CLIPS)
    check_choice("quantize", "scale_layout", scale_layout, SCALE_LAYOUTS)
    scale_dtype = check_dtype("quantize", "scale_dtype", scale_dtype, SCALE_DTYPES)
    if out is not None:
        scale_dtype = _check_out(x, dtype, axis, group_size, zero_points, out)
    _check_together(dtype, zero_points, clip, scale_dtype, power_of_two, scale_layout)
    if out is None:
        out = _allocate(x, dtype, axis, group_size, zero_points, scale_dtype, scale_layout)
    block = out.block_shape
    assert block is not None
    assert out.scales is not None
    if not x.size:
        return out
    if not runs_kernel("quantize", x, out.storage):
        _matrices(x.shape, dtype, block, clip)
        codes, scales, zeros = reference.quantize(
            x, dtype.name, block, zero_points=zero_points, clip=clip,
            scale_dtype=out.scales.dtype, power_of_two=power_of_two,
        )  # fmt: skip
        out.storage[...] = codes
        out.scales[...] = scales
        if zeros is not None:
            out.zero_points[...] = zeros  # type: ignore[index]
        return out
    x = x if x.flags.c_contiguous else x.copy(order="C")
    arrays = (x, out.storage, out.scales, out.zero_points)
    _prepare(*arrays, dtype, block, clip, power_of_two)(*arrays)
    return out


def _check_together(
    dtype: NarrowDtype,
    zero_points: bool,
    clip: str,
    scale_dtype: np.dtype[Any],
    power_of_two: bool,
    scale_layout: str,
) -> None:
    if zero_points and not dtype.integer:
        raise ArrayDtypeError(f"quantize: zero_points are for integer dtypes, got {dtype.name}")
    if clip == "mse" and not dtype.integer:
        raise ArrayDtypeError(f"quantize: clip='mse' is for integer dtypes, got {dtype.name}")
    if power_of_two and scale_dtype == float16:
        raise ConfigError("quantize: power_of_two needs scales of float32 or bfloat16, got float16")
    if scale_layout == "column" and (scale_dtype != float32 or zero_points):
        raise ConfigError(
            "quantize: scale_layout='column' is for float32 scales without zero points, "
            f"got {scale_dtype.name}, zero_points={zero_points}"
        )


def _allocate(
    x: Array,
    dtype: NarrowDtype,
    axis: Axis,
    group_size: GroupSize,
    zero_points: bool,
    scale_dtype: np.dtype[Any],
    scale_layout: str,
) -> QuantizedArray:
    shape = scales_shape(x.shape, axis, group_size)
    if scale_layout == "row":
        scales = empty(x, shape, scale_dtype)
    else:
        *leading, columns = shape
        rows = int(np.prod(leading, dtype=np.int64))
        if tuple(leading) != x.shape[:-1]:
            raise ConfigError(
                "quantize: scale_layout='column' is for scales of rows or of groups of a row, "
                f"got axis={axis}, group_size={group_size}"
            )
        padded = -(-rows // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
        memory = empty(x, (columns, padded), scale_dtype)
        if padded > rows:
            memory[:, rows:] = 0
        scales = memory[:, :rows].T.reshape(shape)
    return QuantizedArray(
        empty(x, dtype.storage_shape(x.shape), dtype.storage_dtype),
        dtype,
        x.shape,
        scales,
        empty(x, shape, np.int8) if zero_points else None,
        axis,
        group_size,
    )


def _check_out(
    x: Array,
    dtype: NarrowDtype,
    axis: Axis,
    group_size: GroupSize,
    zero_points: bool,
    out: QuantizedArray,
) -> np.dtype[Any]:
    """Checks `out`; returns the dtype of its scales."""
    if not isinstance(out, QuantizedArray) or out.scales is None:
        raise ArrayDtypeError(f"quantize: out must be a QuantizedArray with scales, got {out!r}")
    expected = (dtype, x.shape, scales_shape(x.shape, axis, group_size), zero_points)
    got = (out.dtype, out.shape, out.scales.shape, out.zero_points is not None)
    if got != expected:
        raise ArrayShapeError(
            "quantize: out must have (dtype, shape, shape of the scales, zero points) "
            f"{expected}, got {got}"
        )
    if not out.storage.flags.c_contiguous:
        raise ArrayLayoutError("quantize: the codes of out must be C-contiguous")
    check_overlap("quantize", out.storage, name="the codes of out", x=x)
    check_overlap("quantize", out.scales, name="the scales of out", x=x)
    check_overlap("quantize", out.zero_points, name="the zero points of out", x=x)
    scale_dtype: np.dtype[Any] = out.scales.dtype
    return scale_dtype


def _matrices(
    shape: tuple[int, ...], dtype: NarrowDtype, block: tuple[int, ...], clip: str
) -> Matrices:
    """The kernels' view of `x`. Raises ConfigError for unsupported axes, and for int4 blocks that
    share a byte."""
    matrices = matrices_of(shape, block)
    if matrices is None:
        raise ConfigError(
            "quantize: axis must name the last axis, the axis before it, both, all axes or all but "
            f"the last, got blocks of shape {block} in an array of shape {shape}"
        )
    shares = matrices.block_cols * dtype.bits % 8 and matrices.block_cols < matrices.cols
    if shares and not in_columns(matrices, clip):
        raise ConfigError(
            f"quantize: groups of {dtype.name} along the last axis must have an even length (or "
            f"1, if several rows share a scale and clip is 'absmax'), got {block[-1]}"
        )
    return matrices


@launch_plan
def _prepare(
    x: Array,
    storage: Array,
    scales: Array,
    zero_points: Array | None,
    dtype: NarrowDtype,
    block: tuple[int, ...],
    clip: str,
    power_of_two: bool,
) -> Any:
    matrices = _matrices(x.shape, dtype, block, clip)
    strides = scale_strides(matrices, scales)
    if strides is None:
        raise ArrayLayoutError(
            f"quantize: the leading axes of out.scales must collapse, got strides {scales.strides}"
        )
    rounding = Rounding(
        dtype.name, x.dtype.name, scales.dtype.name, zero_points is not None, power_of_two, clip
    )
    vector = ACCESS_BYTES // x.itemsize
    aligned = (
        matrices.cols % vector == 0
        and (
            matrices.block_cols % vector == 0
            or matrices.block_cols == matrices.cols
            or in_columns(matrices, clip)
        )
        and address_of(x) % ACCESS_BYTES == 0
        and address_of(storage) % (vector * dtype.bits // 8) == 0
    )
    num_sms = current_device().num_sms
    config = plan_quantize(matrices, rounding, x.itemsize, num_sms, aligned=aligned)
    if config.kernel == "tensor":
        return _TensorLaunch(config, matrices, dtype)
    parameters = matrices.pack(dtype, strides)
    return Launch(load_kernel(config.specs()[0]), (config.num_blocks,), (parameters,))


class _TensorLaunch:
    """The two launches of quantize_tensor.cu, for arrays of one description (`launch_plan`)."""

    __slots__ = ("_codes", "_extremes", "_partial_shape")

    def __init__(self, config: QuantizeConfig, matrices: Matrices, dtype: NarrowDtype) -> None:
        size = matrices.size // matrices.num_blocks
        parameters = parameter_structs(PARAMETERS)["WholeTensors"].pack(
            size=size, code_bytes=size * dtype.bits // 8, parts=config.num_blocks
        )
        grid = (config.num_blocks, matrices.num_blocks)
        self._extremes, self._codes = (
            Launch(load_kernel(spec), grid, (parameters,)) for spec in config.specs()
        )
        extremes = 2 if config.rounding.zero_points else 1
        self._partial_shape = (matrices.num_blocks * config.num_blocks * extremes,)

    def __call__(self, x: Array, storage: Array, scales: Array, zero_points: Array | None) -> None:
        partial = empty(x, self._partial_shape, np.int32)
        self._extremes(x, partial)
        self._codes(x, storage, scales, zero_points, partial)


def _specs(device: Device) -> list[KernelSpec]:
    """Rows, groups, tiles, tensors and columns; zero points, clip search, both alignments."""

    def specs(
        narrow: NarrowDtype, block: tuple[int, int], *, aligned: bool = True, **options: Any
    ) -> tuple[KernelSpec, ...]:
        matrices = matrices_of((4096, 4096), block)
        assert matrices is not None
        dtype, itemsize = options.pop("source", ("bfloat16", 2))
        rounding = Rounding(narrow.name, dtype, options.pop("scales", "float32"), **options)
        return plan_quantize(matrices, rounding, itemsize, device.num_sms, aligned=aligned).specs()

    every = (
        specs(int8, (1, 4096)),
        specs(int8, (1, 4096), source=("float16", 2)),
        specs(int8, (1, 4096), source=("float32", 4)),
        specs(int8, (1, 4096), zero_points=True, aligned=False),
        specs(int8, (4096, 1)),
        specs(int4, (1, 128), scales="bfloat16"),
        specs(int4, (1, 32), scales="bfloat16", zero_points=True, clip="mse"),
        specs(int4, (1, 4096), clip="mse", aligned=False),
        specs(float8_e4m3, (1, 128)),
        specs(float8_e4m3, (128, 128), power_of_two=True),
        specs(float8_e4m3, (4096, 4096)),
    )
    return [spec for group in every for spec in group]


register(
    name="quantize",
    family="quantization",
    function=quantize,
    reference=reference.quantize,
    specs=_specs,
)
