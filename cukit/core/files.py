"""Reads and writes user files: one clear error on failure, atomic writes.

A file is written under a temporary name in the same folder, flushed to disk and renamed, so that
readers see either the old or the new file, even after a power loss. Named arrays are stored in
safetensors files, with a description and a checksum in the header.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import struct
import weakref
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

# The NumPy reader of safetensors supports neither bfloat16 nor FP8.
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def check_file(path: Path) -> None:
    """Raises DataError unless `path` is an existing regular file."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a file")
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if not path.is_file():
        raise DataError(f"{path}: is a device or a pipe, not a file")


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises DataError."""
    try:
        check_file(path)
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_text(path: Path) -> str:
    """The content of a UTF-8 text file. Raises DataError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error})") from error


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions that reading malformed JSON can raise."""


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path, renamed to `path` when the block ends without an error.

    Symbolic links are followed. A device or a pipe is written directly, because a rename would
    replace it with a regular file. Raises DataError if `path` is a folder or cannot be written.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a file")
    target = Path(os.path.realpath(path))
    is_special = target.exists() and not target.is_file()
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        if is_special:
            yield target
            return
        # O_EXCL: does not follow a symbolic link that another user has created.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


class Exclusive:
    """A lock that lets only this process replace a file, held for the lifetime of the object.

    It is taken on a separate lock file, because every write replaces the file itself. Raises
    DataError if another process holds the lock, or if the folder is not writable.
    """

    def __init__(self, path: Path) -> None:
        self._lock_path = path.with_name(f".{path.name}.lock")
        self._process = os.getpid()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while not self._acquire(path):
                pass  # the previous holder removed the lock file in the meantime
        except OSError as error:
            raise DataError(f"{path}: cannot be written to ({error.strerror})") from error
        weakref.finalize(self, _unlock, self._descriptor, self._lock_path, self._process)

    def _acquire(self, path: Path) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._lock_path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise DataError(
                f"{path}: another run is writing there; wait for it, or use another file"
            ) from None
        except OSError:
            return True  # a network folder without locks
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._lock_path).st_ino == os.fstat(self._descriptor).st_ino:
                return True
        os.close(self._descriptor)
        return False


def _unlock(descriptor: int, lock_path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child, whose descriptor is a copy
        lock_path.unlink(missing_ok=True)
    os.close(descriptor)


def write_text(path: Path, content: str) -> None:
    """Writes a UTF-8 text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_arrays(path: Path, arrays: HostArrays, description: Mapping[str, Any]) -> None:
    """Writes `arrays` and a JSON-serialisable `description` to a safetensors file, atomically.

    Raises DataError if the file cannot be written or has no name for the dtype of an array.
    """
    for name, array in arrays.items():
        if array.dtype not in _DTYPES.values():
            raise DataError(f"{path}: array {name} has dtype {array.dtype}, which is not supported")
    metadata = {
        "format": "cukit",
        "description": json.dumps(description),
        "crc32": str(_checksum(arrays)),
    }
    content = safetensors.numpy.save(dict(arrays), metadata)
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Arrays and description of a file written by `write_arrays`.

    Raises DataError if the file is missing, damaged or was written by another program.
    """
    content = read_bytes(path)
    try:
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        (header_bytes,) = struct.unpack_from("<Q", content)
        metadata = json.loads(content[8 : 8 + header_bytes]).get("__metadata__", {})
        arrays = {
            name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in entries
        }
    except (safetensors.SafetensorError, struct.error, *_DAMAGE) as error:
        raise DataError(f"{path}: not a readable safetensors file ({error})") from error
    if metadata.get("format") != "cukit":
        raise DataError(f"{path}: was not written by cukit, so its description is unknown")
    if metadata.get("crc32") != str(_checksum(arrays)):
        raise DataError(f"{path}: damaged, its checksum does not match its content")
    try:
        return arrays, dict(json.loads(metadata["description"]))
    except _DAMAGE as error:
        raise DataError(f"{path}: damaged, its description is unreadable ({error!r})") from error


def _checksum(arrays: HostArrays) -> int:
    """CRC-32 over names and bytes, sorted by name."""
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(name.encode(), value)
        content = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        value = zlib.crc32(content.data, value)
    return value
