"""Named arrays on disk: safetensors files with a description and a checksum in the header.

Files are written beside their final name, flushed to the disk and renamed: a reader, or a machine
that loses power, sees the old file or the new one and never half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from cukit.errors import DataError

HostArrays = Mapping[str, np.ndarray[Any, Any]]

# safetensors' own NumPy reader knows neither bfloat16 nor float8.
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write to that takes the place of `path` once the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, all or nothing."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_arrays(path: Path, arrays: HostArrays, description: Mapping[str, Any]) -> None:
    """One safetensors file with `arrays` and a JSON-ready `description`, all or nothing."""
    metadata = {
        "format": "cukit",
        "description": json.dumps(description),
        "crc32": str(_checksum(arrays)),
    }
    content = safetensors.numpy.save(dict(arrays), metadata)
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """What `write_arrays` wrote. Raises DataError if the file is absent, damaged or foreign."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        (header_bytes,) = struct.unpack_from("<Q", content)
        metadata = json.loads(content[8 : 8 + header_bytes]).get("__metadata__", {})
        arrays = {
            name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in entries
        }
    except (safetensors.SafetensorError, struct.error, ValueError, KeyError) as error:
        raise DataError(f"{path}: not a readable safetensors file ({error})") from error
    if metadata.get("format") != "cukit":
        raise DataError(f"{path}: was not written by cukit, so its description is unknown")
    if metadata.get("crc32") != str(_checksum(arrays)):
        raise DataError(f"{path}: damaged, its checksum does not match its content")
    return arrays, json.loads(metadata["description"])


def _checksum(arrays: HostArrays) -> int:
    """CRC-32 over names and bytes, in the order of the names."""
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(name.encode(), value)
        content = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        value = zlib.crc32(content.data, value)
    return value
