"""Files that users name: read with one clear error, written whole or not at all.

A file is written beside its final name, flushed to the disk and renamed: a reader, or a machine
that loses power, sees the old file or the new one and never half of one. Named arrays are
safetensors files with a description and a checksum in the header.
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


def check_file(path: Path) -> None:
    """Raises DataError unless `path` is a file: one that exists, and ends."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a file")
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if not path.is_file():
        raise DataError(f"{path}: is a device or a pipe, not a file")


def read_bytes(path: Path) -> bytes:
    """The content of a file, or DataError."""
    try:
        check_file(path)
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_text(path: Path) -> str:
    """The content of a file of UTF-8 text, or DataError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error})") from error


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading JSON of another form than expected raises."""


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write to that takes the place of `path` once the block ends without an error.

    Links are followed. A device or a pipe is written to directly: nothing can take its place.
    Raises DataError where `path` is a folder or cannot be written.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a file")
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        # O_EXCL: never through a link that somebody else has put there.
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
    """One process at a time replaces a file: this one, as long as the object lives.

    The lock is on a file beside it, for the file itself is another one after each write. Raises
    DataError if another process has it, or if the folder cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._beside = path.with_name(f".{path.name}.lock")
        self._process = os.getpid()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while not self._acquire(path):
                pass  # the one before removed its lock in the meantime
        except OSError as error:
            raise DataError(f"{path}: cannot be written to ({error.strerror})") from error
        weakref.finalize(self, _unlock, self._descriptor, self._beside, self._process)

    def _acquire(self, path: Path) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._beside, flags, 0o600)
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
            if os.stat(self._beside).st_ino == os.fstat(self._descriptor).st_ino:
                return True
        os.close(self._descriptor)
        return False


def _unlock(descriptor: int, beside: Path, process: int) -> None:
    if os.getpid() == process:  # and not a forked child, whose descriptor is a copy
        beside.unlink(missing_ok=True)
    os.close(descriptor)


def write_text(path: Path, content: str) -> None:
    """A file of UTF-8 text, all or nothing."""
    with atomic_file(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, all or nothing."""
    write_text(path, json.dumps(value, indent=2) + "\n")


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
    """CRC-32 over names and bytes, in the order of the names."""
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(name.encode(), value)
        content = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        value = zlib.crc32(content.data, value)
    return value
