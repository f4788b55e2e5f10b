"""Quantised arrays on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from cukit.core.arrays import Array, adopt, is_gpu_array
from cukit.core.device import gpu_available, require_cupy
from cukit.core.files import read_arrays, write_arrays
from cukit.core.narrow_dtype import NARROW_DTYPES
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_path
from cukit.errors import ConfigError, DataError, UnsupportedDeviceError

_BY_NAME = {dtype.name: dtype for dtype in NARROW_DTYPES}
# FP8 codes are stored with an FP8 dtype for other readers of the file; int4 codes as plain bytes.
_FLOAT8: dict[str, Any] = {
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
_PARTS = ("scales", "zero_points")


def save_quantized(
    path: str | Path,
    arrays: Mapping[str, QuantizedArray | Array],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes quantised and plain arrays to one safetensors file, atomically.

    path: of the file; an existing file is replaced.
    arrays: by name. A quantised array is stored as `name` (its codes), `name.scales` and
        `name.zero_points`; the file's header records which arrays belong together.
    metadata: any JSON-serialisable mapping; `load_quantized` returns it.
    Raises ConfigError if two names collide, DataError if the file cannot be written.

    >>> import numpy as np, cukit as ck, tempfile, pathlib
    >>> weight = ck.quantize(np.eye(4, dtype=np.float32), ck.int4, group_size=2)
    >>> path = pathlib.Path(tempfile.mkdtemp(), "weights.safetensors")
    >>> ck.save_quantized(path, {"weight": weight, "bias": np.zeros(4)}, {"step": 3})
    >>> arrays, metadata = ck.load_quantized(path)
    >>> arrays["weight"], metadata
    (QuantizedArray(int4, shape=(4, 4), scales=float32 (4, 2), axis=1, group_size=2), {'step': 3})
    """
    path = check_path("save_quantized", "path", path)
    if not isinstance(arrays, Mapping):
        raise ConfigError(f"save_quantized: arrays must be a mapping by name, got {arrays!r}")
    content: dict[str, np.ndarray[Any, Any]] = {}
    layouts: dict[str, dict[str, Any]] = {}

    def add(name: str, array: np.ndarray[Any, Any]) -> None:
        if name in content:
            raise ConfigError(f"save_quantized: two arrays would be named {name!r}")
        content[name] = np.ascontiguousarray(array)

    for name, array in arrays.items():
        if not isinstance(array, QuantizedArray):
            plain: Any = adopt("save_quantized", array)[0]
            add(name, plain.get() if is_gpu_array(plain) else plain)
            continue
        host = array.to_device("cpu")
        codes = np.ascontiguousarray(host.storage)
        add(name, codes.view(_FLOAT8.get(array.dtype.name, codes.dtype)))
        layouts[name] = {"dtype": array.dtype.name, "shape": array.shape}
        if host.scales is not None:
            layouts[name] |= {"axis": host.axis, "group_size": host.group_size}
        for part in _PARTS:
            if getattr(host, part) is not None:
                add(f"{name}.{part}", getattr(host, part))
    write_arrays(path, content, {"quantized": layouts, "metadata": dict(metadata or {})})


def load_quantized(
    path: str | Path, device: Literal["cpu", "gpu"] = "cpu"
) -> tuple[dict[str, QuantizedArray | Array], dict[str, Any]]:
    """Reads the arrays and the metadata that :func:`save_quantized` wrote.

    device: where to put the arrays, `"cpu"` or `"gpu"`.
    Raises DataError for a missing or damaged file or a file of another format,
    UnsupportedDeviceError if `device` is "gpu" and there is no GPU.
    """
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"load_quantized: device must be 'cpu' or 'gpu', got {device!r}")
    if device == "gpu" and not gpu_available():
        raise UnsupportedDeviceError("load_quantized: device='gpu', but no GPU is available")
    path = check_path("load_quantized", "path", path)
    content, description = read_arrays(path)
    try:
        layouts, metadata = description["quantized"], description["metadata"]
        arrays: dict[str, QuantizedArray | Array] = {}
        for name, layout in layouts.items():
            dtype = _BY_NAME[layout["dtype"]]
            codes = content.pop(name).view(dtype.storage_dtype)
            scales, zero_points = (content.pop(f"{name}.{part}", None) for part in _PARTS)
            arrays[name] = QuantizedArray(
                codes,
                dtype,
                layout["shape"],
                scales,
                zero_points,
                layout.get("axis"),
                layout.get("group_size"),
            )
    except KeyError as error:
        raise DataError(f"{path}: not a file of quantised arrays (no {error})") from error
    arrays |= content
    if device == "gpu":
        cupy = require_cupy("GPU arrays")
        for name, array in arrays.items():
            quantized = isinstance(array, QuantizedArray)
            arrays[name] = array.to_device("gpu") if quantized else cupy.asarray(array)
    return arrays, metadata
