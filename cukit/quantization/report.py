"""The error of quantised arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.core.arrays import FLOAT_DTYPES, Array, adopt, check_array, is_gpu_array, namespace
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayError, ArrayLayoutError

_CHUNK = 1 << 26
"""Values compared at a time. The temporary arrays are several float32 copies of these values and
one float64 copy."""


@dataclass(frozen=True)
class QuantizationReport:
    """The error of quantised values q relative to the original x.

    sqnr_db: signal-to-quantisation-noise ratio, 10 log10(sum x^2 / sum (x - q)^2); infinite if no
        value changed.
    max_error: largest |x - q|.
    relative_error: ||x - q|| / ||x|| (Frobenius norms); 0 if x and q are both 0.
    bits_per_value: total size of codes, scales and zero points, per value.
    """

    sqnr_db: float
    max_error: float
    relative_error: float
    bits_per_value: float

    def __str__(self) -> str:
        return (
            f"SQNR {self.sqnr_db:.2f} dB, max error {self.max_error:.3g}, relative error "
            f"{self.relative_error:.3g}, {self.bits_per_value:.2f} bits a value"
        )


def quantization_report(array: QuantizedArray, x: Array) -> QuantizationReport:
    """Compares the values of `array` with the original `x`.

    array: QuantizedArray [..., k].
    x: float32|float16|bfloat16|float64 [..., k], on the same device.
    Accumulates in float64; any NaN makes the errors NaN. Synchronises with the device. Raises
    ArrayError if the arguments do not match.

    >>> import numpy as np, cukit as ck
    >>> x = np.linspace(-1, 1, 256, dtype=np.float32).reshape(2, 128)
    >>> print(ck.quantization_report(ck.quantize(x, ck.int4, group_size=32), x))
    SQNR 26.20 dB, max error 0.0706, relative error 0.049, 5.00 bits a value
    """
    if not isinstance(array, QuantizedArray):
        raise ArrayError(
            f"quantization_report: array must be a QuantizedArray, got {type(array).__name__}"
        )
    (x,) = adopt("quantization_report", x)
    check_array(
        "quantization_report", "x", x, dtypes=FLOAT_DTYPES, shape=array.shape, contiguous=False
    )
    if is_gpu_array(x) != is_gpu_array(array.storage):
        raise ArrayLayoutError("quantization_report: array and x must be on the same device")
    xp: Any = namespace(x)
    signal = noise = worst = 0.0
    for part, values in _chunks(array, x):
        error = values - part
        signal += float(xp.square(part, dtype=np.float64).sum())
        noise += float(xp.square(error, dtype=np.float64).sum())
        worst = float(np.maximum(worst, float(abs(error).max())))
    ratio = noise / signal if signal else (math.inf if noise else 0.0)
    with np.errstate(divide="ignore"):
        sqnr_db = -10 * float(np.log10(ratio))
    return QuantizationReport(
        sqnr_db=sqnr_db,
        max_error=worst,
        relative_error=math.sqrt(ratio),
        bits_per_value=8 * array.nbytes / max(1, array.size),
    )


def _chunks(array: QuantizedArray, x: Array) -> Any:
    """Pairs of a part of x and its quantised values."""
    if not array.size:
        return
    step = array.shape[0]
    if array.ndim > 1 and array.size > _CHUNK:
        rows = array.block_shape[0] if array.block_shape else 1
        step = max(1, _CHUNK * array.shape[0] // array.size // rows) * rows
    for start in range(0, array.shape[0], step):
        whole = step >= array.shape[0]
        part = x if whole else x[start : start + step]
        wide = np.float64 if x.dtype == np.float64 else np.float32
        yield part.astype(wide), (array if whole else array[start : start + step]).decode()
