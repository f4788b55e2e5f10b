"""NumPy-like functions, for scripts that run with and without a GPU.

`xp` is the array-API-standard namespace of this machine: CuPy's with a GPU, else NumPy's. The
creation functions place arrays on the default device, and `asarray` also takes the narrow dtypes.
`CUKIT_DEVICE=cpu` selects the CPU.
"""

from cukit.array_api.creation import (
    arange,
    asarray,
    default_device,
    empty,
    empty_like,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    to_numpy,
    xp_namespace,
    zeros,
    zeros_like,
)
from cukit.core.narrow_dtype import NarrowDtype, float8_e4m3, float8_e5m2, int4, int8
from cukit.core.quantized_array import QuantizedArray

NarrowArray = QuantizedArray
"""Former name of QuantizedArray without scales."""

__all__ = [
    "NarrowArray",
    "NarrowDtype",
    "QuantizedArray",
    "arange",
    "asarray",
    "default_device",
    "empty",
    "empty_like",
    "float8_e4m3",
    "float8_e5m2",
    "full",
    "full_like",
    "int4",
    "int8",
    "linspace",
    "ones",
    "ones_like",
    "to_numpy",
    "xp_namespace",
    "zeros",
    "zeros_like",
]
